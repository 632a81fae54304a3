package depot

import (
	"slices"
	"testing"

	"github.com/dsec-go/dsec/blob"
)

func TestProfileKeepsOrder(t *testing.T) {
	a, b := blob.Of([]byte("a")), blob.Of([]byte("b"))
	n := &note{data: []blob.Digest{a, b}, order: [][2]int{{0, 5}, {0, 1}, {1, 0}, {0, 9}}}
	p, err := decodeProfile(n.encode())
	if err != nil {
		t.Fatal(err)
	}
	var rows []blob.Digest
	var chunks []int
	p.each(func(d blob.Digest, c []int) { rows, chunks = append(rows, d), append(chunks, c...) })
	if !slices.Equal(rows, []blob.Digest{a, b, a}) || !slices.Equal(chunks, []int{5, 1, 0, 9}) {
		t.Errorf("rows of %v, chunks %v", rows, chunks)
	}
}

// FuzzProfile: a profile comes from another node. Whatever it is, what is made of it names
// blobs of its own list.
func FuzzProfile(f *testing.F) {
	f.Add([]byte(`{"v":1,"data":["sha256:00"],"order":[[0,1],[0,2]]}`))
	f.Add([]byte(`{"v":1,"order":[[0,1]]}`))
	f.Add([]byte(`{"v":2}`))
	f.Add([]byte(`[`))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := decodeProfile(b)
		if err != nil {
			return
		}
		n := 0
		p.each(func(d blob.Digest, chunks []int) {
			if !slices.Contains(p.Data, d) {
				t.Errorf("%s is not in the list", d)
			}
			n += len(chunks)
		})
		if n != len(p.Order) {
			t.Errorf("%d chunks of %d", n, len(p.Order))
		}
	})
}
