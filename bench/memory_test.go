package bench_test

import (
	"os"
	"testing"

	"github.com/dsec-go/dsec/bench"
)

func TestParseMeminfo(t *testing.T) {
	m := bench.ParseMeminfo([]byte("MemTotal:       24683656 kB\nMemFree:  12 kB\nHugePages_Total:       3\nodd line\nBad: x kB\n"))
	for k, want := range map[string]int64{"MemTotal": 24683656 << 10, "MemFree": 12 << 10, "HugePages_Total": 3} {
		if m[k] != want {
			t.Errorf("%s = %d, want %d", k, m[k], want)
		}
	}
	if len(m) != 3 {
		t.Errorf("read %d names, want 3: %v", len(m), m)
	}
}

func TestParsePss(t *testing.T) {
	const text = "5580 ---p [rollup]\nRss:  4096 kB\nPss:  900 kB\nPss_Dirty: 1 kB\nPss_Anon:             784 kB\nPss_File: 116 kB\n"
	if got := bench.ParsePss(text); got != 784<<10 {
		t.Errorf("anonymous part is %d, want %d", got, 784<<10)
	}
	if got := bench.ParsePss("Rss: 1 kB\n"); got != 0 {
		t.Errorf("anonymous part of none is %d", got)
	}
}

func TestParseParent(t *testing.T) {
	for stat, want := range map[string]int{
		"12 (sh) S 7 12 12":          7,
		"12 (a) b) 3 (x) R 44 12 12": 44,
		"12 (sh)":                    -1,
		"":                           -1,
	} {
		if got := bench.ParseParent(stat); got != want {
			t.Errorf("parent of %q is %d, want %d", stat, got, want)
		}
	}
}

func TestTreePss(t *testing.T) {
	own, err := bench.TreePss(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	all, err := bench.TreePss(0)
	if err != nil {
		t.Fatal(err)
	}
	if own <= 0 || all < own {
		t.Errorf("this process holds %d, all together %d", own, all)
	}
}

func TestLimitsDiffer(t *testing.T) {
	seen := map[any]int{}
	for n := range 60_000 {
		l := bench.Limits(n)
		if at, ok := seen[l]; ok {
			t.Fatalf("boxes %d and %d have the same limits %+v", at, n, l)
		}
		seen[l] = n
	}
}
