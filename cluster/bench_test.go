package cluster_test

import (
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/cluster"
)

func BenchmarkAuthenticate(b *testing.B) {
	c := open(b)
	secret, err := c.Tokens().Issue(b.Context(), dsec.Token{Name: "bench", Project: cluster.DefaultProject, Rights: []dsec.Right{dsec.RightAdmin}})
	if err != nil {
		b.Fatal(err)
	}
	defer c.Tokens().Revoke(b.Context(), "bench") //nolint:errcheck // the server goes too
	for b.Loop() {
		if _, err := c.Tokens().Authenticate(secret); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkResolve(b *testing.B) {
	c := open(b)
	if err := c.Names().Put(b.Context(), entry("bench", "1", "sha256:1")); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := c.Names().Resolve("bench"); err != nil {
			b.Fatal(err)
		}
	}
}

// catalogue is how many layers the original's catalogue has.
const catalogue = 113_000

// BenchmarkCatalogue resolves environments of five images over a catalogue of 113,000 layers of 100
// projects while its names change, and reports the 99th percentile and what the mirror takes.
func BenchmarkCatalogue(b *testing.B) {
	e, err := cluster.StartEmbedded(b.Context(), cluster.EmbeddedOptions{Dir: b.TempDir()})
	if err != nil {
		b.Fatal(err)
	}
	defer e.Close()
	open := func() *cluster.Cluster {
		c, err := cluster.Open(b.Context(), cluster.Options{Endpoints: e.Endpoints()})
		if err != nil {
			b.Fatal(err)
		}
		return c
	}
	writer := open()
	defer writer.Close()
	var all []cluster.Entry
	for i := range catalogue {
		e := entry(fmt.Sprintf("team/image-%06d", i/4), fmt.Sprintf("v%d", i%4), fmt.Sprintf("sha256:%064x", i))
		e.Source, e.Created, e.Config.Cwd = fmt.Sprintf("registry.example/team/image-%06d:v%d", i/4, i%4), time.Unix(int64(i), 0).UTC(), "/work"
		e.Config.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8"}
		if i%3 == 0 {
			e.Project = dsec.ProjectID(fmt.Sprintf("p%d", i/4%100))
			e.Name = "own-" + e.Name[5:]
		}
		all = append(all, e)
	}
	if err := writer.Names().PutMany(b.Context(), all); err != nil {
		b.Fatal(err)
	}
	all = nil
	before := heap()
	begin := time.Now()
	c := open()
	defer c.Close()
	loaded := time.Since(begin)
	held := heap() - before

	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() { // the catalogue is not still while it is asked
		defer close(stopped)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
				_ = writer.Names().Put(b.Context(), entry(fmt.Sprintf("new-%d", i), "1", "sha256:1"))
			}
		}
	}()
	var took []time.Duration
	i := 0
	for b.Loop() {
		begin := time.Now()
		for part := range 5 {
			n := (i*7919 + part*104729) % catalogue / 4
			if _, err := c.Names().Of("p7/below").Resolve(fmt.Sprintf("team/image-%06d", n)); err != nil && dsec.KindOf(err) != dsec.NotFound {
				b.Fatal(err)
			}
		}
		took = append(took, time.Since(begin))
		i++
	}
	close(stop)
	<-stopped
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)*99/100])/1e6, "p99-ms")
	b.ReportMetric(float64(held)/(1<<20), "MiB")
	b.ReportMetric(loaded.Seconds(), "load-s")
	begin = time.Now()
	pages := 0
	for q := (cluster.Query{Limit: dsec.MaxImagePage}); ; pages++ {
		_, next, err := c.Names().Page(q)
		if err != nil {
			b.Fatal(err)
		}
		if q.After = next; next == "" {
			break
		}
	}
	b.ReportMetric(time.Since(begin).Seconds()*1000/float64(pages), "ms/page")
}

func heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
