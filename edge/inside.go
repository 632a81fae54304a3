package edge

import (
	"context"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

// insideConns is how many connections of one sandbox to the API there are at
// once. More wait in the sandbox.
const insideConns = 64

// withDoor adds where the API is to the variables of a sandbox's commands. What
// the Spec says itself wins, as always.
func (n *Node) withDoor(id dsec.SandboxID, s dsec.Spec, g driver.GuestConfig) driver.GuestConfig {
	if s.API == nil {
		return g
	}
	env := make([]string, 0, len(g.Env)+2)
	vars := map[string]string{dsec.EnvURL: "http://127.0.0.1:" + strconv.Itoa(s.API.Port), dsec.EnvToken: n.cfg.Door.Token(id)}
	for _, kv := range g.Env {
		k, _, _ := strings.Cut(kv, "=")
		_, ours := vars[k]
		_, theirs := s.Env[k]
		if ours && theirs {
			delete(vars, k)
		}
		if !ours || theirs {
			env = append(env, kv)
		}
	}
	for _, k := range []string{dsec.EnvURL, dsec.EnvToken} {
		if v, ok := vars[k]; ok {
			env = append(env, k+"="+v)
		}
	}
	g.Env = env
	return g
}

// openInlet opens the port of the API before anything runs in the sandbox, so
// that nobody has it.
func openInlet(ctx context.Context, m driver.Machine, port int) error {
	in, ok := m.Guest().(driver.Inlet)
	if !ok {
		return dsec.Errorf(dsec.Unsupported, "sandboxes of this kind have no API on their loopback")
	}
	return in.Listen(ctx, port)
}

// serveInside hands what the workload of e connects to its API to the Door, for
// as long as the machine lives.
func (n *Node) serveInside(e *entry, m driver.Machine) {
	api := e.record().spec.spec.API
	in, ok := m.Guest().(driver.Inlet)
	if api == nil || n.cfg.Door == nil || !ok {
		return
	}
	n.spawn(func() {
		slots := make(chan struct{}, insideConns)
		for pause := inletPause; ; {
			select {
			case slots <- struct{}{}:
			case <-n.life.Done():
				return
			}
			c, err := in.Accept(n.life, api.Port)
			switch {
			case err == nil:
				pause = inletPause
				n.cfg.Door.Serve(e.id, &insideConn{c, sync.OnceFunc(func() { <-slots })})
				continue
			case n.life.Err() != nil, dsec.KindOf(err) == dsec.Conflict:
				return // the machine is gone
			}
			<-slots
			select {
			case <-time.After(pause):
				pause = min(2*pause, maxInletPause)
			case <-m.Done():
				return
			case <-n.life.Done():
				return
			}
			_ = in.Listen(n.life, api.Port) // Accept says what is wrong
		}
	})
}

// The pauses after a guest did not answer.
const (
	inletPause    = 50 * time.Millisecond
	maxInletPause = 5 * time.Second
)

// insideConn gives its slot back when it is closed.
type insideConn struct {
	dsec.PortConn
	done func()
}

// Close ends the connection.
func (c *insideConn) Close() error {
	defer c.done()
	return c.PortConn.Close()
}

// Delegate gives what the token of a sandbox may do: Unauthenticated unless it
// lives and has one.
func (n *Node) Delegate(id dsec.SandboxID) (dsec.Token, error) {
	const op = "edge.Delegate"
	none := dsec.Errorf(dsec.Unauthenticated, "the sandbox has no API any more")
	e, err := n.get(id)
	if err != nil {
		return dsec.Token{}, dsec.WithOp(op, "", none)
	}
	e.mu.Lock()
	rec, over := e.rec, e.usable() != nil && e.rec.state != dsec.Creating
	e.mu.Unlock()
	api := rec.spec.spec.API
	if over || api == nil || rec.until != 0 && time.Now().UnixNano() >= rec.until {
		return dsec.Token{}, dsec.WithOp(op, "", none)
	}
	return dsec.Token{
		Name: "@" + string(id), Project: dsec.SandboxProject(rec.spec.spec.Project, id), Rights: api.Rights,
		Created: stamp(rec.created), Expires: stamp(rec.until),
	}, nil
}
