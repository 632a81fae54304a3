package guest_test

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
)

// watched collects events until told to stop.
type watched struct {
	*box
	events chan dsec.WatchEvent
	done   chan error
	stop   context.CancelFunc
}

func (b *box) watch(name string, recursive bool) *watched {
	b.Helper()
	ctx, stop := context.WithCancel(b.Context())
	w := &watched{box: b, events: make(chan dsec.WatchEvent, 1<<16), done: make(chan error, 1), stop: stop}
	go func() {
		var last error
		for e, err := range b.Files().Watch(ctx, nobody, b.op(name), dsec.WatchOptions{Recursive: recursive}) {
			if last = err; err == nil {
				w.events <- e
			}
		}
		close(w.events)
		w.done <- last
	}()
	w.want(dsec.WatchEvent{Op: dsec.OpReady, Path: b.dir + "/" + name})
	return w
}

func (w *watched) want(want ...dsec.WatchEvent) {
	w.Helper()
	for _, e := range want {
		select {
		case got := <-w.events:
			if got != e {
				w.Fatalf("event %+v, want %+v", got, e)
			}
		case <-time.After(10 * time.Second):
			w.Fatalf("no event; want %+v", e)
		}
	}
}

func TestWatch(t *testing.T) {
	b := newBox(t)
	os.MkdirAll(b.dir+"/w/sub", 0o755)
	w := b.watch("w", true)
	defer w.stop()
	at := b.dir + "/w/"
	ev := func(op dsec.WatchOp, p string, to ...string) dsec.WatchEvent {
		e := dsec.WatchEvent{Op: op, Path: at + p}
		if len(to) > 0 {
			e.To = at + to[0]
		}
		return e
	}
	os.WriteFile(at+"sub/f", []byte("x"), 0o644)
	w.want(ev(dsec.OpCreate, "sub/f"), ev(dsec.OpWrite, "sub/f"))
	os.Chmod(at+"sub/f", 0o600)
	w.want(ev(dsec.OpChmod, "sub/f"))
	os.Rename(at+"sub/f", at+"g")
	w.want(ev(dsec.OpRename, "sub/f", "g"))
	os.Remove(at + "g")
	w.want(ev(dsec.OpRemove, "g"))
	os.Rename(at+"sub", at+"dir")
	w.want(ev(dsec.OpRename, "sub", "dir"))
	os.WriteFile(at+"dir/h", nil, 0o644)
	w.want(ev(dsec.OpCreate, "dir/h"))
	os.Rename(at+"dir", b.dir+"/left")
	w.want(ev(dsec.OpRemove, "dir"))
	os.WriteFile(b.dir+"/left/unseen", nil, 0o644)
	os.Rename(b.dir+"/left", at+"back")
	w.want(ev(dsec.OpCreate, "back"), ev(dsec.OpCreate, "back/h"), ev(dsec.OpCreate, "back/unseen"))
	b.put(b.op("w/whole"), "one", dsec.WriteOptions{})
	w.want(ev(dsec.OpWrite, "whole"))
	os.Remove(at + "back/h")
	os.Remove(at + "back/unseen")
	os.Remove(at + "back")
	w.want(ev(dsec.OpRemove, "back/h"), ev(dsec.OpRemove, "back/unseen"), ev(dsec.OpRemove, "back"))
	w.stop()
	for range w.events {
	}
	if err := <-w.done; dsec.KindOf(err) != dsec.Canceled {
		t.Fatalf("ended with %v", err)
	}
	_, err := first(b.Files().Watch(b.Context(), nobody, b.op("none"), dsec.WatchOptions{}))
	wantKind(t, err, dsec.NotFound)
	_, err = first(b.Files().Watch(b.Context(), nobody, b.op("w/whole"), dsec.WatchOptions{}))
	wantKind(t, err, dsec.Invalid)
}

func first[T any](seq func(func(T, error) bool)) (v T, err error) {
	seq(func(x T, e error) bool { v, err = x, e; return false })
	return v, err
}

// Nothing is missed in folders that are made and filled at once.
func TestWatchBurst(t *testing.T) {
	b := newBox(t)
	os.Mkdir(b.dir+"/w", 0o755)
	w := b.watch("w", true)
	defer w.stop()
	const dirs, files = 50, 200
	go func() {
		for d := range dirs {
			os.MkdirAll(fmt.Sprintf("%s/w/%d/a/b", b.dir, d), 0o755)
			for f := range files {
				os.WriteFile(fmt.Sprintf("%s/w/%d/a/b/%d", b.dir, d, f), nil, 0o644)
			}
		}
	}()
	seen := make(map[string]int)
	for len(seen) < dirs*(files+3) {
		select {
		case e := <-w.events:
			if e.Op == dsec.OpCreate {
				seen[e.Path]++
			}
			if e.Op == dsec.OpOverflow {
				t.Fatal("overflow")
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("%d of %d", len(seen), dirs*(files+3))
		}
	}
	for p, n := range seen {
		if n != 1 {
			t.Errorf("%s told %d times", p, n)
		}
	}
	w.stop()
	for range w.events {
	}
	<-w.done
	// The end of the folder is the end of the watch.
	w = b.watch("w", false)
	os.Rename(b.dir+"/w", b.dir+"/v")
	w.want(dsec.WatchEvent{Op: dsec.OpRemove, Path: b.dir + "/w"})
	for range w.events {
	}
	if err := <-w.done; err != nil {
		t.Fatal(err)
	}
	w.stop()
}
