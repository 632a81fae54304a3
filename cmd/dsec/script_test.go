package main

import (
	"bytes"
	"context"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
)

// TestScripts runs the command lines of testdata against a fake server, each
// file with a fresh one. The scripts' own commands are:
//
//	dsec [<FILE] ARG...   run a command line; without < its input never ends
//	status N              the exit status of the last one was N
//	setvar NAME           set a variable to the last standard output
//	server up|down|breaks make the server answer, refuse, or break streams
func TestScripts(t *testing.T) {
	type state struct {
		server *fake
		status int
	}
	stateOf := func(ts *testscript.TestScript) *state { return ts.Value("state").(*state) }
	testscript.Run(t, testscript.Params{
		Dir: "testdata",
		Setup: func(e *testscript.Env) error {
			e.Values["state"] = &state{server: newFake()}
			e.Setenv("HOME", e.WorkDir)
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"dsec": func(ts *testscript.TestScript, neg bool, args []string) {
				st := stateOf(ts)
				stdin, done := io.Pipe()
				defer done.Close()
				var in io.Reader = stdin
				if len(args) > 0 && strings.HasPrefix(args[0], "<") {
					in = strings.NewReader(ts.ReadFile(args[0][1:]))
					args = args[1:]
				}
				a := &app{
					Dir: ts.MkAbs("."), Stdin: in, Stdout: ts.Stdout(), Stderr: ts.Stderr(),
					Getenv: ts.Getenv, Connect: st.server.connect, Notify: silent,
				}
				st.status = a.main(context.Background(), args)
				if neg != (st.status != 0) {
					ts.Fatalf("exit status is %d", st.status)
				}
			},
			"status": func(ts *testscript.TestScript, neg bool, args []string) {
				if got := strconv.Itoa(stateOf(ts).status); got != args[0] {
					ts.Fatalf("exit status is %s, want %s", got, args[0])
				}
			},
			"setvar": func(ts *testscript.TestScript, neg bool, args []string) {
				ts.Setenv(args[0], strings.TrimSpace(ts.ReadFile("stdout")))
			},
			"server": func(ts *testscript.TestScript, neg bool, args []string) {
				f := stateOf(ts).server
				f.unreach = args[0] == "down"
				if args[0] == "breaks" {
					f.breaks = 2
				}
			},
		},
	})
}

// silent is a Notify that never delivers a signal.
func silent(...os.Signal) (<-chan os.Signal, func()) { return nil, func() {} }

// session is an app whose signals and output a test handles while it runs.
type session struct {
	*app
	out, err *watched
	signals  chan os.Signal
	code     <-chan int // where a test keeps what start gave
}

func newSession(f *fake) *session {
	s := &session{out: newWatched(), err: newWatched(), signals: make(chan os.Signal, 4)}
	if f == nil {
		f = newFake()
	}
	never, _ := io.Pipe()
	s.app = &app{
		Stdin: never, Stdout: s.out, Stderr: s.err, Getenv: func(string) string { return "" }, Connect: f.connect,
		Notify: func(sigs ...os.Signal) (<-chan os.Signal, func()) {
			for _, sig := range sigs {
				if sig == os.Interrupt {
					return s.signals, func() {}
				}
			}
			return nil, func() {}
		},
	}
	return s
}

// start runs a command line and returns the channel of its exit status.
func (s *session) start(args ...string) <-chan int {
	code := make(chan int, 1)
	go func() { code <- s.main(context.Background(), args) }()
	return code
}

// watched is a buffer whose content a test waits for.
type watched struct {
	mu      sync.Mutex
	b       bytes.Buffer
	changed chan struct{}
}

func newWatched() *watched { return &watched{changed: make(chan struct{})} }

func (w *watched) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	close(w.changed)
	w.changed = make(chan struct{})
	return w.b.Write(p)
}

func (w *watched) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.b.String()
}

// await blocks until the buffer holds text.
func (w *watched) await(t *testing.T, text string) {
	t.Helper()
	limit := time.After(20 * time.Second)
	for {
		w.mu.Lock()
		has, changed := strings.Contains(w.b.String(), text), w.changed
		w.mu.Unlock()
		if has {
			return
		}
		select {
		case <-changed:
		case <-limit:
			t.Fatalf("output %q never had %q", w.String(), text)
		}
	}
}
