package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/dsec-go/dsec"
)

// readyFD is where a detached node writes its address once it serves.
const readyFD = 3

// detach runs this command line again in a session of its own, its log in the
// data folder, and returns when that node is healthy or has ended.
func (c *upCmd) detach(ctx context.Context, a *app) error {
	data, err := filepath.Abs(a.local(c.Data))
	if err != nil {
		return fmt.Errorf("open data folder: %w", err)
	}
	log, err := openUpLog(data)
	if err != nil {
		return err
	}
	defer log.Close()
	begin, err := log.Seek(0, io.SeekEnd)
	if err != nil {
		return fmt.Errorf("open log: %w", err)
	}
	cmd, ready, err := c.start(a, data, log)
	if err != nil {
		return fmt.Errorf("start node: %w", err)
	}
	defer ready.Close()
	url, ended := make(chan string, 1), make(chan error, 1)
	go func() {
		if line, err := bufio.NewReader(ready).ReadString('\n'); err == nil {
			url <- strings.TrimSpace(line)
		}
	}()
	go func() { ended <- cmd.Wait() }()
	signals, unnotify := a.Notify(os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer unnotify()

	served := ""
	for {
		var again <-chan time.Time
		if served != "" {
			if healthy(ctx, served) {
				_, err := fmt.Fprintf(a.Stdout, "dsec %s serves at %s, data and %s in %s; dsec down ends it\n", dsec.Version, served, upLog, data)
				return err
			}
			again = time.After(50 * time.Millisecond)
		}
		select {
		case served = <-url:
		case <-again:
		case err := <-ended:
			return lastWords(log, begin, err)
		case sig := <-signals:
			_ = cmd.Process.Signal(syscall.SIGTERM) // it may have ended
			<-ended
			return exitStatus(128 + int(sig.(syscall.Signal)))
		}
	}
}

// openUpLog opens the log in a data folder, which is made if missing. One that
// is somebody else's is left as it is.
func openUpLog(data string) (*os.File, error) {
	if err := checkEmpty(data); err != nil {
		return nil, fmt.Errorf("open data folder %s: %w", data, err)
	}
	if err := os.MkdirAll(data, 0o700); err != nil {
		return nil, fmt.Errorf("open data folder: %w", err)
	}
	log, err := os.OpenFile(filepath.Join(data, upLog), os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open log: %w", err)
	}
	return log, nil
}

// args give the node that is started all that this command was given. Its folder
// is another, so paths are made whole.
func (c *upCmd) args(a *app, data string) ([]string, error) {
	args := []string{"up", "--data", data, "--listen", c.Listen, "--ready-fd", strconv.Itoa(readyFD)}
	for _, f := range []struct{ flag, path string }{{"--guest", c.Guest}, {"--snapshots", c.Snapshots}} {
		if f.path == "" {
			continue
		}
		path, err := filepath.Abs(a.local(f.path))
		if err != nil {
			return nil, err
		}
		args = append(args, f.flag, path)
	}
	for _, f := range []struct{ flag, value string }{{"--name", c.Name}, {"--store", c.Store}, {"--warm", c.Warm}} {
		if f.value != "" {
			args = append(args, f.flag, f.value)
		}
	}
	for _, f := range []struct {
		flag  string
		bytes byteSize
	}{{"--swap", c.Swap}, {"--cache", c.Cache}} {
		if f.bytes > 0 {
			args = append(args, f.flag, strconv.FormatInt(int64(f.bytes), 10))
		}
	}
	if c.Verbose {
		args = append(args, "--verbose")
	}
	if !c.Record {
		args = append(args, "--no-record")
	}
	return args, nil
}

// start runs the node; ready gives its address.
func (c *upCmd) start(a *app, data string, log *os.File) (cmd *exec.Cmd, ready *os.File, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, nil, err
	}
	ready, w, err := os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	defer w.Close()
	args, err := c.args(a, data)
	if err != nil {
		ready.Close()
		return nil, nil, err
	}
	cmd = exec.Command(self, args...)
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = log, log, []*os.File{w}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		ready.Close()
		return nil, nil, err
	}
	return cmd, ready, nil
}

// tell writes the address where it is waited for. Whoever waited may be gone.
func (c *upCmd) tell(url string) {
	if c.ReadyFD > 0 {
		f := os.NewFile(uintptr(c.ReadyFD), "ready")
		fmt.Fprintln(f, url)
		f.Close()
	}
}

// healthy asks a node on this host how it is.
func healthy(ctx context.Context, url string) bool {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/healthz", nil)
	if err != nil {
		return false
	}
	direct := &http.Transport{DisableKeepAlives: true} // no proxy
	resp, err := direct.RoundTrip(req)
	if err != nil {
		return false
	}
	resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

// lastWords gives what a node that ended wrote into its log as the reason.
func lastWords(log *os.File, begin int64, ended error) error {
	b, _ := io.ReadAll(io.NewSectionReader(log, begin, 1<<20))
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	for i := len(lines) - 1; i >= 0; i-- {
		if text, ok := strings.CutPrefix(lines[i], "dsec: "); ok {
			return errors.New(text)
		}
	}
	if ended == nil {
		ended = errors.New("it ended at once")
	}
	return fmt.Errorf("start node: %w; see %s", ended, log.Name())
}
