package image

import (
	"os"
	"path/filepath"

	"github.com/dsec-go/dsec/erofs"
)

// AtPoint has f called at the named points of the library's work; nil ends that.
func AtPoint(l *Library, f func(point string)) { l.point = f }

// Pieces reads a list of pieces, gives how many there are, and asks for each where it
// is said to be.
func Pieces(b []byte, size int64) (n int, found bool, err error) {
	l, err := parsePieces(b, size)
	if err != nil {
		return 0, false, err
	}
	found = true
	for i := range l.len() {
		end := uint32(size / erofs.BlockSize)
		if i+1 < l.len() {
			end = l.starts[i+1]
		}
		found = found && l.has(l.starts[i], l.sum(i), int(end-l.starts[i])*erofs.BlockSize)
	}
	return l.len(), found, nil
}

// FindInRun writes b as a run and looks up a sum in it.
func FindInRun(dir string, b []byte, sum erofs.Sum) (records int, err error) {
	path := filepath.Join(dir, "1.run")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		return 0, err
	}
	r, err := openRun(path)
	if err != nil {
		return 0, err
	}
	defer r.close()
	err = r.find(keyOf(sum), func(record) { records++ })
	for range r.all {
		records++
	}
	return records, err
}

// WriteRun makes a run of sums, all of them in one blob.
func WriteRun(path string, sums []erofs.Sum) error {
	list := make([]record, len(sums))
	for i, s := range sums {
		list[i] = record{keyOf(s), 7, uint32(i)}
	}
	sortRecords(list)
	return writeRun(path, len(list), func(yield func(record) bool) {
		for _, r := range list {
			if !yield(r) {
				return
			}
		}
	})
}
