package trajectory_test

import (
	"testing"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/journal"
)

// onDisk puts the rig's journal on a real disk.
func onDisk(b *testing.B) *rig {
	r := newRig(b)
	r.dir = b.TempDir()
	r.fs = func(journal.FS) journal.FS { return journal.HostFS }
	return r.open()
}

// BenchmarkFastForward answers a step from the record.
func BenchmarkFastForward(b *testing.B) {
	r := onDisk(b)
	id := r.create()
	r.run(step(id, "s", 1), "echo hello")
	for b.Loop() {
		if res, err := r.Commands.Run(b.Context(), step(id, "s", 1), sh("echo hello"), nil); err != nil || !res.Replayed {
			b.Fatal(err)
		}
	}
	r.close()
}

// BenchmarkRun records a command that takes no time.
func BenchmarkRun(b *testing.B) {
	r := onDisk(b)
	id := r.create()
	for b.Loop() {
		r.run(dsec.Call{Sandbox: id}, "true")
	}
	r.close()
}

// BenchmarkRunFloor is the same without a record.
func BenchmarkRunFloor(b *testing.B) {
	r := onDisk(b)
	id := r.create()
	for b.Loop() {
		if _, err := r.node.Services().Commands.Run(b.Context(), dsec.Call{Sandbox: id}, sh("true"), nil); err != nil {
			b.Fatal(err)
		}
	}
	r.close()
}

// BenchmarkRunShared is what group commit is for: many sandboxes at once.
func BenchmarkRunShared(b *testing.B) {
	r := onDisk(b)
	b.SetParallelism(32)
	b.RunParallel(func(pb *testing.PB) {
		id := r.create()
		for pb.Next() {
			r.run(dsec.Call{Sandbox: id}, "true")
		}
	})
	r.close()
}
