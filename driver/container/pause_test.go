package container_test

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/driver/container"
	"github.com/dsec-go/dsec/driver/drivertest"
	"github.com/dsec-go/dsec/swap"
)

// TestReclaimToSwap gives back memory that only swap can hold, half of it
// random, and looks at every byte of it afterwards.
func TestReclaimToSwap(t *testing.T) {
	space := filepath.Join(t.TempDir(), "swap")
	t.Cleanup(func() {
		if err := swap.Remove(space); err != nil {
			t.Error(err)
		}
	})
	if err := swap.Make(space, 512<<20); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	d, err := container.Open(container.Config{Dir: filepath.Join(dir, "m"), Guest: guestBinary, Name: "dsec-test-swap-" + strconv.Itoa(os.Getpid()), Pool: -1, Log: os.Stderr})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	ctx := t.Context()
	if _, err := d.Adopt(ctx); err != nil {
		t.Fatal(err)
	}
	layer := drivertest.Root(t)
	var keys dsec.IDKey
	m, err := d.Start(ctx, driver.Config{ID: keys.New(dsec.Place{}), Root: driver.Root{Layers: []*os.File{layer}}, Resources: drivertest.Resources, Hostname: "h"})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Stop(ctx)
	cmds := m.Guest().Commands()
	hog, err := cmds.Start(ctx, dsec.Call{}, drivertest.Hog())
	if err != nil {
		t.Fatal(err)
	}
	for o, err := range cmds.Attach(ctx, dsec.Call{}, hog.ID, 0) {
		if err != nil || o.Status != nil {
			t.Fatalf("%+v, %v", o.Status, err)
		}
		if strings.Contains(string(o.Data), "ready") {
			break
		}
	}
	p, r := m.(driver.Pauser), m.(driver.Reclaimer)
	for round := range 2 {
		if err := p.Pause(ctx); err != nil {
			t.Fatal(err)
		}
		before, _ := m.Usage(ctx)
		if before.Memory < 16<<20 { // of the 20 MiB, what a resume has brought back by now
			t.Fatalf("it uses %d bytes", before.Memory)
		}
		begin := time.Now()
		n, err := r.Reclaim(ctx, 0)
		took := time.Since(begin)
		after, _ := m.Usage(ctx)
		t.Logf("round %d: %d KiB of %d came back in %v", round, n>>10, before.Memory>>10, took)
		if err != nil || after.Memory > before.Memory/10 {
			t.Errorf("round %d: %d bytes of %d came back, %d are left, %v", round, n, before.Memory, after.Memory, err)
		}
		if err := p.Resume(ctx); err != nil {
			t.Fatal(err)
		}
		// Part of it comes back by itself, which the second round needs.
		for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); {
			if u, _ := m.Usage(ctx); u.Memory > 15<<20 {
				break
			}
			<-time.After(5 * time.Millisecond)
		}
		if round == 0 {
			if r, err := cmds.Run(ctx, dsec.Call{}, dsec.Command{Shell: "echo alive"}, nil); err != nil || string(r.Out) != "alive\n" {
				t.Errorf("%q, %v", r.Out, err)
			}
		}
	}
	if _, err := cmds.Write(ctx, dsec.Call{}, hog.ID, dsec.StdinWrite{Data: []byte("\n"), Close: true}); err != nil {
		t.Fatal(err)
	}
	st, err := cmds.Wait(ctx, dsec.Call{}, hog.ID)
	out, _ := cmds.Read(ctx, dsec.Call{}, hog.ID, dsec.Stdout, 0, 1000)
	if err != nil || st.Code != 0 || string(out) != "ready\nsame\n" {
		t.Errorf("in the end: %+v, %q, %v", st, out, err)
	}
}

// TestCrashInAPause ends the process between the steps of a pause, where nothing
// of it can be seen: the next one lets the guest go on all the same.
func TestCrashInAPause(t *testing.T) {
	dir := t.TempDir()
	open := func() *container.Driver {
		d, err := container.Open(container.Config{Dir: filepath.Join(dir, "m"), Guest: guestBinary, Name: "dsec-test-half-" + strconv.Itoa(os.Getpid()), Pool: -1, Log: os.Stderr})
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	ctx := t.Context()
	d := open()
	if _, err := d.Adopt(ctx); err != nil {
		t.Fatal(err)
	}
	layer := drivertest.Root(t)
	var keys dsec.IDKey
	m, err := d.Start(ctx, driver.Config{ID: keys.New(dsec.Place{}), Root: driver.Root{Layers: []*os.File{layer}}, Resources: drivertest.Resources, Hostname: "h"})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.(interface{ HalfPause(context.Context) error }).HalfPause(ctx); err != nil {
		t.Fatal(err)
	}
	d.Crash()
	d = open()
	defer d.Close()
	ms, err := d.Adopt(ctx)
	if err != nil || len(ms) != 1 {
		t.Fatalf("adopted %v, %v", ms, err)
	}
	defer ms[0].Stop(ctx)
	if ms[0].(driver.Pauser).Paused() {
		t.Error("half a pause is one")
	}
	if r, err := ms[0].Guest().Commands().Run(ctx, dsec.Call{}, dsec.Command{Shell: "echo there"}, nil); err != nil || string(r.Out) != "there\n" {
		t.Errorf("%q, %v", r.Out, err)
	}
}
