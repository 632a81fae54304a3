package container_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/driver/container"
	"github.com/dsec-go/dsec/driver/drivertest"
)

// BenchmarkCreate measures a box from its start to its first answered command,
// and its end apart, with the stages of the start; the floor of a command is a
// plain fork, exec and wait of the same program.
func BenchmarkCreate(b *testing.B) {
	for _, pool := range []int{-1, 16} {
		b.Run("pool="+strconv.Itoa(max(pool, 0)), func(b *testing.B) { benchCreate(b, pool) })
	}
}

func benchCreate(b *testing.B, pool int) {
	ctx := context.Background()
	d, err := container.Open(container.Config{Dir: filepath.Join(b.TempDir(), "m"), Guest: guestBinary, Name: "dsec-bench-" + strconv.Itoa(os.Getpid()), Pool: pool})
	if err != nil {
		b.Fatal(err)
	}
	defer d.Close()
	if _, err := d.Adopt(ctx); err != nil {
		b.Fatal(err)
	}
	layer := drivertest.Root(b)
	var keys dsec.IDKey
	stages := map[string]time.Duration{}
	var start, first, second, end time.Duration
	b.ResetTimer()
	for range b.N {
		t0 := time.Now()
		m, err := d.Start(ctx, driver.Config{ID: keys.New(dsec.Place{}), Root: driver.Root{Layers: []*os.File{layer}}, Resources: drivertest.Resources, Hostname: "b"})
		if err != nil {
			b.Fatal(err)
		}
		t1 := time.Now()
		run(b, m)
		t2 := time.Now()
		run(b, m)
		t3 := time.Now()
		if err := m.Stop(ctx); err != nil {
			b.Fatal(err)
		}
		t4 := time.Now()
		start, first, second, end = start+t1.Sub(t0), first+t2.Sub(t1), second+t3.Sub(t2), end+t4.Sub(t3)
		for _, s := range m.Stages() {
			stages[s.Name] += s.Took
		}
		if pool > 0 { // let the pool fill
			b.StopTimer()
			time.Sleep(60 * time.Millisecond)
			b.StartTimer()
		}
	}
	report := func(d time.Duration, name string) { b.ReportMetric(d.Seconds()*1e3/float64(b.N), "ms/"+name) }
	report(start, "start")
	report(first, "exec1")
	report(second, "exec2")
	report(end, "stop")
	for n, s := range stages {
		report(s, "stage-"+n)
	}
	b.StopTimer()
	t0 := time.Now()
	for range 50 {
		if err := exec.Command(drivertest.Busybox, "true").Run(); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(time.Since(t0).Seconds()*1e3/50, "ms/fork-exec-wait")
}

func run(b *testing.B, m driver.Machine) {
	r, err := m.Guest().Commands().Run(context.Background(), dsec.Call{}, dsec.Command{Argv: []string{"/bin/true"}}, nil)
	if err != nil || r.Code != 0 {
		b.Fatalf("%+v, %v", r, err)
	}
}

// BenchmarkChurn measures starts and ends, sixteen at a time.
func BenchmarkChurn(b *testing.B) {
	ctx := context.Background()
	d, err := container.Open(container.Config{Dir: filepath.Join(b.TempDir(), "m"), Guest: guestBinary, Name: "dsec-bench-" + strconv.Itoa(os.Getpid())})
	if err != nil {
		b.Fatal(err)
	}
	defer d.Close()
	if _, err := d.Adopt(ctx); err != nil {
		b.Fatal(err)
	}
	layer := drivertest.Root(b)
	var keys dsec.IDKey
	b.SetParallelism(8) // times GOMAXPROCS
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			m, err := d.Start(ctx, driver.Config{ID: keys.New(dsec.Place{}), Root: driver.Root{Layers: []*os.File{layer}}, Resources: drivertest.Resources, Hostname: "b"})
			if err != nil {
				b.Error(err)
				return
			}
			if err := m.Stop(ctx); err != nil {
				b.Error(err)
			}
		}
	})
	b.StopTimer()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "boxes/s")
}
