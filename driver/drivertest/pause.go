package drivertest

import (
	"context"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

// withPauser runs f with a machine that can pause.
func withPauser(t *testing.T, e Env, f func(t *testing.T, m driver.Machine, p driver.Pauser)) {
	with(t, e, func(t *testing.T, m driver.Machine) { f(t, m, m.(driver.Pauser)) })
}

func pause(t *testing.T, p driver.Pauser) {
	t.Helper()
	if err := p.Pause(ctx(t)); err != nil {
		t.Fatal("pause:", err)
	}
	if !p.Paused() {
		t.Fatal("after Pause it is not paused")
	}
}

func resume(t *testing.T, p driver.Pauser) {
	t.Helper()
	if err := p.Resume(ctx(t)); err != nil {
		t.Fatal("resume:", err)
	}
	if p.Paused() {
		t.Fatal("after Resume it is paused")
	}
}

// begin starts a command and waits for its first output.
func begin(t *testing.T, m driver.Machine, c dsec.Command) dsec.CommandID {
	t.Helper()
	cmds := m.Guest().Commands()
	st, err := cmds.Start(ctx(t), dsec.Call{}, c)
	if err != nil {
		t.Fatal(err)
	}
	for o, err := range cmds.Attach(ctx(t), dsec.Call{}, st.ID, 0) {
		if err != nil || o.Status != nil {
			t.Fatalf("%q says nothing: %+v, %v", c.Shell, o.Status, err)
		}
		if len(o.Data) > 0 {
			break
		}
	}
	return st.ID
}

func finish(t *testing.T, m driver.Machine, id dsec.CommandID) (dsec.CommandStatus, string) {
	t.Helper()
	st, err := m.Guest().Commands().Wait(ctx(t), dsec.Call{}, id)
	if err != nil {
		t.Fatal(err)
	}
	out, err := m.Guest().Commands().Read(ctx(t), dsec.Call{}, id, dsec.Stdout, 0, dsec.MaxChunk)
	if err != nil {
		t.Fatal(err)
	}
	return st, string(out)
}

// testPause looks from outside whether anything moves, and then from inside
// that nothing was lost.
func testPause(t *testing.T, e Env) {
	withPauser(t, e, func(t *testing.T, m driver.Machine, p driver.Pauser) {
		limit := 800 * time.Millisecond * time.Duration(max(e.few(1, 4), 1))
		count := begin(t, m, dsec.Command{Shell: "i=0; while [ ! -e /stop ]; do i=$((i+1)); echo $i; done; echo end"})
		timed := begin(t, m, dsec.Command{Shell: "echo begun; exec sleep 60", Timeout: limit})
		silent := begin(t, m, dsec.Command{Shell: "echo begun; exec sleep 60", Idle: limit})
		for range 2 {
			pause(t, p)
		}
		size := func() int64 {
			st, err := m.Guest().Commands().List(ctx(t), dsec.Call{})
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range st {
				if s.Outcome != dsec.StillRunning {
					t.Errorf("it ended while it stood still: %+v", s)
				}
				if s.ID == count {
					return s.Stdout.Total
				}
			}
			return -1
		}
		write := func() {
			if _, err := m.Guest().Files().Write(ctx(t), dsec.Call{}, dsec.FileOp{Path: "/stop"}, dsec.WriteOptions{}, strings.NewReader("")); err != nil {
				t.Error(err)
			}
		}
		if e.GuestStands {
			<-time.After(2 * limit)
		} else {
			<-time.After(50 * time.Millisecond) // what was in the pipe
			a := size()
			<-time.After(2 * limit)
			if b := size(); a != b {
				t.Errorf("a paused workload wrote: %d, then %d bytes", a, b)
			}
			write() // the guest itself answers
		}
		for range 2 {
			resume(t, p)
		}
		if e.GuestStands {
			size() // nothing has ended meanwhile
			write()
		}
		st, out := finish(t, m, count)
		lines := strings.Split(strings.TrimSpace(out), "\n")
		for i, l := range lines[:len(lines)-1] {
			if l != strconv.Itoa(i+1) && !st.Stdout.Truncated() {
				t.Fatalf("line %d is %q", i+1, l)
			}
		}
		if st.Outcome != dsec.Exited || st.Code != 0 {
			t.Errorf("after the pause: %+v", st)
		}
		if st, _ := finish(t, m, timed); st.Outcome != dsec.TimedOut {
			t.Errorf("the timeout after a pause: %+v", st)
		}
		if st, _ := finish(t, m, silent); st.Outcome != dsec.Inactive {
			t.Errorf("the idle time after a pause: %+v", st)
		}
	})
}

// testPauseInHand pauses under a terminal, a standard input and a connection.
func testPauseInHand(t *testing.T, e Env) {
	withPauser(t, e, func(t *testing.T, m driver.Machine, p driver.Pauser) {
		cmds := m.Guest().Commands()
		tty := begin(t, m, dsec.Command{Shell: "echo ready; read x; echo got $x; stty size", TTY: &dsec.WinSize{Rows: 33, Cols: 77}, Stdin: dsec.StdinPipe})
		cat := begin(t, m, dsec.Command{Shell: "echo ready; cat", Stdin: dsec.StdinPipe})
		begin(t, m, dsec.Command{Shell: "echo ready; exec nc -l -p 8080 -e cat"})
		var conn dsec.PortConn
		var err error
		for range 100 {
			if conn, err = m.Guest().Ports().Dial(ctx(t), dsec.Call{}, 8080); err == nil {
				break
			}
			<-time.After(10 * time.Millisecond)
		}
		if err != nil {
			t.Fatal("dial:", err)
		}
		defer conn.Close()
		pause(t, p)
		calls := func() {
			if _, err := conn.Write([]byte("while it stood\n")); err != nil {
				t.Error(err)
			}
			if err := cmds.Resize(ctx(t), dsec.Call{}, tty, dsec.WinSize{Rows: 10, Cols: 20}); err != nil {
				t.Error(err)
			}
			for id, text := range map[dsec.CommandID]string{tty: "x\n", cat: "y\n"} {
				if _, err := cmds.Write(ctx(t), dsec.Call{}, id, dsec.StdinWrite{Data: []byte(text), Close: id == cat}); err != nil {
					t.Error(err)
				}
			}
		}
		var wg sync.WaitGroup
		wg.Go(calls)
		if !e.GuestStands {
			wg.Wait()
		}
		resume(t, p)
		wg.Wait()
		conn.CloseWrite() //nolint:errcheck // what comes back tells
		if got, err := io.ReadAll(conn); err != nil || string(got) != "while it stood\n" {
			t.Errorf("the connection gives %q (%v)", got, err)
		}
		if st, out := finish(t, m, tty); st.Code != 0 || !strings.Contains(out, "got x\r\n10 20") {
			t.Errorf("the terminal shows %q", out)
		}
		if st, out := finish(t, m, cat); st.Code != 0 || out != "ready\ny\n" {
			t.Errorf("cat gives %q", out)
		}
	})
}

// testPauseAgain runs a command right after each resume, and starts some while
// it is paused: the guest answers meanwhile, and each of them runs once.
func testPauseAgain(t *testing.T, e Env) {
	withPauser(t, e, func(t *testing.T, m driver.Machine, p driver.Pauser) {
		var wg sync.WaitGroup
		rounds, many := e.few(60, 8), 4
		for i := range rounds {
			for range many {
				wg.Go(func() {
					r, err := m.Guest().Commands().Run(ctx(t), dsec.Call{}, dsec.Command{Shell: "echo x >> /ran; echo during"}, nil)
					if err != nil || string(r.Out) != "during\n" {
						t.Errorf("begun before a pause: %q, %v", r.Out, err)
					}
				})
			}
			pause(t, p)
			if !e.GuestStands {
				if _, err := m.Guest().Commands().List(ctx(t), dsec.Call{}); err != nil {
					t.Fatal(err)
				}
			}
			resume(t, p)
			if r := sh(t, m, "echo "+strconv.Itoa(i)); string(r.Out) != strconv.Itoa(i)+"\n" {
				t.Fatalf("command %d after a resume: %+v %q", i, r.CommandStatus, r.Out)
			}
		}
		wg.Wait()
		if r := sh(t, m, "wc -l < /ran"); string(r.Out) != strconv.Itoa(rounds*many)+"\n" {
			t.Errorf("%d commands ran %q times", rounds*many, r.Out)
		}
	})
}

// testPauseRounds pauses again and again under a process that counts and one that
// holds a file: neither loses anything.
func testPauseRounds(t *testing.T, e Env) {
	withPauser(t, e, func(t *testing.T, m driver.Machine, p driver.Pauser) {
		if r := sh(t, m, "dd if=/dev/urandom of=/data bs=1M count=4 2>/dev/null; md5sum /data > /sum"); r.Code != 0 {
			t.Fatalf("%+v %q", r.CommandStatus, r.Err)
		}
		held := begin(t, m, dsec.Command{Stdin: dsec.StdinPipe, Shell: "exec 3</data; rm /data; echo held; while read x; do echo $x; done; md5sum <&3 | cut -c1-32"})
		ticks := begin(t, m, dsec.Command{Shell: "i=0; while [ ! -e /stop ]; do i=$((i+1)); echo $i; sleep 0.01; done"})
		for i := range 10 {
			pause(t, p)
			resume(t, p)
			n := strconv.Itoa(i)
			if r := sh(t, m, "echo "+n+" >> /log; wc -l < /log"); string(r.Out) != strconv.Itoa(i+1)+"\n" {
				t.Fatalf("round %d: %+v %q %q", i, r.CommandStatus, r.Out, r.Err)
			}
			if _, err := m.Guest().Commands().Write(ctx(t), dsec.Call{}, held, dsec.StdinWrite{Offset: int64(2 * i), Data: []byte(n + "\n"), Close: i == 9}); err != nil {
				t.Fatal(err)
			}
		}
		sum := string(sh(t, m, "touch /stop; cut -c1-32 /sum").Out)
		if st, out := finish(t, m, held); st.Code != 0 || out != "held\n0\n1\n2\n3\n4\n5\n6\n7\n8\n9\n"+sum {
			t.Errorf("what was held: %+v, %q", st, out)
		}
		_, out := finish(t, m, ticks)
		for i, l := range strings.Fields(out) {
			if l != strconv.Itoa(i+1) {
				t.Fatalf("tick %d is %q", i+1, l)
			}
		}
	})
}

// testPauseStop stops a paused machine, and one while it is being paused.
func testPauseStop(t *testing.T, e Env) {
	for range e.few(3, 1) {
		withPauser(t, e, func(t *testing.T, m driver.Machine, p driver.Pauser) {
			begin(t, m, dsec.Command{Shell: "trap '' TERM; echo ready; while :; do :; done"})
			pause(t, p)
			stop(t, m)
			if err := p.Pause(ctx(t)); dsec.KindOf(err) != dsec.Conflict {
				t.Errorf("pause of a machine that is gone: %v", err)
			}
			if err := p.Resume(ctx(t)); dsec.KindOf(err) != dsec.Conflict {
				t.Errorf("resume of a machine that is gone: %v", err)
			}
		})
		withPauser(t, e, func(t *testing.T, m driver.Machine, p driver.Pauser) {
			begin(t, m, dsec.Command{Shell: "f() { f | f & }; echo ready; f; sleep 100"})
			done := make(chan error, 1)
			go func() { done <- p.Pause(context.Background()) }()
			stop(t, m)
			if err := <-done; err != nil && dsec.KindOf(err) != dsec.Conflict {
				t.Errorf("pause under a stop: %v", err)
			}
		})
	}
}

// testPauseAdopt crashes the driver while a machine is paused.
func testPauseAdopt(t *testing.T, e Env) {
	d := e.Open(t)
	if _, err := d.Adopt(ctx(t)); err != nil {
		t.Fatal(err)
	}
	m, err := d.Start(ctx(t), e.Config(t))
	if err != nil {
		t.Fatal(err)
	}
	if e.Prepare != nil {
		e.Prepare(t, m)
	}
	p := m.(driver.Pauser)
	id := begin(t, m, dsec.Command{Shell: "echo begun; sleep 0.2; echo over; exit 3", Timeout: 20 * time.Second})
	pause(t, p)
	e.Crash(t, d)

	d = e.Open(t)
	defer d.Close()
	ms, err := d.Adopt(ctx(t))
	if err != nil || len(ms) != 1 {
		t.Fatalf("adopted %v, %v", ms, err)
	}
	defer stop(t, ms[0])
	p = ms[0].(driver.Pauser)
	if !p.Paused() {
		t.Error("a paused machine is adopted running")
	}
	resume(t, p)
	if st, out := finish(t, ms[0], id); st.Code != 3 || out != "begun\nover\n" {
		t.Errorf("after the crash: %+v, %q", st, out)
	}
}

// testPauseFrozen pauses a frozen machine and freezes a paused one: it stands
// for as long as either wants.
func testPauseFrozen(t *testing.T, e Env) {
	withPauser(t, e, func(t *testing.T, m driver.Machine, p driver.Pauser) {
		u := m.(driver.Upper)
		dir, _ := u.Upper()
		begin(t, m, dsec.Command{Shell: "echo ready; while :; do echo x >> /grow; done"})
		size := func() int64 {
			fi, err := os.Stat(dir + "/grow")
			if err != nil {
				return 0
			}
			return fi.Size()
		}
		stands := func(when string) {
			t.Helper()
			a := size()
			<-time.After(50 * time.Millisecond)
			if b := size(); a != b {
				t.Errorf("%s it moves", when)
			}
		}
		for _, frozenFirst := range []bool{true, false} {
			if !frozenFirst {
				pause(t, p)
			}
			thaw, err := u.Freeze(ctx(t))
			if err != nil {
				t.Fatal(err)
			}
			if frozenFirst {
				pause(t, p)
				if err := thaw(); err != nil {
					t.Fatal(err)
				}
				stands("paused and no longer frozen")
				resume(t, p)
			} else {
				resume(t, p)
				stands("frozen and no longer paused")
				if err := thaw(); err != nil {
					t.Fatal(err)
				}
			}
			a := size()
			for i := 0; size() == a; i++ {
				if i == 400 {
					t.Fatal("it does not go on")
				}
				<-time.After(5 * time.Millisecond)
			}
		}
	})
}

// testReclaim takes back what a workload has in files; what it has in memory
// needs swap, which is the matter of a driver's own test.
func testReclaim(t *testing.T, e Env) {
	withPauser(t, e, func(t *testing.T, m driver.Machine, p driver.Pauser) {
		r := m.(driver.Reclaimer)
		const size = 16 << 20
		if out := sh(t, m, "dd if=/dev/urandom of=/big bs=1M count=16 2>/dev/null && sync && md5sum /big > /sum && cat /sum"); out.Code != 0 {
			t.Fatalf("%+v %q", out.CommandStatus, out.Err)
		}
		if n, err := r.Reclaim(ctx(t), 0); err != nil || n != 0 {
			t.Errorf("a running machine gave %d bytes, %v", n, err)
		}
		pause(t, p)
		before, err := m.Usage(ctx(t))
		if err != nil {
			t.Fatal(err)
		}
		n, err := r.Reclaim(ctx(t), 0)
		after, _ := m.Usage(ctx(t))
		if err != nil || n < size*9/10 || before.Memory-after.Memory < size*9/10 {
			t.Errorf("%d bytes of %d came back (usage %d, then %d), %v", n, size, before.Memory, after.Memory, err)
		}
		resume(t, p)
		if out := sh(t, m, "md5sum -c /sum"); out.Code != 0 {
			t.Errorf("after the reclaim: %q %q", out.Out, out.Err)
		}
	})
}

// Hog is a command that holds 20 MiB of memory, half of it random, says ready,
// and after a line of input whether all of it is as it was: dd keeps its one
// block while nobody empties the pipe.
func Hog() dsec.Command {
	return dsec.Command{Stdin: dsec.StdinPipe, Shell: `
head -c 10485760 /dev/urandom > /data
yes 0123456789abcdef | head -c 10485760 >> /data
md5sum < /data > /sum
mkfifo /pipe
exec 3<>/pipe
dd if=/data bs=20971520 count=1 >&3 2>/dev/null &
dd bs=1 count=1 <&3 >/first 2>/dev/null
rm /data
echo ready
read x
{ cat /first; head -c 20971519 <&3; } | md5sum | cmp - /sum && echo same
`}
}
