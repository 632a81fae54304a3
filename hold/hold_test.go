package hold_test

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec/hold"
)

// The test program is its own holder.
func TestMain(m *testing.M) {
	if os.Getenv("GOMAXPROCS") == "1" && len(os.Args) == 2 && os.Args[1] == "hold" {
		if err := hold.Serve(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

func config(t *testing.T) hold.Config {
	t.Helper()
	// Deeper than a socket's address may be.
	dir := filepath.Join(t.TempDir(), strings.Repeat("d", 120))
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return hold.Config{Dir: dir, Command: []string{"/proc/self/exe", "hold"}, Log: os.Stderr}
}

func open(t *testing.T, c hold.Config) *hold.Client {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c.Command[0] = self
	h, err := hold.Open(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		h.Close()
		if h, err := hold.Dial(c.Dir); err == nil {
			if err := h.End(); err != nil {
				t.Error(err)
			}
		}
	})
	return h
}

// put holds a file with a text and returns the text.
func put(t *testing.T, h *hold.Client, name, text string) {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	defer os.Remove(f.Name())
	if _, err := f.WriteString(text); err != nil {
		t.Fatal(err)
	}
	if err := h.Put(name, f); err != nil {
		t.Fatal(err)
	}
}

func get(t *testing.T, h *hold.Client, name string) string {
	t.Helper()
	f, err := h.Get(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.NewSectionReader(f, 0, 1<<20))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestDescriptorsOutliveTheirOwner(t *testing.T) {
	c := config(t)
	h := open(t, c)
	put(t, h, "a", "one")
	put(t, h, "b", "two")
	put(t, h, "a", "three") // in place of the first
	h.Close()
	if err := h.Put("c", os.Stdin); !errors.Is(err, hold.ErrGone) {
		t.Errorf("a closed client says %v", err)
	}

	again := open(t, c)
	if again.Pid() != h.Pid() {
		t.Errorf("holder %d was started beside %d", again.Pid(), h.Pid())
	}
	if got := get(t, again, "a"); got != "three" {
		t.Errorf("a holds %q", got)
	}
	if names, err := again.List(""); err != nil || strings.Join(names, " ") != "a b" {
		t.Errorf("names are %q (%v)", names, err)
	}
	if err := again.Drop("a"); err != nil {
		t.Error(err)
	}
	if _, err := again.Get("a"); !errors.Is(err, hold.ErrNone) {
		t.Errorf("a dropped name gives %v", err)
	}
	if err := again.Drop("a"); !errors.Is(err, hold.ErrNone) {
		t.Errorf("a second drop gives %v", err)
	}
}

// TestHolderIsLeftAlone: a holder is in a session of its own and hard to kill by accident.
func TestHolderIsLeftAlone(t *testing.T) {
	h := open(t, config(t))
	if sid, err := unix.Getsid(h.Pid()); err != nil || sid != h.Pid() {
		t.Errorf("session %d (%v), want its own", sid, err)
	}
	for _, sig := range []unix.Signal{unix.SIGHUP, unix.SIGINT, unix.SIGPIPE} {
		if err := unix.Kill(h.Pid(), sig); err != nil {
			t.Fatal(err)
		}
	}
	put(t, h, "x", "still there")
	// Who lacks CAP_SYS_RESOURCE may not lower it, here or there.
	own, err := os.ReadFile("/proc/self/oom_score_adj")
	if err != nil {
		t.Fatal(err)
	}
	if os.WriteFile("/proc/self/oom_score_adj", []byte("-900"), 0) != nil {
		return
	}
	os.WriteFile("/proc/self/oom_score_adj", own, 0) //nolint:errcheck // raising is always allowed
	if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", h.Pid())); err != nil || strings.TrimSpace(string(b)) != "-900" {
		t.Errorf("oom_score_adj is %q (%v)", b, err)
	}
}

func TestManyNamesAreListedInPieces(t *testing.T) {
	h := open(t, config(t))
	f, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const n = 300
	for i := range n {
		if err := h.Put(fmt.Sprintf("layer/%0190d", i), f); err != nil {
			t.Fatal(err)
		}
	}
	if err := h.Put("other", f); err != nil {
		t.Fatal(err)
	}
	names, err := h.List("layer/")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, name := range names {
		seen[name] = true
	}
	if len(names) != n || len(seen) != n {
		t.Errorf("%d names, %d of them different, want %d", len(names), len(seen), n)
	}
}

func TestBadNamesAreRefused(t *testing.T) {
	h := open(t, config(t))
	for _, name := range []string{"", "a b", "a\nb", "ä", strings.Repeat("x", 201)} {
		if err := h.Put(name, os.Stdin); err == nil {
			t.Errorf("name %q was taken", name)
		}
	}
	if _, err := h.Get("a"); !errors.Is(err, hold.ErrNone) {
		t.Errorf("afterwards: %v", err)
	}
}

// TestDeathOfTheHolderIsNoticed and another takes its place, with nothing in it.
func TestDeathOfTheHolderIsNoticed(t *testing.T) {
	c := config(t)
	h := open(t, c)
	put(t, h, "a", "one")
	if err := unix.Kill(h.Pid(), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-h.Gone()
	if _, err := h.Get("a"); !errors.Is(err, hold.ErrGone) {
		t.Errorf("a dead holder gives %v", err)
	}
	again := open(t, c)
	if _, err := again.Get("a"); !errors.Is(err, hold.ErrNone) {
		t.Errorf("a new holder gives %v", err)
	}
}

// TestOneHolderOnly: whoever opens at the same time finds the same.
func TestOneHolderOnly(t *testing.T) {
	c := config(t)
	open(t, c) // fills in the command
	if h, err := hold.Dial(c.Dir); err != nil {
		t.Fatal(err)
	} else if err := h.End(); err != nil {
		t.Fatal(err)
	}
	if _, err := hold.Dial(c.Dir); !errors.Is(err, hold.ErrGone) {
		t.Fatalf("after its end: %v", err)
	}
	pids := make([]int, 8)
	var wg sync.WaitGroup
	for i := range pids {
		wg.Go(func() {
			h, err := hold.Open(c)
			if err != nil {
				t.Error(err)
				return
			}
			defer h.Close()
			pids[i] = h.Pid()
		})
	}
	wg.Wait()
	for _, p := range pids {
		if p != pids[0] {
			t.Fatalf("holders %v", pids)
		}
	}
}
