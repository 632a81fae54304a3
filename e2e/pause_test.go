package e2e_test

import (
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/dsec-go/dsec"
)

func (n *node) pause(t *testing.T, id dsec.SandboxID) {
	t.Helper()
	if sb, err := n.Sandboxes.Pause(ctx(t), id); err != nil || sb.State != dsec.Paused || sb.Paused.IsZero() {
		t.Fatalf("pause: %+v, %v", sb, err)
	}
}

func (n *node) wantState(t *testing.T, id dsec.SandboxID, want dsec.State) {
	t.Helper()
	sb, err := n.Sandboxes.Get(ctx(t), id)
	must(t, err)
	if sb.State != want {
		t.Fatalf("it is %s, want %s", sb.State, want)
	}
}

// TestPausedWakes asks a paused sandbox for a thousand things at once, and for
// one right after each of a thousand pauses. Each happens once.
func TestPausedWakes(t *testing.T) {
	n := own(t)
	sb := n.create(t, plain())
	n.pause(t, sb.ID)
	s := n.another(t)
	var wg sync.WaitGroup
	slots := make(chan struct{}, 250) // connections of this process, each with two descriptors
	for range 1000 {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			r, err := s.Commands.Run(ctx(t), on(sb.ID), dsec.Command{Shell: "echo x >> /many"}, nil)
			if err != nil || r.Code != 0 {
				t.Errorf("status %d, %v", r.Code, err)
			}
		})
	}
	wg.Wait()
	if r := n.sh(t, sb.ID, "wc -l < /many"); string(r.Out) != "1000\n" {
		t.Errorf("a thousand commands ran %q times", r.Out)
	}
	if got := n.metric(t, "dsec_sandbox_resume_seconds_count"); got != 1 {
		t.Errorf("they resumed it %d times", got)
	}
	for i := range 1000 {
		n.pause(t, sb.ID)
		if i%2 == 0 {
			if got, err := n.Sandboxes.Resume(ctx(t), sb.ID); err != nil || got.State != dsec.Running {
				t.Fatalf("resume %d: %+v, %v", i, got, err)
			}
		}
		if r := n.sh(t, sb.ID, "echo x >> /each; echo $(wc -l < /each)"); string(r.Out) != strconv.Itoa(i+1)+"\n" {
			t.Fatalf("command %d after a resume: %q, %+v", i+1, r.Out, r.CommandStatus)
		}
	}
}

// TestPauseWhileCommandsStart pauses under a stream of commands.
func TestPauseWhileCommandsStart(t *testing.T) {
	n := own(t)
	sb := n.create(t, plain())
	const each = 100
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			for range each {
				r, err := n.Commands.Run(ctx(t), on(sb.ID), dsec.Command{Shell: "echo x >> /count"}, nil)
				if err != nil || r.Code != 0 {
					t.Errorf("status %d, %v", r.Code, err)
				}
			}
		})
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	for pauses := 0; ; pauses++ {
		select {
		case <-done:
			if r := n.sh(t, sb.ID, "wc -l < /count"); string(r.Out) != "300\n" {
				t.Errorf("300 commands ran %q times under %d pauses", r.Out, pauses)
			}
			return
		default:
		}
		// The next command may have woken it before this answers.
		if _, err := n.Sandboxes.Pause(ctx(t), sb.ID); err != nil {
			t.Fatal(err)
		}
		// A command in hand stands, and whoever waits for it.
		if _, err := n.Sandboxes.Resume(ctx(t), sb.ID); err != nil {
			t.Fatal(err)
		}
	}
}

// TestPauseSurvives kills the node over paused sandboxes with commands in hand.
func TestPauseSurvives(t *testing.T) {
	n := own(t)
	sb, idle := n.create(t, plain()), n.create(t, plain())
	st := n.begin(t, sb.ID, dsec.Command{Shell: counting, Output: dsec.MaxOutput})
	tty := n.begin(t, sb.ID, dsec.Command{Shell: "read x; echo got $x", TTY: &dsec.WinSize{Rows: 24, Cols: 80}, Stdin: dsec.StdinPipe})
	eventually(t, "it counts", func() bool {
		b, err := n.Commands.Read(ctx(t), on(sb.ID), st.ID, dsec.Stdout, 0, 10)
		return err == nil && len(b) > 0
	})
	n.pause(t, sb.ID)
	n.pause(t, idle.ID)
	usage := func() dsec.Usage {
		got, err := n.Sandboxes.Get(ctx(t), sb.ID)
		must(t, err)
		return got.Usage
	}
	before := usage()
	n.kill()
	must(t, n.start())
	n.wantState(t, sb.ID, dsec.Paused)
	n.wantState(t, idle.ID, dsec.Paused)
	if after := usage(); after.CPU != before.CPU || after.Commands != 0 && after.Commands != 2 {
		t.Errorf("over the kill it ran: %+v, then %+v", before, after)
	}
	// Each call wakes.
	if _, err := n.Commands.Write(ctx(t), on(sb.ID), tty.ID, dsec.StdinWrite{Data: []byte("it\n")}); err != nil {
		t.Fatal(err)
	}
	n.wantState(t, sb.ID, dsec.Running)
	if _, err := n.Files.Write(ctx(t), on(sb.ID), dsec.FileOp{Path: "/go"}, dsec.WriteOptions{}, strings.NewReader("")); err != nil {
		t.Fatal(err)
	}
	a, err := follow(ctx(t), n.Commands, on(sb.ID), st.ID)
	must(t, err)
	if err := checkCount(a.out); err != nil || a.status.Code != 7 {
		t.Errorf("it counted over the pause: %v, %+v", err, a.status)
	}
	if a, err := follow(ctx(t), n.Commands, on(sb.ID), tty.ID); err != nil || !strings.Contains(string(a.out), "got it") {
		t.Errorf("the terminal shows %q, %v", a.out, err)
	}
	n.wantState(t, idle.ID, dsec.Paused)
	if got := n.stop(t, idle.ID); got.State != dsec.Stopped || !got.Paused.IsZero() {
		t.Errorf("stop of a paused one: %+v", got)
	}
}

// TestPauseFromTheCommandLine pauses, looks and wakes as people do.
func TestPauseFromTheCommandLine(t *testing.T) {
	n := own(t)
	id := n.dsec(t, "create", "--image", busybox)
	n.dsec(t, "pause", id)
	if out := n.dsec(t, "ls", "-q", "--state", "paused"); out != id {
		t.Errorf("paused are %q", out)
	}
	if out := n.dsec(t, "inspect", id); !strings.Contains(out, "given back") {
		t.Errorf("inspect prints %q", out)
	}
	if out := n.dsec(t, "exec", id, "echo", "awake"); out != "awake" {
		t.Errorf("exec prints %q", out)
	}
	if out := n.dsec(t, "ls"); !strings.Contains(out, id+"  running") {
		t.Errorf("ls prints %q", out)
	}
	n.dsec(t, "pause", id)
	n.dsec(t, "resume", id)
	n.dsec(t, "stop", id)
	r := n.run(nil, "pause", id)
	if r.code != 1 || !strings.Contains(r.err, "has ended") {
		t.Errorf("pause of an ended one: status %d, %q", r.code, r.err)
	}
}
