package trajectory_test

import (
	"testing"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/trajectory"
)

// TestDefaultsNamed repeats steps in other words that mean the same, while they
// run, from the record, behind a restart and when the sandbox has ended. What
// means something else stays Diverged.
func TestDefaultsNamed(t *testing.T) {
	r := newRig(t)
	r.tune = func(c *trajectory.Config) { c.SealBytes = 1 }
	r.open()
	sb, err := r.Sandboxes.Create(t.Context(), dsec.Spec{
		Environment: dsec.Environment{Base: "b"}, Cwd: "/", User: "root", Env: map[string]string{"A": "1"},
	}, dsec.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	id := sb.ID
	short := dsec.Command{Shell: "sleep 0.2"}
	long := dsec.Command{Shell: "sleep 0.2", Cwd: "/", User: "root", Env: map[string]string{"A": "1"}, Output: dsec.DefaultOutput}
	shown := func(rows uint16, term string) dsec.Command {
		return dsec.Command{Shell: "cat", TTY: &dsec.WinSize{Rows: rows, Cols: 80}, Env: map[string]string{"TERM": term}}
	}
	first, err := r.Commands.Start(t.Context(), step(id, "s", 1), short)
	if err != nil {
		t.Fatal(err)
	}
	same := func(when string) {
		t.Helper()
		for name, c := range map[string]dsec.Command{"short": short, "long": long} {
			st, err := r.Commands.Start(t.Context(), step(id, "s", 1), c)
			if err != nil || st.ID != first.ID || !st.Replayed {
				t.Errorf("%s, %s: %+v %v", when, name, st, err)
			}
			res, err := r.Commands.Run(t.Context(), step(id, "s", 1), c, nil)
			if err != nil || res.ID != first.ID || !res.Replayed {
				t.Errorf("%s, %s: %+v %v", when, name, res, err)
			}
		}
		for field, c := range map[string]dsec.Command{
			"cwd":    {Shell: short.Shell, Cwd: "/tmp"},
			"user":   {Shell: short.Shell, User: "you"},
			"env":    {Shell: short.Shell, Env: map[string]string{"A": "2"}},
			"output": {Shell: short.Shell, Output: 1},
			"tty":    {Shell: short.Shell, TTY: &dsec.WinSize{}},
		} {
			_, err := r.Commands.Run(t.Context(), step(id, "s", 1), c, nil)
			wantKind(t, when+", another "+field, err, dsec.Diverged, `"`+field+`"`)
		}
	}
	same("running")
	if _, err := r.Commands.Run(t.Context(), step(id, "s", 2), shown(24, "xterm"), nil); err != nil {
		t.Fatal(err)
	}
	if res, err := r.Commands.Run(t.Context(), step(id, "s", 2), shown(50, "linux"), nil); err != nil || !res.Replayed {
		t.Errorf("another terminal: %+v %v", res, err)
	}
	mkdir := func(mode uint32) error {
		return r.Files.Mkdir(t.Context(), step(id, "s", 3), dsec.FileOp{Path: "/d"}, mode)
	}
	for _, mode := range []uint32{0, 0o755, 0} {
		if err := mkdir(mode); err != nil {
			t.Errorf("mode %o: %v", mode, err)
		}
	}
	wantKind(t, "another mode", mkdir(0o700), dsec.Diverged)
	if err := r.log.Tidy(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := r.log.Compact(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.kill(process)
	r.open()
	same("behind a restart")
	if _, err := r.Sandboxes.Stop(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if err := r.log.Tidy(t.Context()); err != nil {
		t.Fatal(err)
	}
	same("ended")
	r.close()
}

// TestOtherWordsAfterCrash repeats a running command in other words behind a
// restart: the guest is asked in the words that it knows.
func TestOtherWordsAfterCrash(t *testing.T) {
	r := newRig(t).open()
	id := r.create()
	if _, err := r.Commands.Start(t.Context(), step(id, "s", 1), dsec.Command{Shell: "sleep 0.2"}); err != nil {
		t.Fatal(err)
	}
	r.kill(process)
	r.open()
	res, err := r.Commands.Run(t.Context(), step(id, "s", 1), dsec.Command{Shell: "sleep 0.2", Output: dsec.DefaultOutput}, nil)
	if err != nil || res.Outcome != dsec.Exited {
		t.Errorf("%+v %v", res, err)
	}
	if n := r.inGuest(id); n != 1 {
		t.Errorf("%d commands ran", n)
	}
	r.close()
}
