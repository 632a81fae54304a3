package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// Server is a private "dsec up" with a data folder of its own.
type Server struct {
	URL   string
	Token string

	config ServerConfig
	cmd    *exec.Cmd
	ended  chan error
	log    *os.File
}

// ServerConfig says what a server is started from.
type ServerConfig struct {
	Program string   // a dsec binary
	Guest   string   // dsec-guest; default the one beside Program
	Dir     string   // made for everything that the server keeps
	Up      []string // flags of its own for up
}

// Limits of a server's start and end.
const (
	startPatience = 30 * time.Second
	downPatience  = 5 * time.Minute // thousands of sandboxes may have to end
)

// StartServer starts a server and returns once it serves.
func StartServer(ctx context.Context, c ServerConfig) (*Server, error) {
	s := &Server{config: c, ended: make(chan error, 1)}
	var err error
	if err = os.MkdirAll(c.Dir, 0o700); err != nil {
		return nil, err
	}
	if s.log, err = os.Create(filepath.Join(c.Dir, "log")); err != nil {
		return nil, err
	}
	if err := s.start(ctx); err != nil {
		return nil, err
	}
	return s, nil
}

// start starts the process and waits until it serves; without success nothing is left.
func (s *Server) start(ctx context.Context) error {
	// Port 0: two benchmarks, or a node in use, do not meet.
	s.cmd = s.command(append([]string{"up", "--listen", "127.0.0.1:0", "--name", "bench"}, s.config.Up...)...)
	cmd := s.cmd
	if err := cmd.Start(); err != nil {
		s.cmd = nil
		s.log.Close()
		return fmt.Errorf("start server: %w", err)
	}
	go func() { s.ended <- cmd.Wait() }()
	if err := s.await(ctx); err != nil {
		return errors.Join(fmt.Errorf("start server: %w", err), s.Close())
	}
	return nil
}

// Restart takes the server down with all its sandboxes and starts it again; between
// is called while there is none, with its data folder. Its address changes.
func (s *Server) Restart(ctx context.Context, between func(data string) error) error {
	if err := s.down(); err != nil {
		return err
	}
	if err := between(s.data()); err != nil {
		return err
	}
	return s.start(ctx)
}

func (s *Server) data() string    { return filepath.Join(s.config.Dir, "data") }
func (s *Server) context() string { return filepath.Join(s.config.Dir, "dsec", "context.json") }

// Pid is the server's process.
func (s *Server) Pid() int { return s.cmd.Process.Pid }

func (s *Server) command(args ...string) *exec.Cmd {
	args = append(args, "--data", s.data())
	if s.config.Guest != "" {
		args = append(args, "--guest", s.config.Guest)
	}
	cmd := exec.Command(s.config.Program, args...)
	cmd.Env = append(os.Environ(), "XDG_CONFIG_HOME="+s.config.Dir, "DSEC_URL=", "DSEC_TOKEN=")
	cmd.Stdout, cmd.Stderr = s.log, s.log
	// Out of the terminal's process group: Ctrl-C is for the benchmark, which
	// then takes the server down.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return cmd
}

// await waits for the context file, which the server writes when it listens.
func (s *Server) await(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startPatience)
	defer cancel()
	for {
		b, err := os.ReadFile(s.context())
		if err == nil {
			var c struct{ URL, Token string }
			if err := json.Unmarshal(b, &c); err != nil {
				return fmt.Errorf("read context: %w", err)
			}
			s.URL, s.Token = c.URL, c.Token
			return nil
		}
		select {
		case err := <-s.ended:
			s.ended <- err
			return fmt.Errorf("it ended (%v): %s", err, s.lastWords())
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (s *Server) lastWords() []byte {
	b, _ := os.ReadFile(s.log.Name())
	return bytes.TrimSpace(b[max(0, len(b)-1000):])
}

// Close takes the server down with all its sandboxes and deletes its folder.
func (s *Server) Close() error {
	err := s.down()
	s.log.Close()
	if err != nil {
		return err // its folder says what went wrong
	}
	return os.RemoveAll(s.config.Dir)
}

// down ends the server and its sandboxes. It is not interrupted: what it would leave
// behind is the whole run.
func (s *Server) down() error {
	if s.cmd == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), downPatience)
	defer cancel()
	down := s.command("down")
	if err := down.Start(); err != nil {
		return fmt.Errorf("take server down: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { down.Process.Kill() }) //nolint:errcheck // ended is as good
	err := down.Wait()
	stop()
	if err != nil {
		err = fmt.Errorf("take server down: %w: %s", err, s.lastWords())
		s.cmd.Process.Kill() //nolint:errcheck // ended is as good
	}
	select {
	case <-s.ended:
	case <-ctx.Done():
		s.cmd.Process.Kill() //nolint:errcheck
		<-s.ended
	}
	s.cmd = nil
	return err
}
