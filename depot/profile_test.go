package depot

import (
	"encoding/json"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/lazy"
)

// TestNotes: pages are noted once, in the order in which they were read, for as long as it is asked
// for and for each layer that has the blob.
func TestNotes(t *testing.T) {
	const page = lazy.PageSize
	a, b := blob.Of([]byte("a")), blob.Of([]byte("b"))
	one, two, three := blob.Of([]byte("1")), blob.Of([]byte("2")), blob.Of([]byte("3"))
	n := &notes{after: time.Hour}
	n.begin(one, []blob.Digest{a, b})
	n.read(b, 5*page, 2*page)
	n.begin(two, []blob.Digest{b})
	n.read(b, 7*page+1, page)      // two pages behind those
	n.read(a, 0, 1)                // a part of one
	n.read(b, 4*page, 6*page)      // of which five are known
	n.read(a, 64*page, 0)          // nothing
	n.read(three, 0, page)         // of nobody's
	n.begin(one, []blob.Digest{a}) // as it was
	if n.take(one) != nil {
		t.Error("it was given while it was noted")
	}
	n.after = 0
	for layer, want := range map[blob.Digest][]extent{
		one: {{1, 5, 4}, {0, 0, 1}, {1, 4, 1}, {1, 9, 1}},
		two: {{0, 7, 2}, {0, 4, 3}, {0, 9, 1}},
	} {
		if got := n.take(layer); got == nil || !slices.Equal(got.extents, want) {
			t.Errorf("%+v, want %v", got, want)
		}
	}
	n.read(a, 9*page, page)
	n.dismiss(two)
	if got := n.take(one); len(got.extents) != 4 || n.take(two) != nil || n.take(three) != nil {
		t.Errorf("later: %+v", got)
	}
	// One that reads everything is cut short.
	n.after = time.Hour
	n.begin(three, []blob.Digest{a})
	n.read(a, 0, 1<<30)
	n.after = 0
	if got := n.take(three); len(got.extents) != 1 || got.extents[0][2] != maxPages {
		t.Errorf("%+v, want %d pages", got.extents, maxPages)
	}
}

// FuzzProfile: a profile comes from another node. Whatever it is, what is made of it names
// blobs of its own list, and no more than a frame holds.
func FuzzProfile(f *testing.F) {
	d := blob.Of(nil)
	sum := fmt.Sprintf("%064x", 1)
	good, _ := json.Marshal(profile{V: 2, Data: []blob.Digest{d}, Pack: d, Frames: []frame{{sum, 5, []extent{{0, 1, 2}, {0, 9, 1}}}}})
	f.Add(good)
	f.Add([]byte(`{"v":1,"data":["` + string(d) + `"],"order":[[0,1]]}`))
	f.Add([]byte(`{"v":2,"data":["` + string(d) + `"],"pack":"` + string(d) + `","frames":[{"sum":"` + sum + `","stored":5,"extents":[[0,0,999999]]}]}`))
	f.Add([]byte(`[`))
	if _, err := decodeProfile(good); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := decodeProfile(b)
		if err != nil {
			return
		}
		for _, fr := range p.Frames {
			pages := 0
			for _, x := range p.pages(fr) {
				if !slices.Contains(p.Data, x.Blob) || x.First < 0 || x.Many <= 0 {
					t.Errorf("%+v", x)
				}
				pages += x.Many
			}
			if fr.Stored > frameSize || pages > frameSize/lazy.PageSize+len(p.Data) {
				t.Errorf("a frame of %d bytes and %d pages", fr.Stored, pages)
			}
		}
	})
}
