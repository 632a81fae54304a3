package edge

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"syscall"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

// diskBudget is how long one round of measuring may take: a node full of
// writers is measured in turns instead of all the time.
const diskBudget = 500 * time.Millisecond

// What watchDisk goes by: a file system whose free bytes moved less than
// diskStir since the last whole round holds nothing new. Whoever is in use is
// measured in every round, the others, in which a process left behind may
// write, once per diskRest.
const (
	diskStir = 1 << 20
	diskRest = time.Minute
)

// watchDisk enforces Resources.Disk on hosts without quota: a sandbox whose
// writable layer has grown beyond its limit is ended. It may thus exceed its
// limit by what it writes between two rounds; the node's reserve is what
// protects the others meanwhile.
func (n *Node) watchDisk(ctx context.Context) {
	tick := time.NewTicker(n.cfg.DiskEvery)
	defer tick.Stop()
	var next uint64 // ord at which the next round begins
	free := int64(-diskStir)
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		h, err := n.gauge.sample()
		if err == nil && max(h.DiskFree-free, free-h.DiskFree) < diskStir {
			continue
		}
		whole := false
		next, whole = n.measureRound(ctx, next)
		if whole && err == nil {
			free = h.DiskFree
		}
	}
}

// measureRound measures the sandboxes from ord on, as far as the budget
// goes. whole reports that it got through.
func (n *Node) measureRound(ctx context.Context, from uint64) (next uint64, whole bool) {
	begin := time.Now()
	n.mu.RLock()
	i, _ := n.position(from)
	all := append(append([]*entry(nil), n.order[i:]...), n.order[:i]...)
	n.mu.RUnlock()
	for _, e := range all {
		if ctx.Err() != nil || time.Since(begin) > diskBudget {
			return e.ord, false
		}
		n.measure(ctx, e)
	}
	return 0, true
}

// measure measures e if that is due, and ends it if it is too large.
func (n *Node) measure(ctx context.Context, e *entry) {
	now := n.clock.nano()
	e.mu.Lock()
	m := e.machine
	stale := e.busy() || e.lastUsed >= e.measured || now-e.measured >= int64(diskRest)
	due := m != nil && e.ending == nil && stale
	limit := e.rec.spec.spec.Resources.Disk
	e.mu.Unlock()
	if !due {
		return
	}
	used, err := n.cfg.Measure(ctx, m)
	if err != nil {
		return // it is going away, or tried again in the next round
	}
	e.mu.Lock()
	e.disk, e.measured = used, now
	e.mu.Unlock()
	if used <= limit {
		return
	}
	v := judge(dsec.CauseDisk, fmt.Sprintf("its writable layer has %d MiB, more than its %d MiB", used>>20, limit>>20))
	if n.end(e, v, nobodyWaits) != nil {
		n.events.DiskFull(e.id, used, limit)
	}
}

// MeasureUpper is the Measure that walks a machine's writable layer and adds
// up the blocks of its files. A machine without one counts as empty.
func MeasureUpper(ctx context.Context, m driver.Machine) (int64, error) {
	u, ok := m.(driver.Upper)
	if !ok {
		return 0, nil
	}
	dir, _ := u.Upper()
	// The workload may swap a folder for a link while it is walked: a Root does
	// not follow it out of the layer.
	root, err := os.OpenRoot(dir)
	if err != nil {
		return 0, fmt.Errorf("measure writable layer: %w", err)
	}
	defer root.Close()
	var total int64
	linked := map[uint64]bool{} // inodes with several names
	err = fs.WalkDir(root.FS(), ".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil && path != ".":
			return nil // the workload goes on meanwhile
		case err != nil:
			return err
		}
		info, err := d.Info()
		if err != nil {
			return nil
		}
		st, ok := info.Sys().(*syscall.Stat_t)
		if !ok {
			return nil
		}
		if st.Nlink > 1 && !d.IsDir() {
			if linked[st.Ino] {
				return nil
			}
			linked[st.Ino] = true
		}
		total += st.Blocks * 512
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("measure writable layer: %w", err)
	}
	return total, nil
}
