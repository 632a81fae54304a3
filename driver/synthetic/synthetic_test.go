package synthetic_test

import (
	"context"
	"errors"
	"io"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/driver/synthetic"
)

func start(t *testing.T, d driver.Driver, id dsec.SandboxID) driver.Machine {
	t.Helper()
	m, err := d.Start(t.Context(), driver.Config{ID: id})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestMachinesOutliveADriver(t *testing.T) {
	h := synthetic.New(synthetic.Options{})
	d := h.Driver()
	m := start(t, d, "a")
	called := false
	m.(interface{ AfterDone(func()) }).AfterDone(func() { called = true })
	boom := errors.New("boom")
	h.Intercept(synthetic.OpStarted, 1, func(context.Context) error { d.Detach(); return boom })
	if _, err := d.Start(t.Context(), driver.Config{ID: "half"}); !errors.Is(err, boom) {
		t.Fatalf("start: %v", err)
	}
	if n := len(h.Machines()); n != 2 {
		t.Fatalf("%d machines, want one and a half", n)
	}
	found, err := h.Driver().Adopt(t.Context())
	if err != nil || len(found) != 1 || found[0].ID() != "a" {
		t.Fatalf("adopted %v, %v", found, err)
	}
	for range 2 {
		if err := found[0].Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	<-found[0].Done()
	if called {
		t.Error("a callback reached a process that was killed")
	}
	if e := found[0].Exit(); e.Cause != dsec.CauseUser || len(h.Machines()) != 0 {
		t.Errorf("exit %+v, machines %v", e, h.Machines())
	}
	_, err = found[0].Guest().Commands().List(t.Context(), dsec.Call{})
	if dsec.KindOf(err) != dsec.Conflict {
		t.Errorf("call of a machine that is gone: %v", err)
	}
}

func TestFailedStartLeavesNothing(t *testing.T) {
	h := synthetic.New(synthetic.Options{})
	for _, op := range []string{synthetic.OpStart, synthetic.OpStarted} {
		h.Fail(op, 2, errors.New("boom"))
		start(t, h.Driver(), dsec.SandboxID(op))
		if _, err := h.Driver().Start(t.Context(), driver.Config{ID: "x"}); err == nil {
			t.Errorf("the second %s did not fail", op)
		}
		h.Crash(dsec.SandboxID(op), dsec.CauseOOM, "")
		if m := h.Machines(); len(m) != 0 {
			t.Errorf("machines %v are left", m)
		}
	}
}

func TestCommands(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := start(t, synthetic.New(synthetic.Options{}).Driver(), "a")
		c, ctx, on := m.Guest().Commands(), t.Context(), dsec.Call{}
		var mu sync.Mutex
		var told []int
		m.Guest().Subscribe(func(a driver.Activity) {
			mu.Lock()
			defer mu.Unlock()
			told = append(told, a.Running)
		})
		for _, x := range []struct {
			cmd     dsec.Command
			in      string
			outcome dsec.Outcome
			code    int
			out     string
			took    time.Duration
		}{
			{dsec.Command{Shell: "true"}, "", dsec.Exited, 0, "", 0},
			{dsec.Command{Shell: "false"}, "", dsec.Exited, 1, "", 0},
			{dsec.Command{Shell: "exit 7"}, "", dsec.Exited, 7, "", 0},
			{dsec.Command{Argv: []string{"echo", "a", "b"}}, "", dsec.Exited, 0, "a b\n", 0},
			{dsec.Command{Shell: "yes 3"}, "", dsec.Exited, 0, "y\ny", 0},
			{dsec.Command{Shell: "sleep 1.5"}, "", dsec.Exited, 0, "", 1500 * time.Millisecond},
			{dsec.Command{Shell: "hang", Timeout: time.Hour}, "", dsec.TimedOut, 124, "", time.Hour},
			{dsec.Command{Shell: "cat"}, "abc", dsec.Exited, 0, "abc", 0},
			{dsec.Command{Shell: "emacs"}, "", dsec.NotStarted, 127, "", 0},
		} {
			begin := time.Now()
			r, err := c.Run(ctx, on, x.cmd, []byte(x.in))
			if err != nil || r.Outcome != x.outcome || r.Code != x.code || string(r.Out) != x.out || time.Since(begin) != x.took {
				t.Errorf("run %+v gave %+v after %v, %v", x.cmd, r, time.Since(begin), err)
			}
		}
		synctest.Wait()
		mu.Lock()
		if len(told) != 18 || told[16] != 1 || told[17] != 0 {
			t.Errorf("the subscriber was told %v", told)
		}
		mu.Unlock()

		st, err := c.Start(ctx, on, dsec.Command{Shell: "hang"})
		if err != nil {
			t.Fatal(err)
		}
		ended := make(chan dsec.CommandStatus, 1)
		go func() {
			st, _ := c.Wait(ctx, on, st.ID)
			ended <- st
		}()
		synctest.Wait()
		if err := c.Signal(ctx, on, st.ID, "SIGKILL"); err != nil {
			t.Fatal(err)
		}
		if st := <-ended; st.Outcome != dsec.Signaled || st.Signal != "KILL" {
			t.Errorf("ended %+v", st)
		}

		on.Step = dsec.Step{Session: "s", Number: 1}
		a, err := c.Run(ctx, on, dsec.Command{Shell: "echo 1"}, nil)
		b, err2 := c.Run(ctx, on, dsec.Command{Shell: "echo 1"}, nil)
		if err != nil || err2 != nil || a.ID != b.ID || a.Replayed || !b.Replayed {
			t.Errorf("a repeated step gave %+v and %+v", a, b)
		}
		if _, err := c.Run(ctx, on, dsec.Command{Shell: "echo 2"}, nil); dsec.KindOf(err) != dsec.Diverged {
			t.Errorf("a step repeated with another command: %v", err)
		}
	})
}

func TestAttachFromAnyOffset(t *testing.T) {
	m := start(t, synthetic.New(synthetic.Options{}).Driver(), "a")
	c, ctx, on := m.Guest().Commands(), t.Context(), dsec.Call{}
	st, err := c.Start(ctx, on, dsec.Command{Argv: []string{"cat"}, Stdin: dsec.StdinPipe})
	if err != nil {
		t.Fatal(err)
	}
	text := "some words"
	go func() {
		for i := range len(text) {
			c.Write(ctx, on, st.ID, dsec.StdinWrite{Offset: int64(i), Data: []byte(text[i : i+1]), Close: i == len(text)-1})
		}
	}()
	for from := range int64(len(text) + 1) {
		var got []byte
		var last *dsec.CommandStatus
		for o, err := range c.Attach(ctx, on, st.ID, from) {
			if err != nil {
				t.Fatal(err)
			}
			got, last = append(got, o.Data...), o.Status
		}
		if string(got) != text[from:] || last == nil || last.Stdout.Total != int64(len(text)) {
			t.Errorf("from %d: %q, %+v", from, got, last)
		}
	}
}

func TestEcho(t *testing.T) {
	m := start(t, synthetic.New(synthetic.Options{}).Driver(), "a")
	conn, err := m.Guest().Ports().Dial(t.Context(), dsec.Call{}, synthetic.EchoPort)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	go func() {
		io.WriteString(conn, "hello")
		conn.CloseWrite()
	}()
	if b, err := io.ReadAll(conn); err != nil || string(b) != "hello" {
		t.Errorf("echo gave %q, %v", b, err)
	}
	if _, err := m.Guest().Ports().Dial(t.Context(), dsec.Call{}, 80); dsec.KindOf(err) != dsec.Unavailable {
		t.Errorf("dial of a closed port: %v", err)
	}
}

func TestPause(t *testing.T) {
	h := synthetic.New(synthetic.Options{})
	m := start(t, h.Driver(), "a")
	p, r := m.(driver.Pauser), m.(driver.Reclaimer)
	h.SetUsage("a", dsec.Usage{Memory: 100})
	if n, err := r.Reclaim(t.Context(), 0); n != 0 || err != nil {
		t.Errorf("a running machine gave %d bytes, %v", n, err)
	}
	boom := errors.New("boom")
	h.Fail(synthetic.OpPause, 1, boom)
	if err := p.Pause(t.Context()); !errors.Is(err, boom) || p.Paused() {
		t.Errorf("a pause that fails: %v, paused %v", err, p.Paused())
	}
	if err := p.Pause(t.Context()); err != nil || !h.Paused("a") {
		t.Errorf("pause: %v", err)
	}
	if _, err := m.Guest().Commands().Run(t.Context(), dsec.Call{}, dsec.Command{Shell: "true"}, nil); dsec.KindOf(err) != dsec.Internal {
		t.Errorf("a command in a paused machine: %v", err)
	}
	for _, want := range []int64{60, 40, 0} {
		if n, err := r.Reclaim(t.Context(), 60); n != want || err != nil {
			t.Errorf("reclaim gave %d, %v, want %d", n, err, want)
		}
	}
	if err := p.Resume(t.Context()); err != nil || h.Paused("a") {
		t.Errorf("resume: %v", err)
	}
	if _, err := m.Guest().Commands().Run(t.Context(), dsec.Call{}, dsec.Command{Shell: "true"}, nil); err != nil {
		t.Error(err)
	}
	if err := m.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := p.Pause(t.Context()); dsec.KindOf(err) != dsec.Conflict {
		t.Errorf("pause of a machine that is gone: %v", err)
	}
}
