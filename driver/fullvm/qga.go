package fullvm

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

// qga speaks to qemu-guest-agent. Calls follow each other: it answers one at a
// time. Its commands and files are in qgacommand.go and qgafile.go.
type qga struct {
	m    *machine
	turn chan struct{} // one token: the right to use conn

	conn io.ReadWriteCloser // nil while there is none
	r    *bufio.Reader

	life context.Context
	end  context.CancelFunc
	wg   sync.WaitGroup // of watched commands

	mu   sync.Mutex
	runs map[dsec.CommandID]*qgaRun
	list []*qgaRun // oldest first
	last time.Time
	sub  func(driver.Activity)
}

func newQGA(m *machine) *qga {
	q := &qga{m: m, turn: make(chan struct{}, 1), runs: map[dsec.CommandID]*qgaRun{}}
	q.life, q.end = context.WithCancel(context.Background())
	return q
}

// close ends all calls.
func (q *qga) close() {
	q.end()
	q.wg.Wait()
	q.turn <- struct{}{}
	q.drop()
	<-q.turn
}

// drop closes the connection. Requires: the turn.
func (q *qga) drop() {
	if q.conn != nil {
		q.conn.Close()
	}
	q.conn, q.r = nil, nil
}

// maxAnswer bounds an answer: the agent keeps 16 MiB of a command's output, and
// sends it in base64.
const maxAnswer = 48 << 20

// callTimeout is how long the agent may take for one answer; it does nothing
// that takes long.
const callTimeout = 30 * time.Second

// call runs one command of the agent.
func (q *qga) call(ctx context.Context, name string, args, result any) error {
	ctx, cancel := context.WithTimeoutCause(ctx, callTimeout, dsec.Errorf(dsec.Unavailable, "qemu-guest-agent does not answer"))
	defer cancel()
	defer context.AfterFunc(q.life, cancel)()
	select {
	case q.turn <- struct{}{}:
	case <-ctx.Done():
		return q.judge(ctx, ctx.Err())
	}
	defer func() { <-q.turn }()
	if q.conn == nil {
		if err := q.connect(ctx); err != nil {
			return q.judge(ctx, err)
		}
	}
	line, err := q.exchange(ctx, name, args)
	if err != nil {
		q.drop()
		return q.judge(ctx, err)
	}
	var a struct {
		Return json.RawMessage `json:"return"`
		Error  *struct {
			Class, Desc string
		} `json:"error"`
	}
	if err := json.Unmarshal(line, &a); err != nil {
		q.drop()
		return dsec.Errorf(dsec.Unavailable, "read the answer of qemu-guest-agent: %w", err)
	}
	if a.Error != nil {
		kind := dsec.Invalid
		if a.Error.Class == "CommandNotFound" || strings.Contains(a.Error.Desc, "disabled") {
			kind = dsec.Unsupported
		} else if strings.Contains(a.Error.Desc, "No such file") {
			kind = dsec.NotFound
		}
		return dsec.Errorf(kind, "qemu-guest-agent: %s", a.Error.Desc[:min(len(a.Error.Desc), 1024)])
	}
	if result == nil {
		return nil
	}
	if err := json.Unmarshal(a.Return, result); err != nil {
		return dsec.Errorf(dsec.Unavailable, "read the answer of qemu-guest-agent: %w", err)
	}
	return nil
}

// judge makes an error of the channel one of the call.
func (q *qga) judge(ctx context.Context, err error) error {
	if gone := q.m.gone(); gone != nil {
		return gone
	}
	if cause := context.Cause(ctx); cause != nil {
		return dsec.WithOp("", "", cause)
	}
	var typed *dsec.Error
	if errors.As(err, &typed) {
		return err
	}
	return dsec.Errorf(dsec.Unavailable, "ask qemu-guest-agent: %w", err)
}

// connect makes a connection and passes over what was on its way to an earlier
// one. Requires: the turn.
func (q *qga) connect(ctx context.Context) error {
	conn, err := q.m.slot.dialQGA(ctx)
	if err != nil {
		return err
	}
	q.conn, q.r = conn, bufio.NewReaderSize(conn, 4096)
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	id := rand.Int64N(1 << 50)
	// The byte 255, which no text has, makes the agent forget half a request.
	if _, err := fmt.Fprintf(conn, "\xff{\"execute\":\"guest-sync-delimited\",\"arguments\":{\"id\":%d}}\n", id); err != nil {
		q.drop()
		return err
	}
	for {
		line, err := readLine(q.r)
		if err != nil {
			q.drop()
			return err
		}
		if i := bytes.LastIndexByte(line, 0xff); i >= 0 {
			line = line[i+1:]
		}
		var a struct{ Return int64 }
		if json.Unmarshal(line, &a) == nil && a.Return == id {
			return nil
		}
	}
}

// exchange sends a request and reads its answer. Requires: the turn.
func (q *qga) exchange(ctx context.Context, name string, args any) ([]byte, error) {
	b, err := json.Marshal(struct {
		Execute   string `json:"execute"`
		Arguments any    `json:"arguments,omitempty"`
	}{name, args})
	if err != nil {
		return nil, err
	}
	conn := q.conn
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	if d, ok := conn.(*os.File); ok {
		d.SetDeadline(time.Now().Add(callTimeout)) //nolint:errcheck // ctx ends it too
	}
	if _, err := conn.Write(append(b, '\n')); err != nil {
		return nil, err
	}
	return readLine(q.r)
}

// readLine reads up to and without a newline, at most maxAnswer bytes.
func readLine(r *bufio.Reader) ([]byte, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		line = append(line, part...)
		switch {
		case len(line) > maxAnswer:
			return nil, errors.New("it sends without end")
		case errors.Is(err, bufio.ErrBufferFull):
		case err != nil:
			return nil, err
		default:
			return line[:len(line)-1], nil
		}
	}
}

// setTime sets the guest's clock.
func (q *qga) setTime(ctx context.Context, now time.Time) error {
	return q.call(ctx, "guest-set-time", map[string]any{"time": now.UnixNano()}, nil)
}

// activity counts the commands that were started through this driver.
func (q *qga) activity() driver.Activity {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.count()
}

// count counts. Requires: q.mu held.
func (q *qga) count() driver.Activity {
	a := driver.Activity{Last: q.last}
	for _, r := range q.list {
		if r.status.Outcome == dsec.StillRunning {
			a.Running++
		}
	}
	return a
}

func (q *qga) subscribe(f func(driver.Activity)) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.sub = f
}

// forget drops what is known of finished steps.
func (q *qga) forget(steps []dsec.Step) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, s := range steps {
		for _, r := range q.list {
			if r.status.Step == s && r.status.Outcome != dsec.StillRunning {
				r.status.Step = dsec.Step{}
			}
		}
	}
}
