package bench

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// unpack gives each sandbox a folder of its own, unpacked from the compressed tar.
// There is no sandbox around the task: what that costs is left to the others.
func (b *imageBench) unpack(ctx context.Context) (v variant, err error) {
	dir := filepath.Join(b.o.Dir, "unpacked")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return v, err
	}
	n := min(b.o.Unpacks, b.o.N)
	b.o.Log("unpack: %d of a burst of %d", n, b.o.N)
	if err := dropCaches(); err != nil {
		return v, err
	}
	v = variant{name: "unpack", each: Millis()}
	var mu sync.Mutex
	begin := time.Now()
	err = parallel(ctx, b.o.Many, 0, n, func(ctx context.Context, i int) error {
		begin := time.Now()
		e, own := b.envs[i%len(b.envs)], filepath.Join(dir, fmt.Sprint(i))
		if err := b.unpackInto(ctx, e, own); err != nil {
			return err
		}
		written, err := taken(own)
		if err != nil {
			return err
		}
		mu.Lock()
		v.each.Took(time.Since(begin))
		v.written += written
		v.fetched += e.packed
		mu.Unlock()
		return os.RemoveAll(own) // as a sandbox would, and the disk is bounded
	})
	if err != nil {
		return v, err
	}
	scale := float64(b.o.N) / float64(n)
	v.took = time.Duration(float64(time.Since(begin)) * scale)
	v.written, v.fetched = int64(float64(v.written)*scale), int64(float64(v.fetched)*scale)
	return v, nil
}
