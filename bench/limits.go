package bench

import "github.com/dsec-go/dsec"

// limits gives box n limits that no other box of a run has, all large enough
// for what it runs.
func limits(n int) dsec.Resources {
	return dsec.Resources{
		CPU:    1 + float64(n%1000)/1000,
		Memory: 256<<20 + int64(n%65536)<<12,
		Pids:   128 + n%64,
	}
}
