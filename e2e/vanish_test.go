package e2e_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
)

// flat calls f and expects the node's descriptors and goroutines, and the
// descriptors of the sandboxes' guests, to come back to what they were.
func (n *node) flat(t *testing.T, f func()) {
	t.Helper()
	n.transport.CloseIdleConnections()
	n.settle(t)
	guests := slices.DeleteFunc(n.guests(), func(pid int) bool { return !entered(pid) })
	measure := func() (fds, routines int) { return n.metric(t, "process_open_fds"), n.metric(t, "go_goroutines") }
	inside := func() (sum int) {
		for _, pid := range guests {
			fds, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
			sum += len(fds)
		}
		return sum
	}
	fds, routines := measure()
	before := inside()
	f()
	n.transport.CloseIdleConnections()
	var now [3]int
	if !until(func() bool {
		now[0], now[1] = measure()
		now[2] = inside()
		return now[0] <= fds && now[1] <= routines && now[2] <= before
	}) {
		t.Errorf("descriptors, goroutines, descriptors inside: %d %d %d became %v", fds, routines, before, now)
	}
}

// entered reports whether a guest has a sandbox's root. One of the pool, which
// may still be getting its descriptors, has the holder's.
func entered(pid int) bool {
	var fs unix.Statfs_t
	err := unix.Statfs(fmt.Sprintf("/proc/%d/root", pid), &fs)
	return err == nil && fs.Type == unix.OVERLAYFS_SUPER_MAGIC
}

// raw is a request as bytes, so that it can be broken off anywhere.
func (n *node) raw(method, kind string, sandbox dsec.SandboxID, body []byte) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "POST /dsec.v1.%s HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nContent-Type: %s\r\n", method, n.listen, n.token, kind)
	if sandbox != "" {
		fmt.Fprintf(&b, "Dsec-Sandbox: %s\r\n", sandbox)
	}
	fmt.Fprintf(&b, "Content-Length: %d\r\n\r\n", len(body))
	b.Write(body)
	return b.Bytes()
}

// frame envelopes a message of a stream.
func frame(msg string) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(msg))), msg...)
}

// TestClientsVanish breaks off each kind of request at each stage: in its head,
// in its body, before the answer, in the answer; by an end and by a reset.
// Nothing of it stays, and nothing half done is seen.
func TestClientsVanish(t *testing.T) {
	n := shared(t)
	sb := n.create(t, plain())
	yes := n.begin(t, sb.ID, dsec.Command{Argv: []string{"yes"}})
	quiet := n.begin(t, sb.ID, dsec.Command{Argv: []string{"cat"}, Stdin: dsec.StdinPipe})
	_, err := n.Files.Write(ctx(t), on(sb.ID), dsec.FileOp{Path: "/large"}, dsec.WriteOptions{}, bytes.NewReader(make([]byte, 8<<20)))
	must(t, err)
	const unary, stream = "application/json", "application/connect+json"
	half := func(s string) []byte { // a first message, then one that never ends
		return append(frame(s), append([]byte{0, 0, 1, 0, 0}, bytes.Repeat([]byte(" "), 1000)...)...)
	}
	spec := `{"spec":{"environment":{"base":"busybox"},"labels":{"test":"vanish"}}}`
	requests := map[string][]byte{
		"create":        n.raw("Sandboxes/Create", unary, "", []byte(spec)),
		"list":          n.raw("Sandboxes/List", unary, "", []byte(`{}`)),
		"wait sandbox":  n.raw("Sandboxes/Wait", unary, sb.ID, []byte(`{}`)),
		"run":           n.raw("Commands/Run", unary, sb.ID, []byte(`{"command":{"shell":"echo x; sleep 0.2"}}`)),
		"start":         n.raw("Commands/Start", unary, sb.ID, []byte(`{"command":{"argv":["true"]}}`)),
		"wait":          n.raw("Commands/Wait", unary, sb.ID, []byte(`{"id":"`+string(quiet.ID)+`"}`)),
		"write":         n.raw("Commands/Write", unary, sb.ID, []byte(`{"id":"`+string(quiet.ID)+`"}`)),
		"attach, busy":  n.raw("Commands/Attach", stream, sb.ID, frame(`{"id":"`+string(yes.ID)+`"}`)),
		"attach, quiet": n.raw("Commands/Attach", stream, sb.ID, frame(`{"id":"`+string(quiet.ID)+`"}`)),
		"download":      n.raw("Files/Read", stream, sb.ID, frame(`{"file":{"path":"/large"}}`)),
		"upload":        n.raw("Files/Write", stream, sb.ID, half(`{"file":{"path":"/half"},"data":"YWJj"}`)),
		"pack":          n.raw("Files/Pack", stream, sb.ID, frame(`{"file":{"path":"/"}}`)),
		"unpack":        n.raw("Files/Unpack", stream, sb.ID, half(`{"file":{"path":"/unpacked"}}`)),
		"watch":         n.raw("Files/Watch", stream, sb.ID, frame(`{"file":{"path":"/tmp"}}`)),
		"import":        n.raw("Images/Upload", stream, "", half(`{"options":{"name":"half"},"data":"YWJj"}`)),
		"nothing":       []byte("POST /dsec.v1.Sandboxes/List HTTP/1.1\r\n"),
		"no http":       bytes.Repeat([]byte{0xff, 0}, 2000),
	}
	n.flat(t, func() {
		var wg sync.WaitGroup
		slots := make(chan struct{}, 16)
		for _, req := range requests {
			body := max(bytes.Index(req, []byte("\r\n\r\n")), 0) + 4
			for _, at := range []int{1, body / 2, body, (body + len(req)) / 2, len(req) - 1, len(req)} {
				for _, reset := range []bool{false, true} {
					for _, read := range []int{0, 1, 300} {
						if read > 0 && at < len(req) {
							continue // there is no answer yet
						}
						slots <- struct{}{}
						wg.Go(func() {
							defer func() { <-slots }()
							vanish(t, n.listen, req[:min(at, len(req))], read, reset)
						})
					}
				}
			}
		}
		wg.Wait()
		// Sandboxes of creates that were done before the client went away are
		// real: it could have asked again by its key, here they are stopped.
		l, err := n.Sandboxes.List(ctx(t), dsec.Filter{Labels: map[string]string{"test": "vanish"}})
		must(t, err)
		for _, sb := range l {
			n.stop(t, sb.ID)
		}
	})
	for _, path := range []string{"/half", "/unpacked/half"} {
		_, err := n.Files.Stat(ctx(t), on(sb.ID), dsec.FileOp{Path: path})
		wantKind(t, path, err, dsec.NotFound)
	}
	_, err = n.Images.Inspect(ctx(t), "half")
	wantKind(t, "the half image", err, dsec.NotFound)
	if out := n.sh(t, sb.ID, "ls -a / /tmp"); strings.Contains(string(out.Out), ".dsec") {
		t.Errorf("temporary files are left: %q", out.Out)
	}
}

// vanish sends a part of a request, reads a part of the answer and goes away.
func vanish(t *testing.T, address string, part []byte, read int, reset bool) {
	c, err := net.Dial("tcp", address)
	if err != nil {
		t.Error(err)
		return
	}
	defer c.Close()
	if reset {
		c.(*net.TCPConn).SetLinger(0) //nolint:errcheck // then it is an end
	}
	if _, err := c.Write(part); err != nil {
		return // it was refused early
	}
	if read > 0 {
		c.SetReadDeadline(time.Now().Add(300 * time.Millisecond)) //nolint:errcheck // a wait has no answer to read
		io.ReadFull(c, make([]byte, read))                        //nolint:errcheck // as much as there is
	}
}

// TestAbandonedCalls starts many calls and drops each. The commands run on, as
// promised, and can be found and ended; what served the calls is gone.
func TestAbandonedCalls(t *testing.T) {
	n := shared(t)
	sb := n.create(t, plain())
	n.sh(t, sb.ID, "true")
	const many = 150
	n.flat(t, func() {
		var wg sync.WaitGroup
		c, cancel := context.WithCancel(ctx(t))
		for range many {
			wg.Go(func() {
				_, err := n.Commands.Run(c, on(sb.ID), dsec.Command{Shell: "echo here; exec sleep 1000"}, nil)
				wantKind(t, "an abandoned call", err, dsec.Canceled)
			})
		}
		running := func() (out []dsec.CommandID) {
			l, err := n.Commands.List(ctx(t), on(sb.ID))
			must(t, err)
			for _, st := range l {
				if st.Outcome == dsec.StillRunning && st.Stdout.Total > 0 {
					out = append(out, st.ID)
				}
			}
			return out
		}
		eventually(t, "all run", func() bool { return len(running()) == many })
		cancel()
		wg.Wait()
		if l := running(); len(l) != many {
			t.Errorf("%d run on, want %d", len(l), many)
		}
		for _, id := range running() {
			must(t, n.Commands.Signal(ctx(t), on(sb.ID), id, "KILL"))
		}
		eventually(t, "all have ended", func() bool { return len(running()) == 0 })
	})
	if out := n.sh(t, sb.ID, "ps | grep -c '[s]leep 1000'"); string(out.Out) != "0\n" {
		t.Errorf("%q are left", out.Out)
	}
}

// TestByHand is a whole session in plain HTTP and JSON, as curl would have it.
func TestByHand(t *testing.T) {
	n := shared(t)
	tr := &http.Transport{DisableKeepAlives: true}
	post := func(method, sandbox, body string, headers ...string) (int, string) {
		t.Helper()
		req, err := http.NewRequestWithContext(ctx(t), http.MethodPost, n.url+"/dsec.v1."+method, strings.NewReader(body))
		must(t, err)
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Authorization", "Bearer "+n.token)
		if sandbox != "" {
			req.Header.Set("Dsec-Sandbox", sandbox)
		}
		for i := 0; i+1 < len(headers); i += 2 {
			req.Header.Set(headers[i], headers[i+1])
		}
		res, err := tr.RoundTrip(req)
		must(t, err)
		defer res.Body.Close()
		b, err := io.ReadAll(res.Body)
		must(t, err)
		return res.StatusCode, strings.ReplaceAll(string(b), " ", "")
	}
	status, body := post("Sandboxes/Create", "", `{"spec":{"environment":{"base":"busybox"},"resources":{"memory":"67108864","pids":64},"ttl":"600s"}}`)
	_, rest, _ := strings.Cut(body, `"id":"`)
	id, _, _ := strings.Cut(rest, `"`)
	if status != 200 || !strings.Contains(body, `"state":"running"`) || !strings.HasPrefix(id, "sb") {
		t.Fatalf("create: %d %s", status, body)
	}
	t.Cleanup(func() { n.stop(t, dsec.SandboxID(id)) })
	for _, c := range []struct {
		method, sandbox, body string
		headers               []string
		status                int
		want                  []string
	}{
		{"Commands/Run", id, `{"command":{"argv":["echo","é"]}}`, nil, 200, []string{`"outcome":"exited"`, `"stdout":"w6kK"`}},
		{"Commands/Run", id, `{"command":{"shell":"echo out; sleep 1000","timeout":"0.2s"}}`, nil, 200, []string{`"outcome":"timeout"`, `"code":124`, `"stdout":"b3V0Cg=="`}},
		{"Commands/Run", id, `{"command":{"argv":["nothing"]}}`, nil, 200, []string{`"outcome":"not-started"`, `"code":127`}},
		{"Commands/Run", id, `{"command":{"shell":"echo once"}}`, []string{"Dsec-Step", "s:1"}, 200, []string{`"stdout":"b25jZQo="`}},
		{"Commands/Run", id, `{"command":{"shell":"echo once"}}`, []string{"Dsec-Step", "s:1"}, 200, []string{`"replayed":true`}},
		{"Commands/Run", id, `{"command":{"shell":"echo other"}}`, []string{"Dsec-Step", "s:1"}, 0, []string{`"kind":"diverged"`}},
		{"Commands/Run", id, `{"command":{}}`, nil, 400, []string{`"code":"invalid_argument"`}},
		{"Commands/Run", id, `{"command":{"argv":["true"],"user":"no-such"}}`, nil, 400, []string{`no-such`}},
		{"Commands/Run", id, `{"command":{"argv":["true"],"misspelt":1}}`, nil, 400, []string{`misspelt`, `"code":"invalid_argument"`}},
		{"Commands/Run", id, `not json`, nil, 400, []string{`"code":"invalid_argument"`}},
		{"Commands/Wait", id, `{"id":"c999"}`, nil, 404, []string{`"code":"not_found"`}},
		{"Commands/Run", "sbnothing", `{"command":{"argv":["true"]}}`, nil, 404, []string{`"code":"not_found"`}},
		{"Commands/Run", "", `{"command":{"argv":["true"]}}`, nil, 400, []string{`"code":"invalid_argument"`}},
		{"Sandboxes/Create", "", `{"spec":{"environment":{"base":"none"}}}`, nil, 404, []string{`"code":"not_found"`}},
		{"Sandboxes/Create", "", `{"spec":{"environment":{"base":"busybox"},"resources":{"memory":"1"}}}`, nil, 400, []string{`memory`}},
		{"Sandboxes/Get", id, `{}`, []string{"Authorization", "Bearer wrong"}, 401, []string{`"code":"unauthenticated"`}},
		{"Sandboxes/NoSuch", id, `{}`, nil, 501, []string{`"code":"unimplemented"`}},
		{"Sandboxes/Stop", id, `{}`, nil, 200, []string{`"state":"stopped"`, `"cause":"user"`}},
		{"Commands/Run", id, `{"command":{"argv":["true"]}}`, nil, 0, []string{`"kind":"conflict"`}},
	} {
		status, body := post(c.method, c.sandbox, c.body, c.headers...)
		if c.status != 0 && status != c.status || c.status == 0 && status < 400 || status == 422 || status >= 500 && status != c.status {
			t.Errorf("%s %s: %d %s, want %d", c.method, c.body, status, body, c.status)
		}
		for _, w := range c.want {
			if !strings.Contains(body, w) {
				t.Errorf("%s %s: %s has no %s", c.method, c.body, body, w)
			}
		}
	}
	if status, body := n.get(t, "/healthz"); status != 200 || !strings.Contains(body, `"status":"ok"`) {
		t.Errorf("health: %d %s", status, body)
	}
	if status, body := n.get(t, "/no/such"); status < 400 {
		t.Errorf("an unknown path is served: %d %s", status, body)
	}
}
