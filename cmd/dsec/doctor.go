package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/swap"
)

// doctorCmd shows what the host can do.
type doctorCmd struct {
	Data  string   `help:"Folder on the file system that a node would use; probes are written there and removed (default the temporary one, for --fix and --unfix /var/lib/dsec)." placeholder:"DIR"`
	Fix   bool     `help:"Make what is missing and can be made: swap in the data folder." xor:"fix"`
	Unfix bool     `help:"Remove what --fix made." xor:"fix"`
	Swap  byteSize `help:"How much swap --fix makes (default half the memory, at most a quarter of the free disk)." placeholder:"SIZE" needs:"fix" positive:""`
	Store string   `help:"Also try a store as \"dsec up --store\" takes it: whether it answers, and whether the keys may write, read and delete (default none)." placeholder:"URL"`
	outputFlags
}

// Run probes this host; no server is needed.
func (c *doctorCmd) Run(ctx context.Context, a *app) error {
	dir := c.Data
	if c.Fix || c.Unfix {
		if dir == "" {
			dir = defaultData
		}
		if err := c.change(dir); err != nil {
			return err
		}
	}
	if dir == "" {
		dir = os.TempDir()
	}
	guest, err := guestBeside()
	if err != nil {
		guest = "dsec-guest" // what needs it says that it is missing
	}
	list := append(hostFeatures(dir), kindFeatures(guest)...)
	if c.Store != "" {
		status, err := storeFeature(ctx, c.Store)
		if err != nil {
			return err
		}
		list = append(list, status)
	}
	if c.JSON {
		return a.json(list)
	}
	return a.table(featureRows(list)...)
}

// change makes the host's swap, or removes it. A host that has other swap needs
// none, unless the size is asked for.
func (c *doctorCmd) change(data string) error {
	if os.Geteuid() != 0 {
		return dsec.Errorf(dsec.Denied, "swap is made and removed by root")
	}
	dir := filepath.Join(data, swapDir)
	if c.Unfix {
		return swap.Remove(dir)
	}
	size := int64(c.Swap)
	if size == 0 {
		if swap.Feature().OK {
			return nil
		}
		if err := os.MkdirAll(data, 0o700); err != nil {
			return fmt.Errorf("make data folder: %w", err)
		}
		var err error
		if size, err = usualSwap(data); err != nil {
			return err
		}
	}
	return swap.Make(dir, size)
}

// usualSwap is half of the host's memory, but no more than a quarter of what is
// free on the disk.
func usualSwap(dir string) (int64, error) {
	var host unix.Sysinfo_t
	if err := unix.Sysinfo(&host); err != nil {
		return 0, fmt.Errorf("measure memory: %w", err)
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return 0, fmt.Errorf("measure disk: %w", err)
	}
	return min(int64(host.Totalram)*int64(host.Unit)/2, int64(fs.Bavail)*fs.Bsize/4), nil
}

// featureRows gives one row a feature; what an absence costs is shown where it
// is absent.
func featureRows(list []dsec.FeatureStatus) [][]string {
	rows := [][]string{{"FEATURE", "OK", "DETAIL", "WITHOUT IT"}}
	for _, f := range list {
		ok, cost := "yes", ""
		if !f.OK {
			ok, cost = "no", f.Cost
		}
		rows = append(rows, []string{f.Name, ok, or(f.Detail), cost})
	}
	return rows
}
