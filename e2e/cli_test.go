package e2e_test

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/dsec-go/dsec/driver/drivertest"
)

// forever gives the read end of a pipe into which yes writes without an end.
func forever(t *testing.T) *os.File {
	t.Helper()
	r, w, err := os.Pipe()
	must(t, err)
	yes := exec.Command(drivertest.Busybox, "yes")
	yes.Stdout = w
	must(t, yes.Start())
	w.Close()
	t.Cleanup(func() {
		r.Close()
		yes.Process.Kill()
		yes.Wait()
	})
	return r
}

// never gives the read end of a pipe that nobody writes to or closes.
func never(t *testing.T) *os.File {
	t.Helper()
	r, w, err := os.Pipe()
	must(t, err)
	t.Cleanup(func() { r.Close(); w.Close() })
	return r
}

// TestPipelines puts dsec exec into shell pipelines: it ends when its command
// does, whatever its input is.
func TestPipelines(t *testing.T) {
	n := shared(t)
	box := n.create(t, plain())
	id := string(box.ID)
	for _, c := range []struct {
		name  string
		stdin io.Reader
		args  []string
		code  int
		out   string
	}{
		{"yes into a command without -i", forever(t), []string{"exec", id, "--", "true"}, 0, ""},
		{"yes into one that does not read", forever(t), []string{"exec", "-i", id, "--", "true"}, 0, ""},
		{"yes into one that reads a little", forever(t), []string{"exec", "-i", id, "--", "head", "-c", "4"}, 0, "y\ny\n"},
		{"yes into one that closes its input", forever(t), []string{"exec", "-i", id, "--", "sh", "-c", "exec 0<&-; echo closed"}, 0, "closed\n"},
		{"yes into a timeout", forever(t), []string{"exec", "-i", "--timeout", "300ms", id, "--", "sleep", "1000"}, 124, ""},
		{"an input that never ends", never(t), []string{"exec", "-i", id, "--", "sh", "-c", "echo done; exit 3"}, 3, "done\n"},
		{"the same and a timeout", never(t), []string{"exec", "-i", "--timeout", "300ms", id, "--", "cat"}, 124, ""},
		{"the same without -i", never(t), []string{"exec", id, "--", "cat"}, 0, ""},
		{"an empty input", strings.NewReader(""), []string{"exec", "-i", id, "--", "cat"}, 0, ""},
		{"no input", nil, []string{"exec", "-i", id, "--", "cat"}, 0, ""},
		{"an input of 3 MiB", bytes.NewReader(bytes.Repeat([]byte("0123456\n"), 3<<17)), []string{"exec", "-i", id, "--", "md5sum"}, 0, "da3402266585f39e36b567ebe4398d14  -\n"},
		{"run", forever(t), []string{"run", "-i", "--image", busybox, "--", "head", "-n", "1"}, 0, "y\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := n.run(c.stdin, c.args...)
			if r.cause != nil || r.code != c.code || r.out != c.out {
				t.Errorf("status %d, output %q, errors %q, %v; want %d, %q", r.code, r.out, r.err, r.cause, c.code, c.out)
			}
		})
	}

	t.Run("a reader that goes away", func(t *testing.T) {
		cmd, cancel := n.command("exec", id, "--", "yes")
		defer cancel()
		out, err := cmd.StdoutPipe()
		must(t, err)
		must(t, cmd.Start())
		got := make([]byte, 4)
		_, err = io.ReadFull(out, got)
		out.Close()
		if werr := cmd.Wait(); cmd.ProcessState.ExitCode() != 141 || err != nil || string(got) != "y\ny\n" {
			t.Errorf("read %q, %v; it ended with %v", got, err, werr)
		}
		l, err := n.Commands.List(ctx(t), on(box.ID))
		must(t, err)
		if last := l[len(l)-1]; last.Signal != "PIPE" {
			t.Errorf("yes is %s by %q", last.Outcome, last.Signal)
		}
	})
	t.Run("an output that is full", func(t *testing.T) {
		full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
		must(t, err)
		defer full.Close()
		cmd, cancel := n.command("exec", id, "--", "echo", "x")
		defer cancel()
		cmd.Stdout = full
		if r := finish(cmd, nil); r.code != 125 || !strings.Contains(r.err, "no space") {
			t.Errorf("status %d, errors %q", r.code, r.err)
		}
	})
}

// TestExitStatus holds the table of exec's and run's statuses.
func TestExitStatus(t *testing.T) {
	n := shared(t)
	spec := plain()
	spec.Resources.Memory = 32 << 20
	id := string(n.create(t, spec).ID)
	for _, c := range []struct {
		code int
		text string // of the last line of errors
		args []string
	}{
		{0, "", []string{"true"}},
		{42, "", []string{"sh", "-c", "exit 42"}},
		{124, "timeout", []string{"--timeout", "200ms", "sleep", "1000"}},
		{124, "without output", []string{"--idle-timeout", "200ms", "sleep", "1000"}},
		{125, "no-such-user", []string{"-u", "no-such-user", "true"}},
		{125, "/no/such", []string{"-w", "/no/such", "true"}},
		{126, "/etc/passwd", []string{"/etc/passwd"}},
		{127, "no-such-program", []string{"no-such-program"}},
		{137, "memory limit", []string{"sh", "-c", "exec tail /dev/zero"}},
		{143, "", []string{"sh", "-c", "kill -TERM $$"}},
	} {
		var flags []string
		argv := c.args
		for strings.HasPrefix(argv[0], "-") {
			flags, argv = append(flags, argv[:2]...), argv[2:]
		}
		for _, line := range [][]string{
			append(append(append([]string{"exec"}, flags...), id, "--"), argv...),
			append(append(append([]string{"run", "--image", busybox, "--memory", "32M"}, flags...), "--"), argv...),
		} {
			r := n.run(nil, line...)
			if r.cause != nil || r.code != c.code || !strings.Contains(r.err, c.text) || c.text == "" && r.err != "" {
				t.Errorf("dsec %s: status %d, errors %q, %v; want %d and %q", strings.Join(line, " "), r.code, r.err, r.cause, c.code, c.text)
			}
		}
	}
	r := n.run(nil, "exec", "--timeout", "200ms", id, "--", "sh", "-c", "echo partial; sleep 1000")
	if r.code != 124 || r.out != "partial\n" {
		t.Errorf("before its timeout it said %q (%d)", r.out, r.code)
	}
}
