package rpc_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"strings"
	"testing"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/client"
	"github.com/dsec-go/dsec/rpc"
	"github.com/dsec-go/dsec/rpc/dsecv1"
	"github.com/dsec-go/dsec/rpc/rpctest"
)

func TestCodes(t *testing.T) {
	seen := map[connect.Code]dsec.ErrorKind{}
	for _, k := range dsec.ErrorKinds() {
		c := rpc.CodeOf(k)
		if other, ok := seen[c]; ok {
			t.Errorf("%v and %v share code %v", k, other, c)
		}
		seen[c] = k
		if got := rpc.KindOf(c); got != k {
			t.Errorf("KindOf(CodeOf(%v)) = %v", k, got)
		}
	}
	if len(seen) != len(dsec.ErrorKinds()) || rpc.KindOf(connect.CodeUnknown) != dsec.Internal {
		t.Errorf("%d codes for %d kinds", len(seen), len(dsec.ErrorKinds()))
	}
}

func TestStepText(t *testing.T) {
	for _, s := range []dsec.Step{{}, {Session: "a", Number: 1}, {Session: ":", Number: 0}, {Session: "x:1%ä \"<\u2028", Number: 1<<64 - 1}} {
		got, err := rpc.ParseStep(rpc.StepText(s))
		if err != nil || got != s {
			t.Errorf("step %+v came back as %+v, %v", s, got, err)
		}
	}
	for _, bad := range []string{"a", ":1", "a:", "a:-1", "a:1x", "a%:1", "a%zz:1", "a%1", "a:18446744073709551616", strings.Repeat("a", 2000) + ":1",
		strings.Repeat("a", 129) + ":1", "a%00:1", "a%0a:1", "a%ff:1"} {
		if s, err := rpc.ParseStep(bad); dsec.KindOf(err) != dsec.Invalid || err == nil {
			t.Errorf("ParseStep(%.20q) = %+v, %v, want Invalid", bad, s, err)
		}
	}
}

func FuzzHeaders(f *testing.F) {
	for _, s := range []string{"", "a:1", "%41:2", "%", "a%z", "ä:3", ":::4"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if step, err := rpc.ParseStep(s); err == nil {
			again, err := rpc.ParseStep(rpc.StepText(step))
			if err != nil || again != step {
				t.Errorf("%q gave %+v, which gave %+v, %v", s, step, again, err)
			}
		}
		if len(s) <= dsec.MaxKeyBytes {
			if got, err := rpc.ParseKey(rpc.KeyText(s)); err != nil || got != s {
				t.Errorf("key %q came back as %q, %v", s, got, err)
			}
		}
		if id := rpc.RequestIDOr(s); id == "" || len(id) > 64 || strings.ContainsAny(id, " \r\n") {
			t.Errorf("request id %q of %q", id, s)
		}
	})
}

// rig is a fake node behind a server over HTTP/1.1 and h2c.
type rig struct {
	*rpctest.Fake
	url string
	log *bytes.Buffer
	id  dsec.SandboxID
}

func start(t *testing.T) rig {
	t.Helper()
	r := rig{Fake: rpctest.New(), log: new(bytes.Buffer)}
	s := httptest.NewUnstartedServer(rpc.Handler(r.Services(), rpc.Options{Log: slog.New(slog.NewTextHandler(r.log, nil))}))
	s.Config.Protocols = new(http.Protocols)
	s.Config.Protocols.SetHTTP1(true)
	s.Config.Protocols.SetUnencryptedHTTP2(true)
	s.Start()
	t.Cleanup(s.Close)
	r.url = s.URL
	b, err := r.Services().Sandboxes.Create(t.Context(), dsec.Spec{Environment: dsec.Environment{Base: "debian"}}, dsec.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	r.id = b.ID
	return r
}

// post makes a call by hand.
func (r rig) post(t *testing.T, method, kind string, body []byte, headers ...string) (*http.Response, []byte) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), "POST", r.url+"/dsec.v1."+method, bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", kind)
	req.Header.Set("Dsec-Sandbox", string(r.id))
	for i := 0; i < len(headers); i += 2 {
		if i > 1 && headers[i] == headers[i-2] { // a second one
			req.Header.Add(headers[i], headers[i+1])
		} else {
			req.Header.Set(headers[i], headers[i+1])
		}
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res, b
}

func TestByHand(t *testing.T) {
	r := start(t)
	const js = "application/json"
	for _, c := range []struct {
		method, body string
		status       int
		want         []string
	}{
		{"Commands/Run", `{"command":{"argv":["echo","é"]}}`, 200, []string{`"outcome":"exited"`, `"code":0`, `"stdout":"w6kK"`}},
		{"Commands/Run", `{"command":{"shell":"false","timeout":"1.5s","output":"100"}}`, 200, []string{`"code":1`, `"timeout":"1.500s"`}},
		{"Commands/Run", `{"command":{"argv":["cat"]},"stdin":"YQ=="}`, 200, []string{`"stdout":"YQ=="`}},
		{"Commands/Run", `{}`, 400, []string{`"code":"invalid_argument"`, `command is empty`}},
		{"Commands/Run", `{"command":`, 400, []string{`"code":"invalid_argument"`}},
		{"Commands/Wait", `{"id":"none"}`, 404, []string{`"code":"not_found"`}},
		{"Sandboxes/Create", `{"spec":{"environment":{"base":"debian"},"ttl":"600s","resources":{"memory":1073741824}}}`, 200, []string{`"state":"running"`, `"ttl":"600s"`}},
		{"Sandboxes/Get", `{}`, 200, []string{string(r.id), `"stages":[{"name":"mount"`}},
		{"Nothing/Get", `{}`, 404, nil},
		{"Sandboxes/Nothing", `{}`, 501, []string{`"code":"unimplemented"`}},
	} {
		res, b := r.post(t, c.method, js, []byte(c.body))
		b = bytes.ReplaceAll(b, []byte(`: `), []byte(`:`)) // the JSON writer varies its spaces
		if res.StatusCode != c.status {
			t.Errorf("%s %s: %s %s, want %d", c.method, c.body, res.Status, b, c.status)
		}
		for _, w := range c.want {
			if !bytes.Contains(b, []byte(w)) {
				t.Errorf("%s %s: %s, want %s in it", c.method, c.body, b, w)
			}
		}
		if res.Header.Get("Dsec-Request") == "" {
			t.Errorf("%s: no request id", c.method)
		}
	}
	if res, _ := r.post(t, "Sandboxes/Get", js, []byte("{}"), "Dsec-Request", "mine-1"); res.Header.Get("Dsec-Request") != "mine-1" {
		t.Errorf("request id %q, want the one sent", res.Header.Get("Dsec-Request"))
	}
	if res, _ := r.post(t, "Sandboxes/Get", js, []byte("{}"), "Dsec-Sandbox", ""); res.StatusCode != 400 {
		t.Errorf("without a sandbox: %s, want 400", res.Status)
	}
	if res, b := r.post(t, "Commands/Run", js, []byte(`{"command":{"shell":"true"}}`), "Dsec-Step", "x"); res.StatusCode != 400 || !bytes.Contains(b, []byte("SESSION:NUMBER")) {
		t.Errorf("bad step: %s %s", res.Status, b)
	}
	for _, name := range []string{"Dsec-Sandbox", "Dsec-Step", "Dsec-Key", "Dsec-Job-Epoch"} {
		value := map[string]string{"Dsec-Sandbox": string(r.id), "Dsec-Step": "s:1"}[name]
		for _, headers := range [][]string{{name, ""}, {name, value, name, value}, {name, value, name, ""}} {
			if res, b := r.post(t, "Commands/Run", js, []byte(`{"command":{"shell":"true"}}`), headers...); res.StatusCode != 400 || !bytes.Contains(b, []byte("header "+name+" is ")) {
				t.Errorf("%q: %s %s", headers, res.Status, b)
			}
		}
	}
	big := `{"command":{"shell":"` + strings.Repeat("x", rpc.MaxRequest) + `"}}`
	if res, b := r.post(t, "Commands/Run", js, []byte(big)); res.StatusCode != 429 || !bytes.Contains(b, []byte("resource_exhausted")) {
		t.Errorf("a request that is too large: %s %s", res.Status, b)
	}
}

// frames splits a stream of enveloped messages.
func frames(t *testing.T, b []byte) (flags []byte, msgs []string) {
	t.Helper()
	for len(b) > 0 {
		if len(b) < 5 {
			t.Fatalf("%d bytes left", len(b))
		}
		n := 5 + int(binary.BigEndian.Uint32(b[1:]))
		flags, msgs = append(flags, b[0]), append(msgs, string(b[5:n]))
		b = b[n:]
	}
	return flags, msgs
}

func frame(msg string) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(msg))), msg...)
}

func TestStreamByHand(t *testing.T) {
	r := start(t)
	const js = "application/connect+json"
	res, b := r.post(t, "Files/Write", js, append(frame(`{"file":{"path":"/f"},"data":"YWI="}`), frame(`{"data":"Yw=="}`)...))
	flags, msgs := frames(t, b)
	if res.StatusCode != 200 || len(msgs) != 2 || flags[1] != 2 || !strings.Contains(strings.ReplaceAll(msgs[0], " ", ""), `"size":"3"`) || strings.Contains(msgs[1], "error") {
		t.Errorf("Write: %s %q", res.Status, msgs)
	}
	_, b = r.post(t, "Files/Read", js, frame(`{"file":{"path":"/f"}}`))
	flags, msgs = frames(t, b)
	if len(msgs) != 2 || flags[1] != 2 || !strings.Contains(msgs[0], "YWJj") {
		t.Errorf("Read: %q", msgs)
	}
	// An error in the middle: the bytes before it, then one end with the error.
	r.SetFail(func(_ context.Context, op string) error {
		if op == "Files.Read.next" && r.Calls(op) > 2 {
			return dsec.Errorf(dsec.Lost, "gone")
		}
		return nil
	})
	_, b = r.post(t, "Files/Read", js, frame(`{"file":{"path":"/f"}}`))
	_, msgs = frames(t, b)
	if n := len(msgs); n == 0 || !strings.Contains(msgs[n-1], `"code":"data_loss"`) || strings.Count(string(b), "data_loss") != 1 {
		t.Errorf("Read with an error: %q", msgs)
	}
	res, b = r.post(t, "Files/Write", js, nil)
	if _, msgs = frames(t, b); len(msgs) != 1 || !strings.Contains(msgs[0], "no message") {
		t.Errorf("Write of nothing: %s %q", res.Status, msgs)
	}
}

func TestKindsTravel(t *testing.T) {
	r := start(t)
	tr := client.NewTransport()
	defer tr.CloseIdleConnections()
	s, err := client.Open(client.Config{URL: r.url, Transport: tr, Retry: -1})
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range dsec.ErrorKinds() {
		r.SetFail(func(context.Context, string) error {
			return &dsec.Error{Op: "edge.Test", Kind: k, Sandbox: "sbother", Err: fmt.Errorf("tell: %w", errors.New("é\xff secret"))}
		})
		calls := map[string]error{}
		_, calls["unary"] = s.Sandboxes.Get(t.Context(), r.id)
		_, calls["upload"] = s.Files.Write(t.Context(), dsec.Call{Sandbox: r.id}, dsec.FileOp{Path: "/x"}, dsec.WriteOptions{}, strings.NewReader(strings.Repeat("x", 3<<20)))
		_, calls["download"] = s.Files.Read(t.Context(), dsec.Call{Sandbox: r.id}, dsec.FileOp{Path: "/x"}, dsec.ReadRange{})
		for _, err := range s.Commands.Attach(t.Context(), dsec.Call{Sandbox: r.id}, "c", 0) {
			calls["attach"] = err
		}
		for name, err := range calls {
			var e *dsec.Error
			if !errors.As(err, &e) || e.Kind != k || e.Sandbox != "sbother" || e.Request == "" {
				t.Errorf("%v by %s came as %#v", k, name, err)
				continue
			}
			wantOp, wantText := "edge.Test", "tell: é\uFFFD secret"
			if k == dsec.Internal {
				wantOp, wantText = e.Op, "internal error"
				if e.Op == "edge.Test" || strings.Contains(err.Error(), "secret") {
					t.Errorf("an internal error shows %q", err)
				}
				if !strings.Contains(r.log.String(), e.Request) || !strings.Contains(r.log.String(), "secret") {
					t.Errorf("the log lacks request %s: %s", e.Request, r.log)
				}
			}
			if e.Op != wantOp || e.Err.Error() != wantText {
				t.Errorf("%v by %s: %q %q, want %q %q", k, name, e.Op, e.Err, wantOp, wantText)
			}
		}
	}
	if n := strings.Count(r.log.String(), "level=ERROR"); n != 4 {
		t.Errorf("%d errors logged, want the 4 internal ones:\n%s", n, r.log)
	}
}

func TestPanic(t *testing.T) {
	r := start(t)
	r.SetFail(func(context.Context, string) error { panic("oh") })
	res, b := r.post(t, "Sandboxes/Get", "application/json", []byte("{}"))
	if res.StatusCode != 500 || bytes.Contains(b, []byte("oh")) || !strings.Contains(string(b), res.Header.Get("Dsec-Request")) {
		t.Errorf("panic: %s %s", res.Status, b)
	}
	if n := strings.Count(r.log.String(), "level=ERROR"); n != 1 || !strings.Contains(r.log.String(), "oh") {
		t.Errorf("panic logged %d times, want once: %s", n, r.log)
	}
}

func TestNilServices(t *testing.T) {
	s := httptest.NewServer(rpc.Handler(dsec.Services{}, rpc.Options{}))
	defer s.Close()
	c, _ := client.Open(client.Config{URL: s.URL, Transport: &http.Transport{DisableKeepAlives: true}})
	var e *dsec.Error
	if _, err := c.Images.List(t.Context(), dsec.ImageQuery{}); !errors.As(err, &e) || e.Kind != dsec.Unsupported || e.Request == "" {
		t.Errorf("List: %v, want Unsupported", err)
	}
}

func TestTextThatIsNotUTF8(t *testing.T) {
	r := start(t)
	tr := client.NewTransport()
	defer tr.CloseIdleConnections()
	s, _ := client.Open(client.Config{URL: r.url, Transport: tr})
	spec := dsec.Spec{Environment: dsec.Environment{Base: "debian"}, Labels: map[string]string{"k": "\xff"}}
	if _, err := s.Sandboxes.Create(t.Context(), spec, dsec.CreateOptions{}); dsec.KindOf(err) != dsec.Invalid {
		t.Errorf("Create with a label that is not UTF-8: %v, want Invalid", err)
	}
	// From inside it may be there; the answer shows it as well as it can.
	spec.Labels["\xfe"] = "v"
	b, err := r.Services().Sandboxes.Create(t.Context(), spec, dsec.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	got, err := s.Sandboxes.Get(t.Context(), b.ID)
	if err != nil || got.Spec.Labels["k"] != "\uFFFD" || got.Spec.Labels["\uFFFD"] != "v" {
		t.Errorf("Get: %q, %v", got.Spec.Labels, err)
	}
	if spec.Labels["k"] != "\xff" {
		t.Error("the service's own record was changed")
	}
	if l, err := s.Sandboxes.List(t.Context(), dsec.Filter{}); err != nil || len(l) != 2 {
		t.Errorf("List: %d, %v", len(l), err)
	}
}

func TestGRPC(t *testing.T) {
	r := start(t)
	tr := &http.Transport{Protocols: new(http.Protocols)}
	tr.Protocols.SetUnencryptedHTTP2(true)
	defer tr.CloseIdleConnections()
	c := dsecv1.NewCommandsClient(connect.NewClient(connecthttp.NewTransport(&http.Client{Transport: tr}, r.url, connecthttp.WithGRPC())))
	ctx, info := connect.NewClientContext(t.Context())
	info.RequestHeader().Set("Dsec-Sandbox", string(r.id))
	res, err := c.Run(ctx, &dsecv1.CommandsRunRequest{Command: &dsecv1.Command{Shell: "echo hi"}})
	if err != nil || string(res.GetStdout()) != "hi\n" {
		t.Fatalf("Run: %v, %v", res, err)
	}
	if info.ResponseHeader().Get("Dsec-Request") == "" {
		t.Error("no request id")
	}
	ctx, info = connect.NewClientContext(t.Context())
	info.RequestHeader().Set("Dsec-Sandbox", string(r.id))
	if _, err = c.Wait(ctx, &dsecv1.CommandsWaitRequest{Id: "none"}); connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("Wait: %v, want not found", err)
	}
}

const pythonScript = `
import base64, http.client, json, sys, urllib.request
url, box = sys.argv[1], sys.argv[2]
def call(method, body, **headers):
    req = urllib.request.Request(url + "/dsec.v1." + method, json.dumps(body).encode(), {"Content-Type": "application/json", **headers})
    try:
        return json.load(urllib.request.urlopen(req))
    except urllib.error.HTTPError as e:
        return json.load(e)
made = call("Sandboxes/Create", {"spec": {"environment": {"base": "debian"}}}, **{"Dsec-Key": "python"})
again = call("Sandboxes/Create", {"spec": {"environment": {"base": "debian"}}}, **{"Dsec-Key": "python"})
assert made["id"] == again["id"], (made, again)
ran = call("Commands/Run", {"command": {"argv": ["echo", "grüße"]}}, **{"Dsec-Sandbox": made["id"], "Dsec-Step": "s:1"})
assert ran["status"]["code"] == 0, ran
assert base64.b64decode(ran["stdout"]).decode() == "grüße\n", ran
missing = call("Sandboxes/Get", {}, **{"Dsec-Sandbox": box[:-1] + ("y" if box[-1] == "x" else "x")})
assert missing["code"] == "not_found", missing
# A stream: five bytes of head, then JSON.
def frame(m):
    b = json.dumps(m).encode()
    return b"\0" + len(b).to_bytes(4, "big") + b
start = call("Commands/Start", {"command": {"argv": ["pieces", "100000", "1000"]}}, **{"Dsec-Sandbox": made["id"]})
req = urllib.request.Request(url + "/dsec.v1.Commands/Attach", frame({"id": start["id"]}), {"Content-Type": "application/connect+json", "Dsec-Sandbox": made["id"]})
out, status, ends = b"", None, 0
with urllib.request.urlopen(req) as r:
    while head := r.read(5):
        m = json.loads(r.read(int.from_bytes(head[1:], "big")))
        if head[0] & 2:
            ends += 1
            assert "error" not in m, m
            continue
        assert ends == 0
        out += base64.b64decode(m.get("stdout", ""))
        status = m.get("status", status)
assert ends == 1 and status["outcome"] == "exited", (ends, status)
sys.stdout.buffer.write(out)
`

func TestPython(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("feature python3 is missing")
	}
	r := start(t)
	cmd := exec.CommandContext(t.Context(), python, "-c", pythonScript, r.url, string(r.id))
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, stderr.Bytes())
	}
	if want := rpctest.Pattern(100000); !bytes.Equal(out, want) {
		t.Errorf("python attached to %d bytes, want %d", len(out), len(want))
	}
}

// TestErrorBody shows the whole of an error as a person at curl sees it.
func TestErrorBody(t *testing.T) {
	r := start(t)
	r.SetFail(func(context.Context, string) error {
		return dsec.WithOp("edge.Get", "sbx", dsec.Errorf(dsec.Conflict, "it is paused"))
	})
	res, b := r.post(t, "Sandboxes/Get", "application/json", []byte("{}"))
	var body struct {
		Code, Message string
		Details       []struct{ Type string }
	}
	if err := json.Unmarshal(b, &body); err != nil {
		t.Fatal(err)
	}
	if res.StatusCode != 400 || body.Code != "failed_precondition" || body.Message != "it is paused" || len(body.Details) != 1 || body.Details[0].Type != "dsec.v1.ErrorInfo" {
		t.Errorf("%s %s", res.Status, b)
	}
}
