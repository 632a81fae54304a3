package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/client"
)

// node is a "dsec up" of the demo's own: its data and its context file lie in
// one folder, and it listens on a port that was free, so that it and a node of
// the user do not meet.
type node struct {
	dsec, dir string
	services  dsec.Services
	up        *exec.Cmd
	log       *lastBytes
	ended     chan struct{} // closed when up has ended
}

// Limits of waiting for the node.
const (
	startLimit = 60 * time.Second
	downLimit  = 90 * time.Second
)

// startNode removes what an earlier demo left in dir and starts a node there.
func startNode(ctx context.Context, program, dir string) (*node, error) {
	n := &node{dsec: program, dir: dir, log: &lastBytes{}, ended: make(chan struct{})}
	if _, err := os.Stat(dir); err == nil {
		if err := n.remove(); err != nil {
			return nil, fmt.Errorf("remove what an earlier demo left: %w", err)
		}
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	n.up = n.command(context.WithoutCancel(ctx), "up", "--data", n.data(), "--listen", "127.0.0.1:0")
	n.up.Stderr = n.log
	// Ctrl-C is for the demo, which then takes the node down in order.
	n.up.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stdout, err := n.up.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := n.up.Start(); err != nil {
		return nil, fmt.Errorf("start dsec up: %w", err)
	}
	ready := make(chan struct{})
	go func() {
		r := bufio.NewReader(stdout)
		if _, err := r.ReadString('\n'); err == nil {
			close(ready)
		}
		io.Copy(io.Discard, r)
		n.up.Wait()
		close(n.ended)
	}()
	select {
	case <-ready:
	case <-n.ended:
		return nil, errors.Join(fmt.Errorf("dsec up ended: %v\n%s", n.up.ProcessState, n.log), n.end())
	case <-time.After(startLimit):
		return nil, errors.Join(fmt.Errorf("dsec up is not ready after %v\n%s", startLimit, n.log), n.end())
	case <-ctx.Done():
		return nil, errors.Join(ctx.Err(), n.end())
	}
	if err := n.connect(); err != nil {
		return nil, errors.Join(err, n.end())
	}
	return n, nil
}

func (n *node) data() string   { return filepath.Join(n.dir, "data") }
func (n *node) config() string { return filepath.Join(n.dir, "config") }

// command is a dsec command line with the demo's own context file.
func (n *node) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, n.dsec, args...)
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "DSEC_") && !strings.HasPrefix(v, "XDG_CONFIG_HOME=") {
			cmd.Env = append(cmd.Env, v)
		}
	}
	cmd.Env = append(cmd.Env, "XDG_CONFIG_HOME="+n.config())
	return cmd
}

// connect reads the context file that dsec up left.
func (n *node) connect() error {
	b, err := os.ReadFile(filepath.Join(n.config(), "dsec", "context.json"))
	if err != nil {
		return fmt.Errorf("read context: %w", err)
	}
	var c struct{ URL, Token string }
	if err := json.Unmarshal(b, &c); err != nil {
		return fmt.Errorf("read context: %w", err)
	}
	n.services, err = client.Open(client.Config{URL: c.URL, Token: c.Token})
	return err
}

// end takes the node and its sandboxes down and removes its folder.
func (n *node) end() error {
	err := n.remove()
	select {
	case <-n.ended:
	case <-time.After(downLimit):
		n.up.Process.Kill()
		err = errors.Join(err, fmt.Errorf("dsec up did not end\n%s", n.log))
	}
	return err
}

// remove runs dsec down, which also ends what a killed node left, and deletes
// the folder only if that went well.
func (n *node) remove() error {
	ctx, cancel := context.WithTimeout(context.Background(), downLimit)
	defer cancel()
	cmd := n.command(ctx, "down", "--data", n.data())
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // a second Ctrl-C must not break it off
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("dsec down: %w\n%s", err, out)
	}
	return os.RemoveAll(n.dir)
}

// lastBytes keeps the end of a log, to be shown when things go wrong.
type lastBytes struct {
	mu sync.Mutex
	b  []byte
}

func (l *lastBytes) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.b = append(l.b, p...)
	if len(l.b) > 64<<10 {
		l.b = append([]byte(nil), tail(l.b)...)
	}
	return len(p), nil
}

func (l *lastBytes) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(tail(l.b))
}
