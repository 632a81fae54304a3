package edge

import (
	"bytes"
	"testing"

	"github.com/dsec-go/dsec"
)

// FuzzRecord checks that a record which can be read is read the same after it
// was written again, and that none makes a table fail with more than an error.
func FuzzRecord(f *testing.F) {
	f.Add([]byte(`{"v":1,"op":"boot","boot":"b"}`))
	f.Add([]byte(`{"v":1,"op":"created","id":"sbx","at":5,"spec":{"TTL":1,"Labels":{"a":"b"}},"layers":["x"],"key":"k","stages":[{"n":"a","d":1}],"expires":9}`))
	f.Add([]byte(`{"v":1,"op":"created","id":"sbx","at":5,"spec":{},"state":"stopped","cause":"user","ended":7,"usage":{"CPU":1}}`))
	f.Add([]byte(`{"v":1,"op":"ended","id":"sbx","state":"failed","cause":"oom","ended":3}`))
	f.Add([]byte(`{"v":1,"op":"forgotten","tombs":[1,2,3]}`))
	f.Add([]byte(`{"v":2,"op":"boot"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := decodeChange(b)
		if err != nil {
			return
		}
		if again, err := decodeChange(c.encode()); err != nil || !bytes.Equal(again.encode(), c.encode()) {
			t.Fatalf("record %s became %s, %v", c.encode(), again.encode(), err)
		}
		n := &Node{byID: map[dsec.SandboxID]*entry{}, keys: map[keyID]*entry{}}
		n.apply(c)
		n.apply(c) // twice changes nothing
		if len(n.order) > 1 || len(n.byID) != len(n.order) {
			t.Fatalf("%d records in order, %d by id", len(n.order), len(n.byID))
		}
	})
}

func FuzzHostFiles(f *testing.F) {
	f.Add([]byte("MemTotal:  24 kB\nMemAvailable: 7 kB\n"))
	f.Add([]byte("0.20 0.18 0.12 1/80 11206\n"))
	f.Add([]byte("some avg10=1.50 avg60=0 avg300=0 total=1\nfull avg10=9 avg60=0\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		parseMeminfo(b)
		parseLoadavg(b)
		parsePressure(b)
	})
}

func TestHostFiles(t *testing.T) {
	total, available := parseMeminfo([]byte("MemTotal:       24 kB\nMemFree: 1 kB\nMemAvailable:    7 kB\n"))
	if total != 24<<10 || available != 7<<10 {
		t.Errorf("memory %d, %d", total, available)
	}
	load, tasks := parseLoadavg([]byte("0.20 0.18 0.12 1/80 11206\n"))
	if load != 0.2 || tasks != 80 {
		t.Errorf("load %v, tasks %d", load, tasks)
	}
	if p := parsePressure([]byte("some avg10=1.50 avg60=0 avg300=0 total=1\nfull avg10=9 avg60=0\n")); p != 1.5 {
		t.Errorf("pressure %v", p)
	}
	s, err := ProcHost{Data: t.TempDir()}.Sample()
	if err != nil {
		t.Fatal(err)
	}
	if s.CPUs < 1 || s.Memory < s.Available || s.Available <= 0 || s.Disk < s.DiskFree || s.DiskFree <= 0 || s.Tasks < 1 || s.MaxTasks < s.Tasks {
		t.Errorf("this host is %+v", s)
	}
	if _, err := (ProcHost{Data: "/nonexistent"}).Sample(); err == nil {
		t.Error("a folder that is not there has a size")
	}
}

func TestTombstonesForgetTheOldest(t *testing.T) {
	var ts tombstones
	for i := range maxTombstones + 10 {
		ts.add(uint64(i))
		ts.add(uint64(i))
	}
	list := ts.list()
	if len(list) != maxTombstones || len(ts.set) != maxTombstones || list[0] != 10 || list[len(list)-1] != maxTombstones+9 {
		t.Errorf("%d kept, from %d to %d", len(list), list[0], list[len(list)-1])
	}
	var again tombstones
	for _, h := range list {
		again.add(h)
	}
	if got := again.list(); got[0] != list[0] || got[len(got)-1] != list[len(list)-1] {
		t.Error("a list read again is another list")
	}
}
