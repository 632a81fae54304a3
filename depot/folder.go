package depot

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/erofs"
	"github.com/dsec-go/dsec/fuse"
	"github.com/dsec-go/dsec/lazy"
)

// folder is the FUSE folder: what is read there is timed and noted.
type folder struct {
	*registry
	cache  *lazy.Cache
	limit  time.Duration
	spent  *Ledger
	waited atomic.Int64 // nanoseconds, of all groups
	log    *slog.Logger

	toldMu sync.Mutex
	told   map[blob.Digest]time.Time // of which blob a failed read was logged, and when
	noted  notes
	opened atomic.Int64
}

// Read implements fuse.Folder.
func (f *folder) Read(ctx context.Context, r fuse.Read) (int, error) {
	f.opened.Add(1)
	k := f.get(r.Node)
	if k == nil {
		return 0, fmt.Errorf("%w: %w", unix.ESTALE, errUnknown)
	}
	for try := 1; ; try++ {
		turn := k.turns.Load()
		n, err := f.read(ctx, k, r)
		if errors.Is(err, blob.ErrNotFound) && f.detour(k, turn, try) {
			continue
		}
		if err != nil && ctx.Err() == nil {
			f.tell(k.blob.Digest, err)
		}
		return n, err
	}
}

// tellEvery is how often failed reads of one blob are logged.
const tellEvery = time.Minute

// tell logs that a read failed: what its reader sees is an I/O error.
func (f *folder) tell(d blob.Digest, err error) {
	f.toldMu.Lock()
	defer f.toldMu.Unlock()
	if time.Since(f.told[d]) < tellEvery {
		return
	}
	if f.told == nil || len(f.told) > maxLayers {
		f.told = map[blob.Digest]time.Time{}
	}
	f.told[d] = time.Now()
	f.log.Warn("a read of layer data failed", "blob", d, "err", err)
}

// read is Read on the way to a blob that is the first now.
func (f *folder) read(ctx context.Context, k *known, r fuse.Read) (int, error) {
	begin := time.Now()
	if err := f.readyIn(ctx, k); err != nil {
		f.account(r.Pid, 0, time.Since(begin))
		return 0, err
	}
	got, err := f.cache.Read(ctx, k.blob.Digest, r.Off, r.Size, r.Buf)
	if got.Waited > 0 {
		fetched := int64(0)
		for _, i := range got.Missed {
			fetched += min(erofs.ChunkSize, k.blob.Size-int64(i)*erofs.ChunkSize)
		}
		f.account(r.Pid, fetched, got.Waited)
	}
	f.noted.read(k.blob.Digest, r.Off, got.N)
	return got.N, err
}

// account notes what a thread has waited for.
func (f *folder) account(pid int, fetched int64, waited time.Duration) {
	f.waited.Add(int64(waited))
	f.spent.Add(groupOf(pid), fetched, waited)
}

// readyIn is ready within the limit of a read.
func (f *folder) readyIn(ctx context.Context, k *known) error {
	ctx, cancel := context.WithTimeout(ctx, f.limit)
	defer cancel()
	return f.ready(ctx, k)
}

// groupOf gives the control group of a thread: in the hierarchy of memory, or in the one.
func groupOf(tid int) string {
	if tid <= 0 {
		return ""
	}
	b, err := os.ReadFile("/proc/" + strconv.Itoa(tid) + "/cgroup")
	if err != nil {
		return ""
	}
	group := ""
	for line := range strings.Lines(string(b)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) != 3 {
			continue
		}
		if f[1] == "" && group == "" || strings.Contains(","+f[1]+",", ",memory,") {
			group = f[2]
		}
	}
	return group
}
