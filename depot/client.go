package depot

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/jail"
)

// Client asks the depot in a folder. It keeps no connection, so a depot may be replaced between
// any two calls: they wait for the next one until their context ends, or Patience is over.
type Client struct {
	Dir      string
	Patience time.Duration // default 30 s
}

// listen makes the socket.
func listen(dir string) (l net.Listener, err error) {
	err = jail.ViaFolder(filepath.Join(dir, socketName), func(short string) error {
		if err := os.Remove(short); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		u, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: short})
		if err != nil {
			return err
		}
		u.SetUnlinkOnClose(false) // a successor may have made its own
		l = u
		return os.Chmod(short, 0o600)
	})
	return l, err
}

func (c *Client) dial(ctx context.Context) (conn net.Conn, err error) {
	err = jail.ViaFolder(filepath.Join(c.Dir, socketName), func(short string) error {
		conn, err = (&net.Dialer{}).DialContext(ctx, "unix", short)
		return err
	})
	return conn, err
}

// errAway is the reason of a call that found no depot for too long.
var errAway = errors.New("the depot does not answer")

// call asks until it has an answer.
func (c *Client) call(ctx context.Context, q request) (response, error) {
	patience := c.Patience
	if patience == 0 {
		patience = 30 * time.Second
	}
	until := time.Now().Add(patience)
	q.V = protocol
	for {
		a, err := c.once(ctx, q)
		if err == nil {
			if a.Error != "" {
				return a, &dsec.Error{Kind: dsec.ParseErrorKind(a.Kind), Err: errors.New(a.Error)}
			}
			return a, nil
		}
		if ctx.Err() != nil {
			return a, context.Cause(ctx)
		}
		if time.Now().After(until) {
			return a, dsec.Errorf(dsec.Unavailable, "%w: %w", errAway, err)
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return a, context.Cause(ctx)
		}
	}
}

func (c *Client) once(ctx context.Context, q request) (a response, err error) {
	conn, err := c.dial(ctx)
	if err != nil {
		return a, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if err := json.NewEncoder(conn).Encode(q); err != nil {
		return a, err
	}
	return a, json.NewDecoder(bufio.NewReader(conn)).Decode(&a)
}

// Layer has the files of a layer at hand.
func (c *Client) Layer(ctx context.Context, digest string, form Form) (Layer, error) {
	a, err := c.call(ctx, request{Op: opLayer, Digest: digest, Form: form})
	if err == nil && a.Layer == nil {
		err = errors.New("depot: an answer without a layer")
	}
	if err != nil {
		return Layer{}, err
	}
	return *a.Layer, nil
}

// Stats gives figures of the depot.
func (c *Client) Stats(ctx context.Context) (Stats, error) {
	a, err := c.call(ctx, request{Op: opStats})
	if err != nil || a.Stats == nil {
		return Stats{}, errors.Join(err, ctx.Err())
	}
	return *a.Stats, nil
}

// Cached gives how many bytes of layers are on this node.
func (c *Client) Cached(ctx context.Context, digests []string) (map[string]int64, error) {
	a, err := c.call(ctx, request{Op: opCached, Digests: digests})
	return a.Cached, err
}

// Profile gives what was read first of a layer, once that is known; nil before, and for a
// layer that was prefetched.
func (c *Client) Profile(ctx context.Context, digest string) ([]byte, error) {
	a, err := c.call(ctx, request{Op: opProfile, Digest: digest})
	return a.Profile, err
}

// Prefetch fetches ahead what a profile of a layer says, which must have been asked for.
func (c *Client) Prefetch(ctx context.Context, digest string, profile []byte) error {
	_, err := c.call(ctx, request{Op: opPrefetch, Digest: digest, Profile: profile})
	return err
}

// Keep tells the layers that are mounted or may be opened again by their paths. Of others the
// depot knows a bounded number.
func (c *Client) Keep(ctx context.Context, digests []string) error {
	_, err := c.call(ctx, request{Op: opKeep, Digests: digests})
	return err
}

// Watch returns a channel that is closed when the depot that answers now is gone, and its
// label. It does not wait for a depot: without one it is an error.
func (c *Client) Watch(ctx context.Context) (label string, gone <-chan struct{}, err error) {
	conn, err := c.dial(ctx)
	if err != nil {
		return "", nil, err
	}
	conn.SetDeadline(time.Now().Add(10 * time.Second)) //nolint:errcheck // sockets have deadlines
	in := bufio.NewReader(conn)
	var a response
	err = json.NewEncoder(conn).Encode(request{V: protocol, Op: opHello})
	if err == nil {
		err = json.NewDecoder(in).Decode(&a)
	}
	if err != nil {
		conn.Close()
		return "", nil, fmt.Errorf("greet the depot: %w", err)
	}
	conn.SetDeadline(time.Time{}) //nolint:errcheck // sockets have deadlines
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		defer conn.Close()
		defer context.AfterFunc(ctx, func() { conn.Close() })()
		io.Copy(io.Discard, conn) //nolint:errcheck // it only ever ends
	}()
	return a.Label, ended, nil
}

// Retire ends the depot's process for a successor: its mount stays.
func (c *Client) Retire(ctx context.Context) error {
	_, err := c.once(ctx, request{V: protocol, Op: opRetire})
	return err
}

// End ends the depot and its mount.
func (c *Client) End(ctx context.Context) error {
	a, err := c.once(ctx, request{V: protocol, Op: opEnd})
	if err == nil && a.Error != "" {
		err = errors.New(a.Error)
	}
	return err
}
