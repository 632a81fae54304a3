package edge

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/dsec-go/dsec"
)

// gate bounds how many starts run at once and how many creates wait for one.
// What waits is served in the order in which it came.
type gate struct {
	starts chan struct{} // full when Limits.Starts run
	queue  chan struct{} // full when Limits.Queue wait
	wait   time.Duration
}

func newGate(l Limits) gate {
	return gate{starts: make(chan struct{}, l.Starts), queue: make(chan struct{}, l.Queue), wait: l.QueueWait}
}

// enter takes a slot for a start; leave gives it back. Whoever finds the queue
// full, or has waited too long in it, is Exhausted: nothing was begun for it,
// so it is never told of a timeout.
func (g *gate) enter(ctx context.Context) error {
	select {
	case g.starts <- struct{}{}:
		return nil
	default:
	}
	select {
	case g.queue <- struct{}{}:
		defer func() { <-g.queue }()
	default:
		return dsec.Errorf(dsec.Exhausted, "%d creates wait for their start on this node already", cap(g.queue))
	}
	limit := time.NewTimer(g.wait)
	defer limit.Stop()
	select {
	case g.starts <- struct{}{}:
		if !over(ctx) {
			return nil
		}
		g.leave() // both happened at once
		<-ctx.Done()
	case <-limit.C:
		return dsec.Errorf(dsec.Exhausted, "no start in %v: the node is starting as much as it can", g.wait)
	case <-ctx.Done():
	}
	err := context.Cause(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		return dsec.Errorf(dsec.Exhausted, "no start before the call's deadline: the node is starting as much as it can")
	}
	return err
}

func (g *gate) leave() { <-g.starts }

// over reports whether ctx has ended or does so at this instant.
func over(ctx context.Context) bool {
	deadline, ok := ctx.Deadline()
	return ctx.Err() != nil || ok && !time.Now().Before(deadline)
}

// reserve counts one more living sandbox if the node may have it, and holds
// Close back until the caller calls n.work.Done.
func (n *Node) reserve() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case n.closing:
		return errClosing
	case n.broken.Load():
		return dsec.Errorf(dsec.Unavailable, "the node cannot write its journal and takes no new sandboxes")
	case n.alive >= n.limits.Sandboxes:
		return dsec.Errorf(dsec.Exhausted, "the node has %d sandboxes, its limit", n.alive)
	}
	n.alive++
	n.work.Add(1)
	return nil
}

// unreserve takes back what reserve counted.
func (n *Node) unreserve() {
	n.mu.Lock()
	n.alive--
	n.mu.Unlock()
}

// room is Exhausted when the host is short of something. Limits of sandboxes
// are not added up: a node gives out more than it has and refuses by what is
// really used.
func (n *Node) room() error {
	h, err := n.gauge.sample()
	if err != nil {
		return dsec.Errorf(dsec.Unavailable, "measure host: %w", err)
	}
	l := n.limits
	starting := int64(len(n.gate.starts))
	switch {
	case h.Available < l.MemoryReserve+starting*l.StartMemory:
		return dsec.Errorf(dsec.Exhausted, "memory: %d MiB are available, %d MiB are kept free", h.Available>>20, l.MemoryReserve>>20)
	case h.Pressure.Memory > l.MemoryPressure:
		return dsec.Errorf(dsec.Exhausted, "memory: work waits for it %.0f%% of the time", h.Pressure.Memory)
	case h.DiskFree < l.DiskReserve:
		return dsec.Errorf(dsec.Exhausted, "disk: %d MiB are free, %d MiB are kept free", h.DiskFree>>20, l.DiskReserve>>20)
	case h.InodesFree >= 0 && h.InodesFree < minInodes:
		return dsec.Errorf(dsec.Exhausted, "disk: %d inodes are free", h.InodesFree)
	case h.MaxTasks > 0 && h.MaxTasks-h.Tasks < l.TaskReserve+int(starting)*startTasks:
		return dsec.Errorf(dsec.Exhausted, "processes: %d of %d are there", h.Tasks, h.MaxTasks)
	}
	return nil
}

const (
	minInodes  = 10_000
	startTasks = 16 // processes and threads of a start under way
)

// hostFault gives an error of the layers below a kind where it has none and
// the host is out of something.
func hostFault(err error) error {
	var e *dsec.Error
	if errors.As(err, &e) {
		return err
	}
	for _, no := range []error{syscall.ENOSPC, syscall.EDQUOT, syscall.EMFILE, syscall.ENFILE, syscall.EAGAIN, syscall.ENOMEM} {
		if errors.Is(err, no) {
			return &dsec.Error{Kind: dsec.Exhausted, Err: fmt.Errorf("the node is out of something: %w", err)}
		}
	}
	return err
}
