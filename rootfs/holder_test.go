package rootfs_test

import (
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec/rootfs"
)

// drawer is a Holder in this process: a descriptor of its own for each name, as a holder has.
type drawer map[string]*os.File

func (d drawer) Put(name string, f *os.File) error {
	fd, err := unix.Dup(int(f.Fd()))
	if err != nil {
		return err
	}
	d[name] = os.NewFile(uintptr(fd), name)
	return nil
}

func (d drawer) Get(name string) (*os.File, error) {
	fd, err := unix.Dup(int(d[name].Fd()))
	return os.NewFile(uintptr(fd), name), err
}

func (d drawer) List(prefix string) (names []string, err error) {
	for name := range d {
		if strings.HasPrefix(name, prefix) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names, nil
}

func (d drawer) Drop(name string) error {
	d[name].Close()
	delete(d, name)
	return nil
}

func device(t *testing.T, f *os.File) uint64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	return st.Dev
}

// TestMountsAreAdopted: the table of the next process has the superblock of the last, and
// drops from the holder what it drops.
func TestMountsAreAdopted(t *testing.T) {
	source := rootfs.NewTiny(t)
	held := drawer{}
	first := rootfs.NewLayers(source)
	if err := first.Adopt(held); err != nil {
		t.Fatal(err)
	}
	mounts, _, err := first.Acquire(t.Context(), []string{"a"})
	if err != nil {
		t.Fatal(err)
	}
	if len(held) == 0 && !rootfs.Usable(mounts[0]) {
		// Kernels before 6.15 clone no detached mount: a node's end with it, and the next mounts anew.
		next := rootfs.NewLayers(source)
		if err := next.Adopt(held); err != nil {
			t.Fatal(err)
		}
		if got := next.InUse(); len(got) != 0 {
			t.Errorf("adopted %v of nothing", got)
		}
		_, release, err := next.Acquire(t.Context(), []string{"a"})
		if err != nil {
			t.Fatal(err)
		}
		release()
		return
	}
	if len(held) != 1 {
		t.Fatalf("the holder has %v", held)
	}
	was := device(t, mounts[0])

	// What is no mount of a layer is not taken.
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	if err := held.Put("layer/b/lazy", null); err != nil {
		t.Fatal(err)
	}
	next := rootfs.NewLayers(source)
	if err := next.Adopt(held); err != nil {
		t.Fatal(err)
	}
	if got := next.InUse(); len(got) != 1 || got[0] != "a" {
		t.Errorf("adopted %v", got)
	}
	again, release, err := next.Acquire(t.Context(), []string{"a"})
	if err != nil {
		t.Fatal(err)
	}
	if is := device(t, again[0]); is != was {
		t.Errorf("device %d, want %d", is, was)
	}
	// Another holder, since theirs died.
	spare := drawer{}
	if err := next.Adopt(spare); err != nil {
		t.Fatal(err)
	}
	if len(spare) != 1 {
		t.Errorf("the next holder has %v", spare)
	}
	release()
	next.Forget()
	if len(spare) != 0 || len(next.InUse()) != 0 {
		t.Errorf("after Forget the holder has %v, the table %v", spare, next.InUse())
	}
	for name := range held {
		held.Drop(name) //nolint:errcheck // never fails
	}
}
