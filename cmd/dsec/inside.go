package main

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base32"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/api"
	"github.com/dsec-go/dsec/edge"
)

// insideMax is how many connections from inside sandboxes are served at once,
// two descriptors each. More wait in their sandboxes.
const insideMax = 2048

// inside is the API as sandboxes reach it, the edge's Door: a listener that is
// fed with the connections of guests. A sandbox's token is made from its ID and
// kept nowhere. It counts on connections of that sandbox alone, and no other
// token counts on those, so a token that is stolen is of no use elsewhere.
type inside struct {
	key    []byte
	slots  chan struct{}
	conns  chan net.Conn
	done   chan struct{}
	finish func()
	copies sync.WaitGroup

	mu     sync.Mutex
	server *http.Server // nil until serve
}

var _ edge.Door = (*inside)(nil)

func newInside(key *dsec.IDKey) *inside {
	m := hmac.New(sha256.New, key[:])
	m.Write([]byte("tokens of sandboxes"))
	s := &inside{
		key: m.Sum(nil), slots: make(chan struct{}, insideMax), conns: make(chan net.Conn), done: make(chan struct{}),
	}
	s.finish = sync.OnceFunc(func() { close(s.done) })
	return s
}

var tokenEncoding = base32.StdEncoding.WithPadding(base32.NoPadding)

// Token gives the secret of a sandbox.
func (s *inside) Token(id dsec.SandboxID) string {
	m := hmac.New(sha256.New, s.key)
	m.Write([]byte(id))
	return "dsec_sb_" + strings.ToLower(tokenEncoding.EncodeToString(m.Sum(nil)))
}

// serve answers what comes, until end.
func (s *inside) serve(h http.Handler, log *slog.Logger) {
	server := &http.Server{
		Handler:           h,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       time.Minute,
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return api.WithInside(ctx, c.(*insideConn).id)
		},
	}
	s.mu.Lock()
	s.server = server
	s.mu.Unlock()
	s.copies.Go(func() { _ = server.Serve(s) }) // ends with the listener
}

// end breaks all connections off and returns when nothing of them is left.
func (s *inside) end() error {
	s.finish()
	s.mu.Lock()
	server := s.server
	s.mu.Unlock()
	var err error
	if server != nil {
		err = server.Close()
	}
	s.copies.Wait()
	return err
}

// insideConn is a connection whose sandbox is known.
type insideConn struct {
	*net.UnixConn
	id dsec.SandboxID
}

// Serve takes a connection of a sandbox.
func (s *inside) Serve(id dsec.SandboxID, c dsec.PortConn) {
	select {
	case s.slots <- struct{}{}:
	case <-s.done:
		c.Close()
		return
	}
	// The server wants deadlines, which a connection through a guest does not
	// have; the kernel's own between the two has.
	front, back, err := socketPair()
	if err != nil {
		c.Close()
		<-s.slots
		return
	}
	s.copies.Go(func() {
		defer func() { <-s.slots }()
		s.join(&insideConn{front, id}, back, c)
	})
}

// join hands front to the server and copies between back and c, until the
// server is done or c broke.
func (s *inside) join(front *insideConn, back *net.UnixConn, c dsec.PortConn) {
	defer back.Close()
	select {
	case s.conns <- front:
	case <-s.done:
		front.Close()
		c.Close()
		return
	}
	up := make(chan struct{})
	go func() {
		defer close(up)
		_, _ = io.Copy(back, c)
		_ = back.CloseWrite() // the caller has said all; what it asked for may still come
	}()
	_, _ = io.Copy(c, back)
	_ = c.CloseWrite()
	c.Close() // what was written still arrives
	<-up
}

// Accept gives the server its next connection.
func (s *inside) Accept() (net.Conn, error) {
	select {
	case c := <-s.conns:
		return c, nil
	case <-s.done:
		return nil, net.ErrClosed
	}
}

// Close ends Accept.
func (s *inside) Close() error {
	s.finish()
	return nil
}

// Addr is for messages.
func (s *inside) Addr() net.Addr { return &net.UnixAddr{Name: "sandboxes", Net: "unix"} }

func socketPair() (a, b *net.UnixConn, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make socket pair: %w", err)
	}
	var ends [2]*net.UnixConn
	var errs error
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "inside")
		c, err := net.FileConn(f)
		errs = errors.Join(errs, err, f.Close())
		if err == nil {
			ends[i] = c.(*net.UnixConn)
		}
	}
	if errs != nil {
		for _, c := range ends {
			if c != nil {
				c.Close()
			}
		}
		return nil, nil, errs
	}
	return ends[0], ends[1], nil
}

// sandboxTokens lets in the token of the sandbox that a call comes from, and no
// other, an operator's included. It does not tell one that is good elsewhere
// from one that is not.
type sandboxTokens struct {
	inside *inside
	edge   *edge.Node
}

// Authenticate gives what a sandbox may do with its token.
func (t sandboxTokens) Authenticate(ctx context.Context, secret string) (dsec.Token, error) {
	id, ok := api.Inside(ctx)
	if !ok || !hmac.Equal([]byte(t.inside.Token(id)), []byte(secret)) {
		return dsec.Token{}, dsec.Errorf(dsec.Denied, "only the sandbox's own token counts on its loopback")
	}
	return t.edge.Delegate(id)
}

// unnamed has the image names of a sandbox's own project forgotten when it ends.
func (n *node) unnamed(e edge.Events) edge.Events {
	ended := e.Ended
	e.Ended = func(ev edge.EndedEvent) {
		if ended != nil {
			ended(ev)
		}
		own := dsec.SandboxProject(ev.Project, ev.ID)
		if names := n.cluster.Names(); names.Any(own) {
			go func() { // a write to the cluster, which nobody waits for
				if err := names.Drop(context.Background(), own); err != nil {
					n.log.Warn("image names of an ended sandbox stay", logErr, err)
				}
			}()
		}
	}
	return e
}
