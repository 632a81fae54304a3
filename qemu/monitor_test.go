package qemu

import (
	"bytes"
	"context"
	"errors"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// peer gives a connection and the other end of it.
func peer(t *testing.T) (conn, other *os.File) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	conn, other = os.NewFile(uintptr(fds[0]), "monitor"), os.NewFile(uintptr(fds[1]), "peer")
	t.Cleanup(func() { conn.Close(); other.Close() })
	return conn, other
}

const greeting = `{"QMP": {}}` + "\r\n"

func TestAHostileMonitorCannotGrowMemory(t *testing.T) {
	for name, says := range map[string][]byte{
		"an endless line":   bytes.Repeat([]byte("a"), MaxMessage+64<<10),
		"no words":          []byte("\x00\xff\n"),
		"another's message": []byte("{\"a\": 1}\n"),
		"nothing":           nil,
	} {
		conn, other := peer(t)
		go func() {
			other.Write(append([]byte(greeting), says...)) //nolint:errcheck // cut off
			other.Close()
		}()
		_, err := NewMonitor(context.Background(), conn, nil)
		if !errors.Is(err, ErrClosed) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestACallEndsWithItsContext(t *testing.T) {
	conn, other := peer(t)
	go func() {
		other.Write([]byte(greeting))                         //nolint:errcheck // without it the test fails
		other.Read(make([]byte, 1024))                        //nolint:errcheck // the command
		other.Write([]byte(`{"return": {}, "id": 1}` + "\n")) //nolint:errcheck // without it the test fails
	}()
	m, err := NewMonitor(context.Background(), conn, nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := m.Execute(ctx, "stop", nil, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("error is %v", err)
	}
	if len(m.waiting) != 0 {
		t.Error("the call is still waited for")
	}
	m.Close()
	if err := m.Execute(context.Background(), "stop", nil, nil); !errors.Is(err, ErrClosed) {
		t.Errorf("error is %v", err)
	}
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte(greeting))
	f.Add([]byte(`{"return": {"status": "running"}, "id": 7}`))
	f.Add([]byte(`{"error": {"class": "GenericError", "desc": "no"}, "id": 7}`))
	f.Add([]byte(`{"timestamp": {"seconds": 1, "microseconds": 2}, "event": "STOP"}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		m, err := decode(line)
		if err == nil && m.QMP == nil && m.Return == nil && m.Error == nil && m.Event == "" {
			t.Error("a message that says nothing was taken")
		}
	})
}

func FuzzPPM(f *testing.F) {
	f.Add([]byte("P6\n2 1\n255\nabcdef"))
	f.Add([]byte("P6 99999999 99999999 255 "))
	f.Fuzz(func(t *testing.T, b []byte) {
		img, err := decodePPM(b)
		if err == nil && 3*img.Bounds().Dx()*img.Bounds().Dy() > len(b) {
			t.Error("a picture of more than there is")
		}
	})
}

func TestTextThatATerminalWouldObey(t *testing.T) {
	if s := lastLines("one\n\x1b[2Jtwo\r\n\n", 2); s != "one; [2Jtwo" {
		t.Errorf("%q", s)
	}
	if s := panicLine("[    1.0] Kernel panic - not syncing: Attempted to kill init!\r\nmore"); !strings.HasSuffix(s, "kill init!") {
		t.Errorf("%q", s)
	}
}

func TestAccelerator(t *testing.T) {
	kernel := t.TempDir() + "/kernel"
	if err := os.WriteFile(kernel, []byte("no kernel at all"), 0o644); err != nil {
		t.Fatal(err)
	}
	cache := t.TempDir()
	v, err := Accelerator(t.Context(), kernel, cache)
	if err != nil || v.Accel != TCG || v.Detail == "" {
		t.Errorf("verdict %v, %v", v, err)
	}
	if openKVM() == nil {
		es, err := os.ReadDir(cache)
		if err != nil || len(es) != 1 {
			t.Errorf("%d verdicts are kept, %v", len(es), err)
		}
		if again, err := Accelerator(t.Context(), kernel, cache); err != nil || again != v {
			t.Errorf("the kept verdict is %v, %v", again, err)
		}
	}
	for _, f := range Features() {
		if f.Name == "" || f.Detail == "" || !f.OK && f.Cost == "" {
			t.Errorf("feature %+v", f)
		}
	}
}
