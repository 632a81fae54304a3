package edge

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

// adopt makes the replayed table and the machines that exist agree. boot is
// the life of the kernel in which the journal was written last.
func (n *Node) adopt(ctx context.Context, boot string, begin time.Time) error {
	machines, err := n.findMachines(ctx)
	if err != nil {
		return err
	}
	// A journal that says nothing of a boot has no sandboxes either.
	rebooted := boot != n.cfg.Boot
	ev := AdoptedEvent{Records: len(n.order), Rebooted: rebooted && boot != ""}
	if err := n.append(change{Op: opBoot, Boot: n.cfg.Boot, At: begin.UnixNano()}, func() {}); err != nil {
		return err
	}
	var living []*entry
	for _, e := range n.order {
		if e.rec.state.Ended() {
			n.place(e)
			continue
		}
		n.keep(e)
		m := machines[e.id]
		switch {
		case !n.place(e):
			e.rec = e.rec.with(judge(dsec.CauseNodeLost, "node "+n.cfg.Name+" was declared lost"))
			ev.Gone++
		case m != nil && e.rec.verdict.cause == "":
			ev.Adopted++
		case m != nil || e.rec.verdict.cause != "":
			ev.Ending++
		case rebooted:
			e.rec = e.rec.with(judge(dsec.CauseNodeLost, "node "+n.cfg.Name+" was rebooted"))
			ev.Gone++
		case n.drivers[e.rec.spec.spec.Kind] == nil:
			// Its machine may well be running; nobody could find it any more.
			return fmt.Errorf("adopt sandbox %s: this node has no driver of kind %s any more", e.id, e.rec.spec.spec.Kind)
		default:
			e.rec = e.rec.with(judge(dsec.CauseGuestDied, "it ended while the edge was down"))
			ev.Gone++
		}
		if m != nil {
			delete(machines, e.id)
			e.machine = m
			e.running = -1 // until the guest tells
			e.lastUsed = begin.UnixNano()
		}
		living = append(living, e)
	}
	ev.Orphans = len(machines)
	for _, m := range machines {
		n.spawn(func() {
			n.enders <- struct{}{}
			defer func() { <-n.enders }()
			n.discard(m, nil)
		})
	}
	n.keepLedger(living)
	n.resume(living)
	ev.Took = time.Since(begin)
	n.events.Adopted(ev)
	return nil
}

// keepLedger forgets what nobody has any more.
func (n *Node) keepLedger(living []*entry) {
	if n.cfg.Ledger == nil {
		return
	}
	var groups []string
	for _, e := range living {
		if c, ok := e.machine.(driver.Charged); ok {
			groups = append(groups, c.Group())
		}
	}
	n.cfg.Ledger.Keep(groups)
}

// place notes whether e is of the present epoch and reports it.
func (n *Node) place(e *entry) bool {
	p, err := n.cfg.Keys.Place(e.id)
	e.earlier = err != nil || p != n.cfg.Place
	return !e.earlier
}

// with gives r with a verdict.
func (r *record) with(v verdict) *record {
	c := *r
	c.verdict = v
	return &c
}

// findMachines asks all drivers for what outlived the last process.
func (n *Node) findMachines(ctx context.Context) (map[dsec.SandboxID]driver.Machine, error) {
	var (
		mu    sync.Mutex
		found = map[dsec.SandboxID]driver.Machine{}
		first error
		wait  sync.WaitGroup
	)
	for kind, d := range n.drivers {
		wait.Go(func() {
			ms, err := d.Adopt(ctx)
			mu.Lock()
			defer mu.Unlock()
			if err != nil && first == nil {
				first = fmt.Errorf("adopt machines of kind %s: %w", kind, err)
			}
			for _, m := range ms {
				found[m.ID()] = m
			}
		})
	}
	wait.Wait()
	return found, first
}

// resume gives each living entry of the table its future: it runs on, or its
// end is carried out.
func (n *Node) resume(living []*entry) {
	var adopted []*entry
	for _, e := range living {
		switch {
		case e.rec.verdict.cause == "":
			n.follow(e, e.machine)
			n.adoptPause(e)
			adopted = append(adopted, e)
		case e.machine != nil:
			n.end(e, e.rec.verdict, nobodyWaits)
		default:
			e.mu.Lock()
			e.ending = &ending{verdict: e.rec.verdict, itself: true, done: make(chan struct{})}
			end := e.ending
			e.mu.Unlock()
			n.conclude(e, end, driver.Exit{})
		}
	}
	// A few workers: there may be thousands of guests, and one that does not
	// answer must not keep the others from being counted.
	next := make(chan *entry, len(adopted))
	for _, e := range adopted {
		next <- e
	}
	close(next)
	for range min(16, len(adopted)) {
		n.spawn(func() {
			for e := range next {
				if n.life.Err() != nil {
					return
				}
				n.ask(e)
			}
		})
	}
}

const (
	askTimeout = 5 * time.Second
	askTries   = 3
)

// ask learns from an adopted guest what runs in it. What the guest has told by
// itself meanwhile is newer. One that does not answer counts as busy: its time
// to live ends it.
func (n *Node) ask(e *entry) {
	e.mu.Lock()
	m := e.machine
	e.mu.Unlock()
	for range askTries {
		if m == nil {
			return
		}
		ctx, cancel := context.WithTimeout(n.life, askTimeout)
		a, err := m.Guest().Activity(ctx)
		cancel()
		if err != nil {
			continue
		}
		e.mu.Lock()
		if e.running < 0 {
			e.running = int32(a.Running)
		}
		e.mu.Unlock()
		n.schedule(e)
		return
	}
}
