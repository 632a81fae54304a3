package image

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/erofs"
)

const (
	indexFormat = "dsec file index 1\n"
	runSuffix   = ".run"
	// maxIndex bounds the index of one node: records for some hundred million
	// pieces. What was never found again goes first.
	maxIndex = 2 << 30
	// mergeRatio is how much larger an older run has to be to be left alone.
	mergeRatio = 4
)

// A fileIndex remembers which data blobs of a store hold which contents. It
// belongs to one node and one process at a time, and is a memory, not the truth:
// whatever is wrong with it, who asks it looks at the blob before pointing into
// it. So nothing is synced, and what cannot be read is thrown away.
//
//	lock       held by the process that has it open
//	log        what is known of blobs and layers, one JSON object a line
//	<n>.run    sorted records, the larger n the newer
//
// mu guards everything, also across the I/O of a merge.
type fileIndex struct {
	dir  string
	lock *os.File

	mu       sync.Mutex
	log      *os.File
	blobs    []indexed
	numbers  map[blob.Digest]uint32      // by the plain digest
	plain    map[blob.Digest]blob.Digest // of packed data, by what is stored
	layers   map[blob.Digest]struct{}    // whose blobs are in here
	contents map[blob.Digest]blob.Digest // identity of a content, to the layer made of it
	runs     []*run                      // the oldest first
	next     int                         // number of the next run
	closed   bool                        // an import may still ask
}

// indexed is one data blob.
type indexed struct {
	data Data
	gone bool
	hits int // since the index was opened
}

// A logLine is one of the things the log says.
type logLine struct {
	Data    *Data       `json:"data,omitempty"`
	Gone    blob.Digest `json:"gone,omitempty"`
	Layer   blob.Digest `json:"layer,omitempty"`
	Content blob.Digest `json:"content,omitempty"`
}

// openIndex opens the index in dir or begins a new one. While another process
// has it open it is errIndexBusy.
func openIndex(dir string) (_ *fileIndex, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	x := &fileIndex{
		dir: dir, lock: lock, numbers: map[blob.Digest]uint32{}, plain: map[blob.Digest]blob.Digest{},
		layers: map[blob.Digest]struct{}{}, contents: map[blob.Digest]blob.Digest{},
	}
	defer func() {
		if err != nil {
			x.close()
		}
	}()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, fmt.Errorf("%w: %w", errIndexBusy, err)
	}
	if x.log, err = os.OpenFile(filepath.Join(dir, "log"), os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return nil, err
	}
	if err := x.readLog(); err != nil {
		return nil, err
	}
	return x, x.openRuns()
}

var errIndexBusy = errors.New("the file index belongs to another process")

// readLog takes in what earlier processes knew, and cuts off what it cannot read.
func (x *fileIndex) readLog() error {
	in := bufio.NewReaderSize(x.log, 1<<20)
	good := int64(0)
	for {
		line, err := in.ReadBytes('\n')
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		if good == 0 {
			if string(line) != indexFormat {
				break
			}
		} else {
			var l logLine
			if json.Unmarshal(line, &l) != nil || !x.apply(l) {
				break
			}
		}
		good += int64(len(line))
	}
	if err := x.log.Truncate(good); err != nil {
		return err
	}
	if _, err := x.log.Seek(good, io.SeekStart); err != nil {
		return err
	}
	if good == 0 {
		_, err := x.log.WriteString(indexFormat)
		return err
	}
	return nil
}

// apply does what a line says and reports whether that makes sense.
func (x *fileIndex) apply(l logLine) bool {
	switch {
	case l.Data != nil:
		if l.Data.check(manifestVersion) != nil || l.Data.Pieces == nil {
			return false
		}
		if _, ok := x.numbers[l.Data.Digest]; !ok {
			x.numbers[l.Data.Digest] = uint32(len(x.blobs))
			if l.Data.Packed != nil {
				x.plain[l.Data.Packed.Digest] = l.Data.Digest
			}
			x.blobs = append(x.blobs, indexed{data: *l.Data})
		}
	case l.Gone != "":
		if n, ok := x.numbers[l.Gone]; ok {
			delete(x.plain, x.blobs[n].data.Stored().Digest)
			delete(x.numbers, l.Gone)
			x.blobs[n] = indexed{gone: true}
		}
	case l.Layer.Check() == nil:
		x.layers[l.Layer] = struct{}{}
		if l.Content != "" {
			x.contents[l.Content] = l.Layer
		}
	default:
		return false
	}
	return true
}

// note applies and writes a line.
// Requires: x.mu held.
func (x *fileIndex) note(l logLine) {
	if x.closed || !x.apply(l) {
		return
	}
	b, err := json.Marshal(l)
	if err != nil {
		panic(err) // plain data marshals
	}
	x.log.Write(append(b, '\n')) //nolint:errcheck // then the next process knows less
}

// openRuns opens the runs there are. One that is damaged is removed.
func (x *fileIndex) openRuns() error {
	entries, err := os.ReadDir(x.dir)
	if err != nil {
		return err
	}
	var numbers []int
	for _, e := range entries {
		var n int
		if _, err := fmt.Sscanf(e.Name(), "%d"+runSuffix, &n); err == nil && e.Name() == x.runName(n) {
			numbers = append(numbers, n)
		} else if strings.HasSuffix(e.Name(), ".tmp") {
			os.Remove(filepath.Join(x.dir, e.Name())) //nolint:errcheck // next time
		}
	}
	slices.Sort(numbers)
	for _, n := range numbers {
		path := filepath.Join(x.dir, x.runName(n))
		r, err := openRun(path)
		if err != nil {
			os.Remove(path) //nolint:errcheck // next time
			continue
		}
		x.runs = append(x.runs, r)
		x.next = n + 1
	}
	return nil
}

func (x *fileIndex) runName(n int) string { return fmt.Sprintf("%d%s", n, runSuffix) }

func (x *fileIndex) close() {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, r := range x.runs {
		r.close()
	}
	x.runs, x.closed = nil, true
	if x.log != nil {
		x.log.Close() //nolint:errcheck // nothing of it is promised
	}
	x.lock.Close() //nolint:errcheck // gives the lock back
}

// find calls f with every blob that may hold a piece, and the block where. The
// order is that of the blobs' digests: it must not depend on when this node
// heard of them.
func (x *fileIndex) find(sum erofs.Sum, f func(n uint32, d Data, block uint32)) {
	x.mu.Lock()
	defer x.mu.Unlock()
	var found []record
	for _, r := range x.runs {
		// An error makes this run say nothing.
		r.find(keyOf(sum), func(rec record) { //nolint:errcheck // see above
			if rec.blob < uint32(len(x.blobs)) && !x.blobs[rec.blob].gone {
				found = append(found, rec)
			}
		})
	}
	if len(found) > 1 {
		slices.SortFunc(found, func(a, b record) int {
			return bytes.Compare([]byte(x.blobs[a.blob].data.Digest), []byte(x.blobs[b.blob].data.Digest))
		})
	}
	for _, rec := range found {
		f(rec.blob, x.blobs[rec.blob].data, rec.block)
	}
}

// hit notes that blob n was of use.
func (x *fileIndex) hit(n uint32) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.blobs[n].hits++
}

// has reports whether the blob, or the layer, is known.
func (x *fileIndex) has(data blob.Digest) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	_, ok := x.numbers[data]
	return ok
}

func (x *fileIndex) hasLayer(layer blob.Digest) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	_, ok := x.layers[layer]
	return ok
}

// layerOf gives the layer that was made of a content.
func (x *fileIndex) layerOf(content blob.Digest) (blob.Digest, bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	l, ok := x.contents[content]
	return l, ok
}

// addLayer notes that all of a layer's blobs are in here.
func (x *fileIndex) addLayer(layer, content blob.Digest) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if old, ok := x.contents[content]; content != "" && ok {
		// Two may have been made at the same time. All nodes have to prefer one.
		layer = min(layer, old)
	}
	x.note(logLine{Layer: layer, Content: content})
}

// add takes in a blob and its pieces.
func (x *fileIndex) add(d Data, pieces *pieceList) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if _, ok := x.numbers[d.Digest]; ok || x.closed || pieces.len() > maxRunCount {
		return nil
	}
	x.note(logLine{Data: &d})
	n := x.numbers[d.Digest]
	list := make([]record, pieces.len())
	for i := range list {
		list[i] = record{keyOf(pieces.sum(i)), n, pieces.starts[i]}
	}
	sortRecords(list)
	if err := x.addRun(len(list), slices.Values(list)); err != nil {
		return err
	}
	return x.merge()
}

// addRun writes records as the newest run.
// Requires: x.mu held.
func (x *fileIndex) addRun(n int, records iter.Seq[record]) error {
	path := filepath.Join(x.dir, x.runName(x.next))
	if err := writeRun(path, n, records); err != nil {
		return err
	}
	r, err := openRun(path)
	if err != nil {
		return err
	}
	x.next++
	x.runs = append(x.runs, r)
	return nil
}

// merge joins the newest runs until each is a good deal smaller than the one
// before it, so that there are few.
// Requires: x.mu held.
func (x *fileIndex) merge() error {
	total := int64(0)
	for _, r := range x.runs {
		total += int64(r.count)
	}
	if over := total - maxIndex/runRecord; over > 0 {
		x.shrink(over)
		return x.join(len(x.runs))
	}
	k, sum := 1, int64(0)
	for i := len(x.runs) - 1; i > 0; i-- {
		sum += int64(x.runs[i].count)
		if int64(x.runs[i-1].count) >= mergeRatio*sum {
			break
		}
		k = len(x.runs) - i + 1
	}
	if k == 1 {
		return nil
	}
	return x.join(k)
}

// join makes one run of the newest k, without records of blobs that are gone.
// Requires: x.mu held.
func (x *fileIndex) join(k int) error {
	keep := len(x.runs) - k
	parts := x.runs[keep:]
	n := 0
	for _, r := range parts {
		n += int(r.count)
	}
	if n > maxRunCount {
		return nil
	}
	err := x.addRun(n, func(yield func(record) bool) {
		for rec := range mergeRuns(parts) {
			if rec.blob < uint32(len(x.blobs)) && !x.blobs[rec.blob].gone && !yield(rec) {
				return
			}
		}
	})
	if err != nil {
		return err
	}
	made := x.runs[len(x.runs)-1]
	for _, r := range parts {
		r.close()
		os.Remove(r.path) //nolint:errcheck // its records are there twice then
	}
	x.runs = append(slices.Clone(x.runs[:keep]), made)
	return nil
}

// mergeRuns yields the records of sorted runs in order.
func mergeRuns(runs []*run) iter.Seq[record] {
	if len(runs) == 1 {
		return runs[0].all
	}
	a, b := mergeRuns(runs[:len(runs)/2]), mergeRuns(runs[len(runs)/2:])
	return func(yield func(record) bool) {
		next, stop := iter.Pull(b)
		defer stop()
		r, more := next()
		for l := range a {
			for more && r.compare(l) < 0 {
				if !yield(r) {
					return
				}
				r, more = next()
			}
			if !yield(l) {
				return
			}
		}
		for more {
			if !yield(r) {
				return
			}
			r, more = next()
		}
	}
}

// shrink forgets blobs until about n records are, those without use first and
// among them the oldest.
// Requires: x.mu held.
func (x *fileIndex) shrink(n int64) {
	var order []uint32
	for i, b := range x.blobs {
		if !b.gone {
			order = append(order, uint32(i))
		}
	}
	slices.SortStableFunc(order, func(a, b uint32) int { return x.blobs[a].hits - x.blobs[b].hits })
	for _, i := range order {
		if n <= 0 {
			return
		}
		d := x.blobs[i].data
		n -= d.Pieces.Size / pieceSize
		x.note(logLine{Gone: d.Digest})
	}
}

// forget notes that a blob is not there any more, by either of its names.
func (x *fileIndex) forget(d blob.Digest) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if p, ok := x.plain[d]; ok {
		d = p
	}
	if _, ok := x.numbers[d]; ok {
		x.note(logLine{Gone: d})
	}
}
