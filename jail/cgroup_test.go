package jail

import (
	"maps"
	"os"
	"path/filepath"
	"testing"
)

// TestFirstMountOfAHierarchyIsTheHosts: a second one is somebody else's.
func TestFirstMountOfAHierarchyIsTheHosts(t *testing.T) {
	path := filepath.Join(t.TempDir(), "mountinfo")
	const table = `25 1 0:22 / /sys rw shared:2 - sysfs sysfs rw
30 25 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw
31 25 0:27 / /sys/fs/v1 rw - cgroup cgroup rw,cpu,cpuacct
90 1 0:26 / /data/tmp/cell/sys/fs/cgroup rw - cgroup2 cgroup2 rw
91 1 0:26 /dsec /data/other rw - cgroup2 cgroup2 rw
92 1 0:27 / /data/v1 rw - cgroup cgroup rw,cpu,cpuacct
`
	if err := os.WriteFile(path, []byte(table), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := cgroupMounts(path)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"": "/sys/fs/cgroup", "rw": "/sys/fs/v1", "cpu": "/sys/fs/v1", "cpuacct": "/sys/fs/v1"}
	if !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
