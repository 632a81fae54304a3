package edge_test

import (
	"context"
	"fmt"
	"io"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/driver/synthetic"
	"github.com/dsec-go/dsec/edge"
)

// inFakeTime runs f on a running node in a bubble of fake time.
func inFakeTime(t *testing.T, opt synthetic.Options, config func(*edge.Config), f func(t *testing.T, r *rig)) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, opt)
		r.config = config
		r.open()
		f(t, r)
		r.close()
	})
}

// sleep lets fake time pass and everything that is due happen.
func sleep(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func TestTTL(t *testing.T) {
	inFakeTime(t, synthetic.Options{}, nil, func(t *testing.T, r *rig) {
		s := spec()
		s.TTL = 10 * time.Minute
		a, b, c := r.create(s, ""), r.create(s, ""), r.create(s, "")
		sleep(5 * time.Minute)
		for id, ttl := range map[dsec.SandboxID]time.Duration{b.ID: time.Hour, c.ID: time.Minute} {
			got, err := r.node.Extend(t.Context(), id, ttl)
			if err != nil || !got.Expires.Equal(time.Now().Add(ttl)) {
				t.Fatalf("extend gave %+v, %v", got, err)
			}
		}
		sleep(time.Minute)
		if got := r.wantEnd(c.ID, dsec.Stopped, dsec.CauseTTL); !got.Ended.Equal(time.Now()) {
			t.Errorf("a shortened one ended at %v, now is %v", got.Ended, time.Now())
		}
		sleep(4*time.Minute - time.Nanosecond)
		if got := r.get(a.ID); got.State != dsec.Running {
			t.Errorf("it is %s before its time", got.State)
		}
		sleep(time.Nanosecond)
		r.wantEnd(a.ID, dsec.Stopped, dsec.CauseTTL)
		_, err := r.node.Extend(t.Context(), a.ID, time.Hour)
		wantKind(t, "extend of an ended one", err, dsec.Conflict)
		_, err = r.node.Extend(t.Context(), b.ID, 0)
		wantKind(t, "extend by nothing", err, dsec.Invalid)
		sleep(54 * time.Minute)
		if got := r.get(b.ID); got.State != dsec.Running {
			t.Errorf("an extended one is %s", got.State)
		}
		// A running command does not hold it beyond its time, a restart neither.
		if _, err := r.node.Services().Commands.Start(t.Context(), dsec.Call{Sandbox: b.ID}, dsec.Command{Shell: "hang"}); err != nil {
			t.Fatal(err)
		}
		r.close()
		sleep(time.Hour)
		r.open()
		synctest.Wait()
		r.wantEnd(b.ID, dsec.Stopped, dsec.CauseTTL)
		r.wantNothing()
	})
}

func TestIdle(t *testing.T) {
	inFakeTime(t, synthetic.Options{}, nil, func(t *testing.T, r *rig) {
		s := spec()
		s.TTL, s.Idle = 100*time.Hour, 10*time.Minute
		idle := func(what string, id dsec.SandboxID) {
			t.Helper()
			sleep(10*time.Minute - time.Nanosecond)
			if got := r.get(id); got.State != dsec.Running {
				t.Fatalf("%s: it is %s (%s) before its time", what, got.State, got.Detail)
			}
			sleep(time.Nanosecond)
			r.wantEnd(id, dsec.Stopped, dsec.CauseIdle)
		}
		a := r.create(s, "")
		idle("never used; looked at meanwhile", a.ID)

		a = r.create(s, "")
		c, on := r.node.Services().Commands, dsec.Call{Sandbox: a.ID}
		for range 10 {
			sleep(9 * time.Minute)
			r.exec(a.ID, "true")
		}
		idle("used every nine minutes", a.ID)

		a = r.create(s, "")
		on.Sandbox = a.ID
		if _, err := c.Start(t.Context(), on, dsec.Command{Shell: "sleep 3h"}); err != nil {
			t.Fatal(err)
		}
		sleep(3 * time.Hour)
		idle("a command ran for three hours", a.ID)

		a = r.create(s, "")
		on.Sandbox = a.ID
		if _, err := c.Start(t.Context(), on, dsec.Command{Shell: "sleep 3h"}); err != nil {
			t.Fatal(err)
		}
		sleep(time.Hour)
		r.close() // the next edge learns that something runs
		r.open()
		sleep(2 * time.Hour)
		idle("the command outlived an edge", a.ID)

		a = r.create(s, "")
		on.Sandbox = a.ID
		conn, err := r.node.Services().Ports.Dial(t.Context(), on, synthetic.EchoPort)
		if err != nil {
			t.Fatal(err)
		}
		sleep(time.Hour)
		conn.Close()
		conn.Close() // counts once
		idle("a connection was open", a.ID)

		a = r.create(s, "")
		on.Sandbox = a.ID
		f := r.node.Services().Files
		watch, cancel := context.WithCancel(t.Context())
		go func() {
			for range f.Watch(watch, on, dsec.FileOp{Path: "/"}, dsec.WatchOptions{}) {
			}
		}()
		sleep(time.Hour)
		cancel()
		synctest.Wait()
		idle("a watch was open", a.ID)

		a = r.create(s, "")
		if _, err := r.node.Extend(t.Context(), a.ID, time.Minute); err != nil {
			t.Fatal(err)
		}
		sleep(time.Minute)
		r.wantEnd(a.ID, dsec.Stopped, dsec.CauseTTL) // the earlier of the two
	})
}

// A guest that does not answer after a restart is not taken for an idle one.
func TestIdleOfASilentGuest(t *testing.T) {
	inFakeTime(t, synthetic.Options{}, nil, func(t *testing.T, r *rig) {
		s := spec()
		s.TTL, s.Idle = 3*time.Hour, time.Minute
		sb := r.create(s, "")
		r.close()
		for i := range 3 {
			r.host.Fail(synthetic.OpActivity, i+1, dsec.Errorf(dsec.Unavailable, "no answer"))
		}
		r.open()
		sleep(2 * time.Hour)
		if got := r.get(sb.ID); got.State != dsec.Running || got.Usage.Commands != 0 {
			t.Errorf("it is %s with %d commands", got.State, got.Usage.Commands)
		}
		r.exec(sb.ID, "true") // now the guest has told
		sleep(time.Minute)
		r.wantEnd(sb.ID, dsec.Stopped, dsec.CauseIdle)
	})
}

// Thousands that end at the same instant all end, by a bounded number of stops
// at once.
func TestMassExpiry(t *testing.T) {
	inFakeTime(t, synthetic.Options{StopTime: time.Second}, nil, func(t *testing.T, r *rig) {
		s := spec()
		s.TTL = time.Hour
		var ids []dsec.SandboxID
		for range 320 {
			ids = append(ids, r.create(s, "").ID)
		}
		sleep(time.Hour + 10*time.Second) // 32 at once, one second each
		for _, id := range ids {
			r.wantEnd(id, dsec.Stopped, dsec.CauseTTL)
		}
		r.wantNothing()
	})
}

func TestStartsAreBounded(t *testing.T) {
	limits := func(c *edge.Config) { c.Limits = edge.Limits{Starts: 4, Queue: 20, QueueWait: 10 * time.Second} }
	inFakeTime(t, synthetic.Options{StartTime: time.Second}, limits, func(t *testing.T, r *rig) {
		burst := func(n int, deadline time.Duration) (made int, errs []error, took []time.Duration) {
			var mu sync.Mutex
			var wait sync.WaitGroup
			begin := time.Now()
			for range n {
				wait.Go(func() {
					ctx := t.Context()
					if deadline > 0 {
						c, cancel := context.WithTimeout(ctx, deadline)
						defer cancel()
						ctx = c
					}
					_, err := r.node.Create(ctx, spec(), dsec.CreateOptions{})
					mu.Lock()
					defer mu.Unlock()
					if err == nil {
						made++
						return
					}
					errs, took = append(errs, err), append(took, time.Since(begin))
				})
			}
			wait.Wait()
			return made, errs, took
		}
		made, errs, took := burst(30, 0)
		if made != 24 || len(errs) != 6 {
			t.Errorf("%d of 30 were made with 4 starts and a queue of 20, %d were refused", made, len(errs))
		}
		for i, err := range errs {
			wantKind(t, "beyond the queue", err, dsec.Exhausted)
			if took[i] != 0 {
				t.Errorf("it took %v to refuse", took[i])
			}
		}
		if most := r.host.MostStarting(); most != 4 {
			t.Errorf("%d starts ran at once, want 4", most)
		}
		// Who is still in the queue at its deadline was never begun: no timeout.
		made, errs, _ = burst(20, 3500*time.Millisecond)
		if made != 12 || len(errs) != 8 {
			t.Errorf("%d of 20 were made, %d refused", made, len(errs))
		}
		late := 0
		for _, err := range errs {
			if dsec.KindOf(err) == dsec.Timeout { // begun in the third second
				late++
				continue
			}
			wantKind(t, "deadline in the queue", err, dsec.Exhausted)
		}
		if late > 4 {
			t.Errorf("%d timeouts, at most 4 starts were under way", late)
		}
		if c := r.node.Counts(); c.Alive != 36 || c.Queued != 0 || c.Starting != 0 {
			t.Errorf("counts %+v", c)
		}
	})
	slow := func(c *edge.Config) {
		c.Limits = edge.Limits{Starts: 1, QueueWait: 2 * time.Second, StartTimeout: 5 * time.Second}
	}
	inFakeTime(t, synthetic.Options{StartTime: 4 * time.Second}, slow, func(t *testing.T, r *rig) {
		go r.node.Create(context.Background(), spec(), dsec.CreateOptions{})
		synctest.Wait()
		begin := time.Now()
		_, err := r.node.Create(t.Context(), spec(), dsec.CreateOptions{})
		wantKind(t, "waited too long", err, dsec.Exhausted)
		if got := time.Since(begin); got != 2*time.Second {
			t.Errorf("refused after %v", got)
		}
		sleep(time.Second) // three of four seconds have passed: this one waits one, and then has five of its own
		if _, err := r.node.Create(t.Context(), spec(), dsec.CreateOptions{}); err != nil {
			t.Errorf("create that waited: %v", err)
		}
	})
	slow2 := func(c *edge.Config) { c.Limits.StartTimeout = 5 * time.Second }
	inFakeTime(t, synthetic.Options{StartTime: time.Minute}, slow2, func(t *testing.T, r *rig) {
		_, err := r.node.Create(t.Context(), spec(), dsec.CreateOptions{})
		wantKind(t, "start that hangs", err, dsec.Timeout)
		r.wantNothing()
	})
}

func TestAdmission(t *testing.T) {
	limits := func(c *edge.Config) {
		c.Limits = edge.Limits{Sandboxes: 3, MemoryReserve: 1 << 30, DiskReserve: 1 << 30, TaskReserve: 1000}
	}
	inFakeTime(t, synthetic.Options{}, limits, func(t *testing.T, r *rig) {
		for name, f := range map[string]func(*edge.HostSample){
			"memory":   func(s *edge.HostSample) { s.Available = 1<<30 - 1 },
			"pressure": func(s *edge.HostSample) { s.Pressure.Memory = 80 },
			"disk":     func(s *edge.HostSample) { s.DiskFree = 1<<30 - 1 },
			"inodes":   func(s *edge.HostSample) { s.InodesFree = 3 },
			"tasks":    func(s *edge.HostSample) { s.Tasks = 32000 },
		} {
			r.figures.change(f)
			sleep(time.Second) // the last sample gets old
			_, err := r.node.Create(t.Context(), spec(), dsec.CreateOptions{})
			wantKind(t, name, err, dsec.Exhausted)
			r.figures.change(func(s *edge.HostSample) { *s = roomy() })
			sleep(time.Second)
		}
		var last dsec.Sandbox
		for range 3 {
			last = r.create(spec(), "")
		}
		_, err := r.node.Create(t.Context(), spec(), dsec.CreateOptions{})
		wantKind(t, "a fourth of three", err, dsec.Exhausted)
		if _, err := r.node.Stop(t.Context(), last.ID); err != nil {
			t.Fatal(err)
		}
		r.create(spec(), "")
	})
}

func TestDiskWatch(t *testing.T) {
	var mu sync.Mutex
	used := map[dsec.SandboxID]int64{}
	config := func(c *edge.Config) {
		c.Measure = func(_ context.Context, m driver.Machine) (int64, error) {
			mu.Lock()
			defer mu.Unlock()
			return used[m.ID()], nil
		}
	}
	inFakeTime(t, synthetic.Options{}, config, func(t *testing.T, r *rig) {
		s := spec()
		s.Resources.Disk = 1 << 20
		a, b := r.create(s, ""), r.create(s, "")
		sleep(10 * time.Second)
		mu.Lock()
		used[a.ID], used[b.ID] = 2<<20, 1<<20
		mu.Unlock()
		sleep(10 * time.Second) // nothing was written, as the file system says
		if got := r.get(a.ID); got.State != dsec.Running {
			t.Fatalf("it is %s", got.State)
		}
		r.figures.change(func(s *edge.HostSample) { s.DiskFree -= 2 << 20 })
		r.exec(a.ID, "true")
		r.exec(b.ID, "true")
		sleep(2 * time.Second)
		r.wantEnd(a.ID, dsec.Failed, dsec.CauseDisk)
		if got := r.get(b.ID); got.State != dsec.Running || got.Usage.Disk != 1<<20 {
			t.Errorf("one at its limit is %s with %d bytes", got.State, got.Usage.Disk)
		}
	})
}

func TestCallsOfAllServices(t *testing.T) {
	inFakeTime(t, synthetic.Options{}, nil, func(t *testing.T, r *rig) {
		sb := r.create(spec(), "")
		ctx, on := t.Context(), dsec.Call{Sandbox: sb.ID}
		svc := r.node.Services()
		sleep(time.Minute)
		if _, err := svc.Files.Write(ctx, on, dsec.FileOp{Path: "/a/b"}, dsec.WriteOptions{Parents: true}, io.LimitReader(zeros{}, 10)); err != nil {
			t.Fatal(err)
		}
		if got := r.get(sb.ID); !got.LastUsed.Equal(time.Now().UTC()) {
			t.Errorf("last used %v, now is %v", got.LastUsed, time.Now())
		}
		rc, err := svc.Files.Read(ctx, on, dsec.FileOp{Path: "/a/b"}, dsec.ReadRange{})
		if err != nil {
			t.Fatal(err)
		}
		if b, err := io.ReadAll(rc); err != nil || len(b) != 10 {
			t.Errorf("read %d bytes, %v", len(b), err)
		}
		rc.Close()
		var names []string
		for f, err := range svc.Files.List(ctx, on, dsec.FileOp{Path: "/"}, 9) {
			if err != nil {
				t.Fatal(err)
			}
			names = append(names, f.Path)
		}
		if fmt.Sprint(names) != "[/a /a/b]" {
			t.Errorf("list gave %v", names)
		}
		_, err = svc.Files.Stat(ctx, on, dsec.FileOp{Path: "/none"})
		wantKind(t, "stat", err, dsec.NotFound)
		st, err := svc.Commands.Start(ctx, on, dsec.Command{Shell: "hang"})
		if err != nil {
			t.Fatal(err)
		}
		// Who waits when the sandbox is stopped learns why.
		waited, attached := make(chan error, 1), make(chan error, 1)
		go func() {
			_, err := svc.Commands.Wait(ctx, on, st.ID)
			waited <- err
		}()
		go func() {
			var last error
			for _, err := range svc.Files.Watch(ctx, on, dsec.FileOp{Path: "/"}, dsec.WatchOptions{}) {
				last = err
			}
			attached <- last
		}()
		synctest.Wait()
		if _, err := r.node.Stop(ctx, sb.ID); err != nil {
			t.Fatal(err)
		}
		if err := <-waited; err != nil { // interrupted is an outcome, Conflict an error
			wantKind(t, "wait", err, dsec.Conflict)
		}
		wantKind(t, "watch", <-attached, dsec.Conflict)
		for _, err := range svc.Commands.Attach(ctx, on, st.ID, 0) {
			wantKind(t, "attach", err, dsec.Conflict)
		}
		_, err = svc.Ports.Dial(ctx, on, synthetic.EchoPort)
		wantKind(t, "dial", err, dsec.Conflict)
	})
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { return len(b), nil }

// A keyed create outlives the caller that began it while others wait for it,
// and is undone when the last of them is gone.
func TestKeyedCreateIsSharedByItsCallers(t *testing.T) {
	inFakeTime(t, synthetic.Options{StartTime: time.Minute}, nil, func(t *testing.T, r *rig) {
		begin := func() (leave func(), result chan error) {
			ctx, cancel := context.WithCancel(t.Context())
			result = make(chan error, 1)
			go func() {
				_, err := r.node.Create(ctx, spec(), dsec.CreateOptions{Key: "k"})
				result <- err
			}()
			sleep(time.Second)
			return cancel, result
		}
		leave, first := begin()
		leaveToo, second := begin()
		leave()
		wantKind(t, "create of who left", <-first, dsec.Canceled)
		_, third := begin()
		other := spec()
		other.Hostname = "x"
		_, err := r.node.Create(t.Context(), other, dsec.CreateOptions{Key: "k"})
		wantKind(t, "another spec meanwhile", err, dsec.Conflict)
		leaveToo()
		wantKind(t, "create of who left", <-second, dsec.Canceled)
		if err := <-third; err != nil {
			t.Errorf("create of who stayed: %v", err)
		}
		if n := r.host.Calls(synthetic.OpStart); n != 1 {
			t.Errorf("%d machines were started", n)
		}
		sb := r.create(spec(), "k")
		if _, err := r.node.Stop(t.Context(), sb.ID); err != nil {
			t.Fatal(err)
		}
	})
	inFakeTime(t, synthetic.Options{}, nil, func(t *testing.T, r *rig) {
		// The start takes a while to give up.
		r.host.Intercept(synthetic.OpStarted, 1, func(ctx context.Context) error {
			<-ctx.Done()
			time.Sleep(time.Second)
			return ctx.Err()
		})
		ctx, leave := context.WithCancel(t.Context())
		failed := make(chan error, 1)
		go func() {
			_, err := r.node.Create(ctx, spec(), dsec.CreateOptions{Key: "k"})
			failed <- err
		}()
		synctest.Wait()
		leave()
		wantKind(t, "create whose only caller left", <-failed, dsec.Canceled)
		begin := time.Now()
		r.create(spec(), "k") // once the first is undone
		if took := time.Since(begin); took != time.Second || len(r.host.Machines()) != 1 {
			t.Errorf("the repeated create took %v, machines %v", took, r.host.Machines())
		}
	})
}
