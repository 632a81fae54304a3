package e2e_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
)

// TestShortOfMemory makes a real node, with containers that really hold memory,
// short of it: it is told of a small host whose free memory is what is left of a
// given sum beside them. It pauses the longest idle until enough has come back
// and no more; when nothing helps it refuses creates; the one that works is never
// touched, and the node answers all the while.
func TestShortOfMemory(t *testing.T) {
	n := unstarted(t)
	const total, each = 1 << 30, 64 << 20
	n.meminfo = filepath.Join(n.dir, "meminfo")
	var room, taken, available atomic.Int64 // taken: by the sandboxes
	tell := func() {
		available.Store(max(0, room.Load()-taken.Load()))
		text := fmt.Sprintf("MemTotal: %d kB\nMemAvailable: %d kB\n", total>>10, available.Load()>>10)
		must(t, os.WriteFile(n.meminfo, []byte(text), 0o600)) // in place: it is mounted
	}
	room.Store(total)
	tell()
	must(t, n.start())
	n.importBusybox(t)
	var all []dsec.Sandbox
	for range 7 {
		sb := n.create(t, plain())
		n.sh(t, sb.ID, fmt.Sprintf("head -c %d /dev/zero > /held; sync; echo mine > /mine", each))
		all = append(all, sb)
	}
	busy := all[0]
	n.begin(t, busy.ID, dsec.Command{Argv: []string{"sleep", "1000"}})
	look := func() (paused []int) {
		sum := int64(0)
		for i, sb := range all {
			got, err := n.Sandboxes.Get(ctx(t), sb.ID)
			must(t, err)
			if got.State == dsec.Paused {
				paused = append(paused, i)
			}
			sum += got.Usage.Memory
		}
		taken.Store(sum)
		tell()
		return paused
	}
	look()
	if taken.Load() < 7*each {
		t.Fatalf("they hold %d MiB", taken.Load()>>20)
	}

	// Less than a tenth is left; one sandbox holds enough to get beyond an eighth.
	room.Store(taken.Load() + 90<<20)
	var paused []int
	eventually(t, "memory comes back", func() bool {
		paused = look()
		return available.Load() > total/8
	})
	if !slices.Equal(paused, []int{1}) {
		t.Errorf("%v were paused, want the longest idle", paused)
	}
	if n.metric(t, "dsec_journal_broken") != 0 {
		t.Error("the node is broken")
	}

	// Somebody else takes everything.
	room.Store(0)
	var times []time.Duration
	var work sync.WaitGroup
	stop := make(chan struct{})
	work.Go(func() {
		s := n.another(t)
		for {
			select {
			case <-stop:
				return
			default:
			}
			begin := time.Now()
			if r, err := s.Commands.Run(ctx(t), on(busy.ID), dsec.Command{Argv: []string{"true"}}, nil); err != nil || r.Code != 0 {
				t.Errorf("a command meanwhile: %+v, %v", r.CommandStatus, err)
				return
			}
			times = append(times, time.Since(begin))
		}
	})
	eventually(t, "all that are idle stand", func() bool { return slices.Equal(look(), []int{1, 2, 3, 4, 5, 6}) })
	_, err := n.Sandboxes.Create(ctx(t), plain(), dsec.CreateOptions{})
	wantKind(t, "a create", err, dsec.Exhausted)
	close(stop)
	work.Wait()
	slices.Sort(times)
	t.Logf("%d commands meanwhile: half within %v, p99 %v, at most %v", len(times), times[len(times)/2], times[len(times)*99/100], times[len(times)-1])

	// It goes, and all is as before.
	room.Store(total)
	look()
	eventually(t, "creates are taken again", func() bool {
		_, err := n.Sandboxes.Create(ctx(t), plain(), dsec.CreateOptions{})
		return err == nil
	})
	for _, sb := range all {
		if r := n.sh(t, sb.ID, "cat /mine; wc -c < /held"); string(r.Out) != fmt.Sprintf("mine\n%d\n", each) {
			t.Errorf("%s says %q", sb.ID, r.Out)
		}
	}
}
