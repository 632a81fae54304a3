package guest

import (
	"archive/tar"
	"bytes"
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/dsec-go/dsec"
)

func FuzzResolve(f *testing.F) {
	f.Add("ann", []byte("root:x:0:0:r:/root:/bin/sh\nann:x:5:6::/home/ann:\n"), []byte("g:x:7:ann,bob\n"))
	f.Add("5:g", []byte("+::::::\n:::\n\xff:x:4294967295:0:::\n"), []byte("g:x:99999999999:\n#\n"))
	f.Fuzz(func(t *testing.T, user string, passwd, group []byte) {
		id, err := resolve(user, passwd, group)
		if err != nil {
			if dsec.KindOf(err) != dsec.Invalid {
				t.Fatal(err)
			}
			return
		}
		if id.uid == 1<<32-1 || id.gid == 1<<32-1 || len(id.groups) == 0 || id.groups[0] != id.gid || id.home == "" || id.home[0] != '/' {
			t.Fatalf("%+v", id)
		}
	})
}

// FuzzUnpack extracts anything into a folder and sees that nothing beside it
// changes.
func FuzzUnpack(f *testing.F) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	w.WriteHeader(&tar.Header{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o755})
	w.WriteHeader(&tar.Header{Name: "d/../../s", Linkname: "/..", Typeflag: tar.TypeSymlink})
	w.WriteHeader(&tar.Header{Name: "s/f", Size: 1, Mode: 0o644})
	w.Write([]byte("x"))
	w.Close()
	f.Add(b.Bytes())
	dir := f.TempDir()
	in := filepath.Join(dir, "in")
	f.Fuzz(func(t *testing.T, archive []byte) {
		os.Mkdir(in, 0o755)
		unpack(context.Background(), target{in, identity{}}, bytes.NewReader(archive)) //nolint:errcheck // whatever it says
		beside, err := os.ReadDir(dir)
		if err != nil || len(beside) != 1 {
			t.Fatalf("%v %v", beside, err)
		}
		if err := removeAll(context.Background(), in); err != nil {
			t.Fatal(err)
		}
	})
}

// FuzzRecord compares a record with all that was ever appended to it.
func FuzzRecord(f *testing.F) {
	f.Add([]byte{1, 2, 3, 200, 201, 255, 254, 0, 1, 0, 1}, uint16(100))
	f.Add(bytes.Repeat([]byte{0, 1}, 3000), uint16(2000))
	f.Add(bytes.Repeat([]byte{250, 251, 3}, 15), uint16(65535))
	f.Add(bytes.Repeat([]byte{250, 251, 3}, 15), uint16(9))
	f.Fuzz(func(t *testing.T, ops []byte, limit uint16) {
		total := 0
		for _, op := range ops {
			total += int(op>>1) * int(op>>1) * 4
		}
		if len(ops) > 4096 || total > 2<<20 {
			return
		}
		a := &arena{dir: -1}
		defer a.close()
		r := newRecord(a, int64(limit)*4+1)
		var all []byte    // in order
		var owner []uint8 // of each byte
		var each [2][]byte
		check := func() {
			out, err := r.stats()
			for s, st := range []dsec.StreamStat{out, err} {
				n := int64(len(each[s]))
				if st.Total != n || st.Kept != min(n, r.limit) {
					t.Fatalf("stream %d: %+v of %d with limit %d", s, st, n, r.limit)
				}
				for _, off := range []int64{0, n / 2, max(0, n-100)} {
					got, err := r.read(s, off, 1<<20)
					if err != nil || !bytes.HasPrefix(each[s][off:], got) || off < st.Kept && int64(len(got)) < st.Kept-off {
						t.Fatalf("stream %d from %d: %d bytes, %v", s, off, len(got), err)
					}
					if off >= n-dsec.OutputTail && off >= st.Kept && len(r.tailSegs(s)) < maxSegs && int64(len(got)) != n-off {
						t.Fatalf("tail of stream %d from %d: %d bytes of %d", s, off, len(got), n-off)
					}
				}
			}
		}
		for i, op := range ops {
			n := int(op>>1) * int(op>>1) * 4
			p := bytes.Repeat([]byte{byte(i)}, n)
			s := int(op & 1)
			r.append(s, p)
			all = append(all, p...)
			owner = append(owner, bytes.Repeat([]byte{uint8(s)}, n)...)
			each[s] = append(each[s], p...)
			if i%64 == 0 {
				check()
			}
		}
		check()
		r.end()
		check()
		c := &command{out: r, done: make(chan struct{})}
		close(c.done)
		for _, from := range []int64{0, int64(len(all) / 3)} {
			next := from
			err := c.attach(context.Background(), from, func(o dsec.Output, _ error) bool {
				if o.Offset != next+o.Gap {
					t.Fatalf("offset %d after %d, gap %d", o.Offset, next, o.Gap)
				}
				next = o.Offset + int64(len(o.Data))
				if !bytes.Equal(all[o.Offset:next], o.Data) || len(o.Data) > 0 && owner[o.Offset] != uint8(o.Stream-dsec.Stdout) {
					t.Fatalf("data at %d differs", o.Offset)
				}
				return true
			})
			if err != nil || next != int64(len(all)) {
				t.Fatalf("ended at %d of %d: %v", next, len(all), err)
			}
		}
		r.free()
		if len(a.free) != int(a.next) {
			t.Fatalf("%d of %d chunks came back", len(a.free), a.next)
		}
	})
}

func (r *record) tailSegs(s int) []seg {
	if r.tails[s] == nil {
		return nil
	}
	return r.tails[s].segs
}
