package depot

import (
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ledgerName is the file of a Ledger in the folder of a depot.
const ledgerName = "spent"

// Bounds of a ledger. A node has fewer slots than half its rows.
const (
	ledgerRows = 1 << 17
	ledgerRow  = 32
	ledgerTry  = 64 // rows that are looked at for one group
)

// Ledger sums up, by control group, what processes that read layers have waited for: bytes that
// were not here when they were read, and the time that it took to fetch them. It lies in
// a file that the depot writes and dsec up reads, mapped by both: so asking costs nothing, and a
// depot that dies takes nothing along. Groups are told by the first two parts of their path,
// which every slot of a driver has for itself. It is safe for concurrent use; only one process
// at a time may Add.
type Ledger struct{ rows []ledgerEntry }

// ledgerEntry is one row: key 0 is free. What is cleared keeps its key, for who comes next.
type ledgerEntry struct {
	key, fetched, waited atomic.Int64
	_                    int64
}

// OpenLedger maps that of the depot in a folder, and makes it if it is not there. It stays mapped
// for the life of the process: a late reader must not find it gone.
func OpenLedger(dir string) (*Ledger, error) {
	f, err := os.OpenFile(filepath.Join(dir, ledgerName), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open ledger: %w", err)
	}
	defer f.Close()
	err = f.Truncate(ledgerRows * ledgerRow) // sparse; no file of another size has been written
	var b []byte
	if err == nil {
		b, err = unix.Mmap(int(f.Fd()), 0, ledgerRows*ledgerRow, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err != nil {
		return nil, fmt.Errorf("open ledger: %w", err)
	}
	return &Ledger{rows: unsafe.Slice((*ledgerEntry)(unsafe.Pointer(&b[0])), ledgerRows)}, nil
}

// ledgerKey names a group.
func ledgerKey(group string) int64 {
	parts := strings.SplitN(strings.Trim(group, "/"), "/", 3)
	h := fnv.New64a()
	h.Write([]byte(strings.Join(parts[:min(2, len(parts))], "/")))
	return int64(h.Sum64() | 1)
}

// row finds the row of a group, or one for it; nil if there is none.
func (l *Ledger) row(key int64, add bool) *ledgerEntry {
	for i := range ledgerTry {
		r := &l.rows[(uint64(key)>>1+uint64(i))%ledgerRows]
		switch k := r.key.Load(); {
		case k == key:
			return r
		case k == 0 && !add:
			return nil
		case k == 0 && r.key.CompareAndSwap(0, key), r.key.Load() == key:
			return r
		}
	}
	return nil
}

// Add adds to what a group has. A group for which there is no row is left out.
func (l *Ledger) Add(group string, fetched int64, waited time.Duration) {
	if r := l.row(ledgerKey(group), true); r != nil {
		r.fetched.Add(fetched)
		r.waited.Add(int64(waited))
	}
}

// Get gives what a group has.
func (l *Ledger) Get(group string) (fetched int64, waited time.Duration) {
	r := l.row(ledgerKey(group), false)
	if r == nil {
		return 0, 0
	}
	return r.fetched.Load(), time.Duration(r.waited.Load())
}

// Take gives what a group has, and clears it for who is in the group next.
func (l *Ledger) Take(group string) (fetched int64, waited time.Duration) {
	r := l.row(ledgerKey(group), false)
	if r == nil {
		return 0, 0
	}
	return r.fetched.Swap(0), time.Duration(r.waited.Swap(0))
}

// Keep clears all groups but some.
func (l *Ledger) Keep(groups []string) {
	keep := map[int64]bool{}
	for _, g := range groups {
		keep[ledgerKey(g)] = true
	}
	for i := range l.rows {
		if r := &l.rows[i]; r.key.Load() != 0 && !keep[r.key.Load()] {
			r.fetched.Store(0)
			r.waited.Store(0)
		}
	}
}
