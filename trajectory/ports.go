package trajectory

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dsec-go/dsec"
)

// ports is the recorded dsec.Ports: of a connection there is its port, and at
// its end how much went each way. A step does not make a connection repeatable.
type ports struct{ r *Recorder }

type dialParam struct {
	Port int `json:"port"`
}

type dialAnswer struct {
	Sent     int64         `json:"sent"`     // bytes to the sandbox
	Received int64         `json:"received"` // bytes from it
	Lasted   time.Duration `json:"lasted"`   // nanoseconds
}

func (p ports) Dial(ctx context.Context, on dsec.Call, port int) (dsec.PortConn, error) {
	q, err := marshal(dialParam{port})
	if err != nil {
		return nil, err
	}
	b, err := p.r.log.begin(ctx, request{on: dsec.Call{Sandbox: on.Sandbox}, who: whoOf(ctx), op: dsec.RecordDial, param: q})
	if errors.Is(err, errNoChain) {
		return p.r.inner.Ports.Dial(ctx, on, port)
	}
	if err != nil {
		return nil, dsec.WithOp("trajectory.Dial", on.Sandbox, err)
	}
	c, err := p.r.inner.Ports.Dial(ctx, on, port)
	if err != nil {
		p.r.finish(b, struct{}{}, body{}, err) //nolint:errcheck // the caller gets err
		return nil, err
	}
	t := &tally{PortConn: c, begun: time.Now()}
	t.over = sync.OnceFunc(func() {
		a := dialAnswer{t.sent.Load(), t.received.Load(), time.Since(t.begun)}
		p.r.work.Go(func() { p.r.finish(b, a, body{}, nil) }) //nolint:errcheck // it is tried until it is written
	})
	return t, nil
}

// tally counts what goes through a connection.
type tally struct {
	dsec.PortConn
	begun          time.Time
	sent, received atomic.Int64
	over           func()
}

func (t *tally) Read(p []byte) (int, error) {
	n, err := t.PortConn.Read(p)
	t.received.Add(int64(n))
	return n, err
}

func (t *tally) Write(p []byte) (int, error) {
	n, err := t.PortConn.Write(p)
	t.sent.Add(int64(n))
	return n, err
}

func (t *tally) Close() error {
	err := t.PortConn.Close()
	t.over()
	return err
}
