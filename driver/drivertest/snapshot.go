package drivertest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"image/png"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

// opened opens and adopts a driver, closed with the test.
func opened(t *testing.T, e Env) driver.Driver {
	t.Helper()
	d := e.Open(t)
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error("close:", err)
		}
	})
	if _, err := d.Adopt(ctx(t)); err != nil {
		t.Fatal("adopt:", err)
	}
	return d
}

// started starts a machine of d that ends with the test.
func started(t *testing.T, e Env, d driver.Driver, c driver.Config) driver.Machine {
	t.Helper()
	m, err := d.Start(ctx(t), c)
	if err != nil {
		t.Fatal("start:", err)
	}
	t.Cleanup(func() { stop(t, m) })
	if e.Prepare != nil {
		e.Prepare(t, m)
	}
	return m
}

// change makes all kinds of changes to a root, and look lists what came of them.
const (
	change = `set -e
mkdir -p /work/sub /work/empty; chmod 1770 /work/empty
head -c 300000 /dev/urandom > /work/data; ln /work/data /work/sub/twin; chown alice /work/data
dd if=/dev/zero of=/work/holes bs=1 count=1 seek=50000000 2>/dev/null
echo program > /work/tool; chmod 4755 /work/tool; ln -s ../nowhere "/work/a link"; mkfifo /work/pipe
rm /bin/yes; rm -rf /home/alice; mkdir /home/alice; echo new > /home/alice/new; echo more >> /etc/group
touch -t 200102030405 /work/sub`
	look = `cd /; find work home etc/group -exec stat -c '%n %f %u %g %h %s %Y' {} + | grep -v 'home/alice ' | sort
md5sum work/data work/sub/twin work/holes home/alice/new etc/group; readlink "work/a link"; [ -e /bin/yes ] || echo no yes
ls -A home/alice; [ work/data -ef work/sub/twin ] && echo one file
[ $(du -k work/holes | cut -f1) -lt 1000 ] && echo holes`
)

func looked(t *testing.T, m driver.Machine) string {
	t.Helper()
	r := sh(t, m, look)
	if !strings.Contains(string(r.Out), "one file\nholes\n") || !strings.Contains(string(r.Out), "no yes") {
		t.Errorf("machine %s has %q %q", m.ID(), r.Out, r.Err)
	}
	return string(r.Out)
}

// identity is what no two machines may have in common, by name.
func identity(t *testing.T, m driver.Machine) map[string]string {
	t.Helper()
	id := map[string]string{}
	r := sh(t, m, `echo host $(hostname); echo random $(head -c 16 /dev/urandom | md5sum | cut -c1-32)
echo uuid $(cat /proc/sys/kernel/random/uuid); [ ! -s /etc/machine-id ] || echo machine $(cat /etc/machine-id)`)
	for l := range strings.Lines(string(r.Out)) {
		name, value, _ := strings.Cut(strings.TrimSpace(l), " ")
		id[name] = value
	}
	if id["host"] == "" || id["random"] == "" {
		t.Fatalf("machine %s is %q %q", m.ID(), r.Out, r.Err)
	}
	return id
}

func distinct(t *testing.T, ms ...driver.Machine) {
	t.Helper()
	seen := map[string]driver.Machine{}
	for _, m := range ms {
		for name, value := range identity(t, m) {
			if other := seen[name+value]; other != nil {
				t.Errorf("machines %s and %s have the same %s %s", other.ID(), m.ID(), name, value)
			}
			seen[name+value] = m
		}
	}
}

const tick = "i=0; while [ ! -e /stop ]; do i=$((i+1)); echo $i; sleep 0.05; done; exit 5"

// ticking starts a command that goes on in every copy of its machine.
func ticking(t *testing.T, m driver.Machine) dsec.CommandID {
	t.Helper()
	return begin(t, m, dsec.Command{Shell: tick})
}

// knows reports whether a copy has the ticking command of its original.
func knows(t *testing.T, m driver.Machine) bool {
	t.Helper()
	list, err := m.Guest().Commands().List(ctx(t), dsec.Call{})
	if err != nil {
		t.Fatal(err)
	}
	return slices.ContainsFunc(list, func(c dsec.CommandStatus) bool { return c.Command.Shell == tick })
}

// runsOn checks that a copy goes on with what ran in the original, or has none
// of it where only the disk was saved.
func runsOn(t *testing.T, m driver.Machine, id dsec.CommandID, memory bool) {
	t.Helper()
	if got := knows(t, m); got != memory {
		t.Errorf("machine %s has the command of its original: %v, want %v", m.ID(), got, memory)
	}
	if !memory {
		return
	}
	sh(t, m, "touch /stop")
	if st, out := finish(t, m, id); st.Code != 5 || !strings.HasPrefix(out, "1\n") {
		t.Errorf("in machine %s: %+v, %q", m.ID(), st, out)
	}
}

// testSnapshot saves a machine that runs, and restores two from it on another
// life of the driver, after the first has ended.
func testSnapshot(t *testing.T, e Env) {
	dir := t.TempDir()
	var want string
	var info driver.SnapshotInfo
	var id dsec.CommandID
	t.Run("save", func(t *testing.T) {
		d := opened(t, e)
		c := e.Config(t)
		m := started(t, e, d, c)
		if r := sh(t, m, change); r.Code != 0 {
			t.Fatalf("%+v %q", r.CommandStatus, r.Err)
		}
		id = ticking(t, m)
		want = looked(t, m)
		var err error
		if info, err = m.(driver.Snapshotter).Snapshot(ctx(t), dir); err != nil {
			t.Fatal(err)
		}
		if size := sizeOf(t, dir); info.Bytes < 300_000 || info.Bytes > 2*size {
			t.Errorf("%+v, and the files have %d bytes", info, size)
		}
		sh(t, m, "rm -rf /work; touch /stop") // it runs on, and what it does is its own
		if st, _ := finish(t, m, id); st.Code != 5 {
			t.Errorf("after the snapshot: %+v", st)
		}
	})
	t.Run("restore", func(t *testing.T) {
		d := opened(t, e)
		var ms []driver.Machine
		for i := range 2 {
			c := e.Config(t)
			c.Hostname = fmt.Sprint("copy", i)
			m, err := d.(driver.Restorer).Restore(ctx(t), c, dir)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { stop(t, m) })
			if got := looked(t, m); got != want {
				t.Errorf("restored:\n%s\nwant:\n%s", got, want)
			}
			if r := sh(t, m, "hostname; grep -c copy"+fmt.Sprint(i)+" /etc/hosts"); string(r.Out) != c.Hostname+"\n1\n" {
				t.Errorf("its name is %q", r.Out)
			}
			sh(t, m, "echo mine > /work/mine"+fmt.Sprint(i))
			ms = append(ms, m)
		}
		distinct(t, ms...)
		for _, m := range ms {
			if r := sh(t, m, "ls /work | grep -c mine"); string(r.Out) != "1\n" {
				t.Errorf("machine %s has files of another: %q", m.ID(), r.Out)
			}
			runsOn(t, m, id, info.Memory)
		}
		// A copy can be saved like any other.
		again := t.TempDir()
		if _, err := ms[0].(driver.Snapshotter).Snapshot(ctx(t), again); err != nil {
			t.Fatal(err)
		}
		c := e.Config(t)
		m, err := d.(driver.Restorer).Restore(ctx(t), c, again)
		if err != nil {
			t.Fatal(err)
		}
		defer stop(t, m)
		if r := sh(t, m, "cat /work/mine0 /home/alice/new"); string(r.Out) != "mine\nnew\n" {
			t.Errorf("the copy of a copy has %q %q", r.Out, r.Err)
		}
	})
}

func sizeOf(t *testing.T, dir string) (n int64) {
	t.Helper()
	for _, f := range filesOf(t, dir) {
		fi, err := os.Stat(f)
		if err != nil {
			t.Fatal(err)
		}
		n += fi.Size()
	}
	return n
}

func filesOf(t *testing.T, dir string) (files []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(p string, f os.DirEntry, err error) error {
		if err == nil && !f.Type().IsRegular() && !f.IsDir() {
			t.Errorf("%s is neither a file nor a folder", p)
		}
		if err == nil && f.Type().IsRegular() {
			files = append(files, p)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// saved makes a snapshot of a machine that has ended since.
func saved(t *testing.T, e Env) string {
	t.Helper()
	dir := t.TempDir()
	with(t, e, func(t *testing.T, m driver.Machine) {
		sh(t, m, "head -c 300000 /dev/urandom > /data; echo kept > /kept")
		if _, err := m.(driver.Snapshotter).Snapshot(ctx(t), dir); err != nil {
			t.Fatal(err)
		}
	})
	return dir
}

// testSnapshotPaused saves a machine that is paused, and stays so.
func testSnapshotPaused(t *testing.T, e Env) {
	d := opened(t, e)
	m := started(t, e, d, e.Config(t))
	p, ok := m.(driver.Pauser)
	if !ok {
		t.Fatal("it cannot be paused: declare it in Env.Lacks")
	}
	sh(t, m, "echo kept > /kept")
	id := ticking(t, m)
	pause(t, p)
	dir := t.TempDir()
	info, err := m.(driver.Snapshotter).Snapshot(ctx(t), dir)
	if err != nil {
		t.Fatal(err)
	}
	if !p.Paused() {
		t.Error("a snapshot resumed it")
	}
	c := e.Config(t)
	c.Hostname = "copy"
	copied, err := d.(driver.Restorer).Restore(ctx(t), c, dir)
	if err != nil {
		t.Fatal(err)
	}
	defer stop(t, copied)
	if r := sh(t, copied, "cat /kept; hostname"); string(r.Out) != "kept\ncopy\n" {
		t.Errorf("the copy has %q", r.Out)
	}
	runsOn(t, copied, id, info.Memory)
	resume(t, p)
	runsOn(t, m, id, true)
}

// testSnapshotCorrupt damages each file of a snapshot.
func testSnapshotCorrupt(t *testing.T, e Env) {
	dir := saved(t, e)
	d := opened(t, e)
	refused := func(what string) {
		t.Helper()
		m, err := d.(driver.Restorer).Restore(ctx(t), e.Config(t), dir)
		if err == nil {
			stop(t, m)
		}
		if dsec.KindOf(err) != dsec.Invalid {
			t.Errorf("%s: %v, want invalid", what, err)
		}
	}
	files := filesOf(t, dir)
	if len(files) == 0 {
		t.Fatal("the snapshot has no files")
	}
	for _, f := range files {
		name := filepath.Base(f)
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if len(b) == 0 {
			continue
		}
		flipped := bytes.Clone(b)
		flipped[len(b)/2] ^= 0x40
		for what, damaged := range map[string][]byte{"cut short": b[:len(b)-1], "empty": {}, "one bit": flipped} {
			if err := os.WriteFile(f, damaged, 0o600); err != nil {
				t.Fatal(err)
			}
			refused(name + ": " + what)
		}
		if err := os.Remove(f); err != nil {
			t.Fatal(err)
		}
		refused(name + ": gone")
		if err := os.WriteFile(f, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	m, err := d.(driver.Restorer).Restore(ctx(t), e.Config(t), dir)
	if err != nil {
		t.Fatal("the repaired snapshot:", err)
	}
	stop(t, m)
}

// SnapshotFile is the file of a snapshot that has its version, a JSON object with
// the number "version".
const SnapshotFile = "snapshot.json"

// testSnapshotVersion restores what a later build may write.
func testSnapshotVersion(t *testing.T, e Env) {
	dir := saved(t, e)
	path := filepath.Join(dir, SnapshotFile)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var all map[string]any
	if err := json.Unmarshal(b, &all); err != nil {
		t.Fatal(err)
	}
	if _, ok := all["version"].(float64); !ok {
		t.Fatalf("%s has no version: %s", SnapshotFile, b)
	}
	all["version"] = 4711
	if b, err = json.Marshal(all); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	d := opened(t, e)
	m, err := d.(driver.Restorer).Restore(ctx(t), e.Config(t), dir)
	if err == nil {
		stop(t, m)
	}
	if dsec.KindOf(err) != dsec.Invalid || !strings.Contains(err.Error(), "4711") {
		t.Errorf("%v, want invalid, with the version", err)
	}
}

// testFork makes three of one.
func testFork(t *testing.T, e Env) {
	d := opened(t, e)
	c := e.Config(t)
	m := started(t, e, d, c)
	sh(t, m, "echo kept > /kept")
	id := ticking(t, m)
	var cs []driver.Config
	for i := range 3 {
		child := e.Config(t)
		child.Root, child.Resources, child.Hostname = c.Root, c.Resources, fmt.Sprint("child", i)
		cs = append(cs, child)
	}
	kids, err := m.(driver.Forker).Fork(ctx(t), cs)
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range kids {
		t.Cleanup(func() { stop(t, k) })
	}
	if len(kids) != len(cs) {
		t.Fatalf("%d children, want %d", len(kids), len(cs))
	}
	all := append([]driver.Machine{m}, kids...)
	distinct(t, all...)
	var wg sync.WaitGroup
	for i, k := range kids {
		if k.ID() != cs[i].ID {
			t.Errorf("child %d is %s, want %s", i, k.ID(), cs[i].ID)
		}
		wg.Go(func() {
			if r := sh(t, k, "hostname; cat /kept; echo mine > /mine; ls /mine*"); string(r.Out) != cs[i].Hostname+"\nkept\n/mine\n" {
				t.Errorf("child %d: %q %q", i, r.Out, r.Err)
			}
		})
	}
	wg.Wait()
	memory := knows(t, kids[0])
	for _, k := range kids {
		runsOn(t, k, id, memory)
	}
	if r := sh(t, m, "ls /mine /stop"); r.Code == 0 {
		t.Errorf("the parent has files of a child: %q", r.Out)
	}
	runsOn(t, m, id, true) // the parent runs on

	// Nothing is left of any when one cannot be made.
	for i := range cs {
		cs[i].ID = keys.New(dsec.Place{Node: 1, Epoch: 1})
	}
	cs[2].Root = driver.Root{}
	if kids, err := m.(driver.Forker).Fork(ctx(t), cs); err == nil {
		for _, k := range kids {
			stop(t, k)
		}
		t.Error("a child without a root was made")
	}
	// The parent of children may go before them.
	stop(t, m)
	if r := sh(t, kids[1], "cat /kept"); string(r.Out) != "kept\n" {
		t.Errorf("after its parent's end a child has %q", r.Out)
	}
}

// testScreen looks at the display and presses keys.
func testScreen(t *testing.T, e Env) {
	with(t, e, func(t *testing.T, m driver.Machine) {
		s := m.(driver.Screen)
		b, err := s.Screenshot(ctx(t))
		if err != nil {
			t.Fatal(err)
		}
		pic, err := png.Decode(bytes.NewReader(b))
		if err != nil || pic.Bounds().Dx() < 100 || pic.Bounds().Dy() < 100 {
			t.Fatalf("the screenshot is no picture: %v, %v", pic, err)
		}
		for _, events := range [][]dsec.InputEvent{
			{{Key: "a"}, {Text: "Hello, World!"}, {Key: "ctrl-alt-f2"}, {Key: "ret"}},
			{{Move: &dsec.Point{X: 10, Y: 20}}, {Button: "left"}},
		} {
			if err := s.Input(ctx(t), events); err != nil {
				t.Errorf("%+v: %v", events, err)
			}
		}
		for _, event := range []dsec.InputEvent{{Key: "no-such-key"}, {Button: "seventh"}, {Text: "\u4e16"}, {Move: &dsec.Point{X: -1}}, {}} {
			if err := s.Input(ctx(t), []dsec.InputEvent{event}); dsec.KindOf(err) != dsec.Invalid {
				t.Errorf("%+v: %v, want invalid", event, err)
			}
		}
	})
}
