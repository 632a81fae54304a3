package trajectory

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/journal"
)

// Store is where segments and large bodies go.
type Store interface {
	blob.Store
	blob.Stager
}

// Archives keeps the list of segments that hold ended sandboxes where it
// outlives the node. It is safe for concurrent use.
type Archives interface {
	AddArchive(ctx context.Context, segment string, at time.Time) error
	DropArchive(ctx context.Context, segment string, at time.Time) error
	Archives(ctx context.Context) ([]string, error) // newest first
}

// Config is what a Log is made of.
type Config struct {
	Journal  Journal // set by Open
	Store    Store
	Archives Archives // default: only this node's journal knows them

	SealBytes    int64         // tail of a living sandbox that is sealed; default 256 KiB
	ArchiveEvery time.Duration // longest that ended sandboxes wait for their segment; default 1 min
	ArchiveBytes int64         // bytes of ended sandboxes that make a segment at once; default 8 MiB
	Keep         time.Duration // how long ended trajectories are kept; default 7 days

	Fault func(error) // told of what failed behind the callers' backs; default none
}

// Log is the trajectories of one node. It is safe for concurrent use.
type Log struct {
	cfg     Config
	indexes indexes
	foreign foreign
	full    chan struct{} // asks the archiver to run now; holds one
	over    atomic.Int64  // bytes of tails of ended sandboxes, about

	appended atomic.Int64 // bytes since the last checkpoint that was asked for
	tidying  sync.Mutex   // one Tidy at a time

	mu       sync.RWMutex
	chains   map[dsec.SandboxID]*chain
	archived map[dsec.SandboxID]blob.Digest
	archives []archive                   // oldest first
	unclosed map[dsec.SandboxID]endParam // ends that could not be recorded
	gaps     bool                        // the journal has lost records, before what is being replayed
}

// archive is a segment of ended sandboxes.
type archive struct {
	segment blob.Digest
	at      time.Time
}

// chain is the trajectory of one sandbox that is not archived.
type chain struct {
	id dsec.SandboxID

	mu       sync.Mutex
	who      dsec.Who // of the sandbox
	defaults defaults // of the sandbox
	seq      uint64   // number of the last record
	head     linkHash // of the last record
	base     linkHash // of the last record before the tail
	tail     []journal.Place
	bytes    int64    // of the tail
	extents  []extent // before the tail, oldest first
	steps    map[dsec.Step]stepRef
	commands map[dsec.CommandID]uint64 // their answers
	open     map[uint64]openRef        // requests without an answer
	unsynced map[uint64]*flight        // requests whose answer is not known to be durable
	blobs    []string                  // bodies named in the tail
	safe     []dsec.Step               // that the guest may forget and was not told of
	partial  map[uint64]partial        // what open commands had printed when the end was asked for
	looks    bool                      // a lookAgain is under way
	over     bool
	ended    int64
}

// stepRef is what is known of a step. Without an answer and a flight its
// request was recorded by an earlier process, and the guest did not know it.
type stepRef struct {
	request uint64
	answer  uint64 // 0 while there is none
	sum     uint64 // of the request
	flight  *flight
}

// openRef is a request without an answer.
type openRef struct {
	op     dsec.RecordOp
	step   dsec.Step // as the guest knows it
	flight *flight   // nil for one of an earlier process, and for one whose call broke off
	broke  bool      // its call broke off in this process
}

// flight is a call under way. Its fields are fixed once done is closed.
type flight struct {
	request uint64
	op      dsec.RecordOp
	step    dsec.Step // the caller's; may be zero
	wrote   uint64    // its answer's record, which may not be durable; under the chain's mu
	done    chan struct{}
	answer  uint64 // its record; 0 if the call failed
	err     error  // of the call, or of the recording
	live    any    // the answer as it came
	lost    bool   // the answer cannot be made durable by this process
}

// hiddenSession is the session of steps that the recorder makes up. Callers
// cannot use it.
const hiddenSession = "~"

// guestStep is the name under which the guest knows a request. Requires: c.mu
// held, or the first record is in c already: it does not change after that.
func (c *chain) guestStep(step dsec.Step, request uint64) dsec.Step {
	if step.IsZero() {
		return dsec.Step{Session: hiddenSession, Number: c.defaults.Branch + request}
	}
	return step
}

// sum tells requests apart.
func (d *defaults) sum(op dsec.RecordOp, request json.RawMessage) uint64 {
	request = d.plain(op, request)
	h := sha256.New()
	io.WriteString(h, string(op)) //nolint:errcheck // a hash
	h.Write([]byte{0})
	h.Write(request)
	return binary.LittleEndian.Uint64(h.Sum(nil))
}

// tailFirst is the number of the first record in the tail.
func (c *chain) tailFirst() uint64 { return c.seq - uint64(len(c.tail)) + 1 }

func newChain(id dsec.SandboxID) *chain {
	return &chain{id: id, head: origin(id), base: origin(id)}
}

// chain finds a sandbox that is not archived; nil if there is none.
func (l *Log) chain(id dsec.SandboxID) *chain {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.chains[id]
}

// unwritable is the error of a journal that does not take a record.
func unwritable(err error) error {
	if errors.Is(err, journal.ErrFailed) {
		// It is not known any more what the disk has. The next process finds out.
		return &dsec.Error{Kind: dsec.Unavailable, Err: fmt.Errorf("the node has to be started again: %w", err)}
	}
	return &dsec.Error{Kind: dsec.Unavailable, Err: fmt.Errorf("write the trajectory: %w", err)}
}

// append adds a record and gives its number in the journal. Requires: c.mu held, or c not known yet.
func (l *Log) append(c *chain, h *head, body []byte) (uint64, error) {
	now := time.Now()
	h.Seq, h.Time, h.Mono = c.seq+1, now.UnixNano(), boottime()
	if h.Project == "" {
		h.Project = c.who.Project
	}
	h.Job = c.who.Job
	b, err := encode(c.id, c.head, h, body)
	if err != nil {
		return 0, err
	}
	seq, at, err := l.cfg.Journal.Append(KindRecord, b)
	if err != nil {
		return 0, unwritable(err)
	}
	c.take(h, b, at)
	l.appended.Add(int64(len(b)))
	return seq, nil
}

// take makes a record part of the chain. Requires: c.mu held, or nothing else
// runs yet.
func (c *chain) take(h *head, b []byte, at journal.Place) {
	c.seq, c.head = h.Seq, sha256.Sum256(b)
	c.tail = append(c.tail, at)
	c.bytes += int64(len(b))
	if h.Blob != "" {
		c.blobs = append(c.blobs, h.Blob)
	}
	step := h.step()
	switch {
	case h.Op == dsec.RecordEnd:
		c.over, c.ended = true, h.Time
	case h.Op == dsec.RecordCreate:
		c.who, c.defaults = dsec.Who{Project: h.Project, Job: h.Job}, defaultsOf(h.Request)
	case h.Alone:
	case h.Of == 0:
		if c.open == nil {
			c.open = map[uint64]openRef{}
		}
		c.open[h.Seq] = openRef{op: h.Op, step: c.guestStep(step, h.Seq)}
		if !step.IsZero() {
			if c.steps == nil {
				c.steps = map[dsec.Step]stepRef{}
			}
			c.steps[step] = stepRef{request: h.Seq, sum: c.defaults.sum(h.Op, h.Request)}
		}
	default:
		delete(c.open, h.Of)
		if !step.IsZero() {
			if ref, ok := c.steps[step]; ok && h.answersStep() {
				ref.answer = h.Seq
				c.steps[step] = ref
			} else if ok {
				delete(c.steps, step)
			}
		}
		if h.Op == dsec.RecordCommand && h.answersStep() {
			if id := commandOf(h.Answer); id != "" {
				if c.commands == nil {
					c.commands = map[dsec.CommandID]uint64{}
				}
				c.commands[id] = h.Seq
			}
		}
	}
}

// request is one call to be recorded.
type request struct {
	on    dsec.Call
	who   dsec.Who
	op    dsec.RecordOp
	param json.RawMessage
	body  body
}

// begun is what became of a request.
type begun struct {
	chain  *chain
	flight *flight // the call under way, if first the caller's own to end
	first  bool
	again  bool   // its request was recorded before
	answer uint64 // the recorded answer, if it has one already

	counted bool  // before is known: this process has seen the call begin
	before  int64 // bytes that the sandbox had fetched
}

// errNoChain is a sandbox of which nothing is recorded, or which is over: the
// call goes on to whoever knows why.
var errNoChain = errors.New("no trajectory")

// begin records a request, or finds what its step had before.
func (l *Log) begin(ctx context.Context, r request) (begun, error) {
	step := r.on.Step
	if step.Session == hiddenSession {
		return begun{}, dsec.Errorf(dsec.Invalid, "the session %q is reserved", hiddenSession)
	}
	c := l.chain(r.on.Sandbox)
	if c == nil {
		return l.beginOld(ctx, r)
	}
	sum := c.defaults.sum(r.op, r.param)
	c.mu.Lock()
	defer c.mu.Unlock()
	ref, known := c.steps[step]
	if step.IsZero() {
		known = false
	}
	for known && ref.sum != sum {
		at := ref.request
		c.mu.Unlock()
		err := l.differ(ctx, c.id, at, r)
		c.mu.Lock()
		if err != nil {
			return begun{}, err
		}
		// They are alike, and the sum is of a build that knew fewer defaults.
		if ref, known = c.steps[step]; known && ref.request == at {
			ref.sum = sum
			c.steps[step] = ref
		}
	}
	if known {
		if ref.answer != 0 && c.unsynced[ref.request] == nil {
			return begun{chain: c, answer: ref.answer}, nil
		}
		if ref.flight != nil { // also while its answer is on its way to the disk
			return begun{chain: c, flight: ref.flight, again: true}, nil
		}
	}
	if c.over {
		return begun{}, errNoChain
	}
	f := &flight{op: r.op, step: step, done: make(chan struct{})}
	if known {
		f.request = ref.request // its guest never saw it
	} else {
		h := &head{Op: r.op, Project: r.who.Project, Token: r.who.Token, Request: r.param}
		h.setStep(step)
		r.body.describe(h)
		if _, err := l.append(c, h, r.body.inline); err != nil {
			return begun{}, err
		}
		f.request = c.seq
	}
	if !step.IsZero() {
		c.steps[step] = stepRef{request: f.request, sum: sum, flight: f}
	}
	c.open[f.request] = openRef{op: r.op, step: c.guestStep(step, f.request), flight: f}
	return begun{chain: c, flight: f, first: true, again: known}, nil
}

// beginOld answers a step of a sandbox that is archived.
func (l *Log) beginOld(ctx context.Context, r request) (begun, error) {
	if r.on.Step.IsZero() {
		return begun{}, errNoChain
	}
	sec, _, err := l.archivedSection(ctx, r.on.Sandbox)
	if err != nil {
		return begun{}, err
	}
	for _, s := range sec.Steps {
		if s.Session == r.on.Step.Session && s.Number == r.on.Step.Number {
			if err := l.differ(ctx, r.on.Sandbox, s.Request, r); err != nil {
				return begun{}, err
			}
			if s.Answer == 0 {
				break
			}
			return begun{answer: s.Answer}, nil
		}
	}
	return begun{}, errNoChain
}

// differ is Diverged if a recorded request is another than r.
func (l *Log) differ(ctx context.Context, id dsec.SandboxID, seq uint64, r request) error {
	b, err := l.read(ctx, id, seq)
	if err != nil {
		return err
	}
	_, h, err := decode(b)
	if err != nil {
		return err
	}
	d, err := l.defaults(ctx, id)
	if err != nil {
		return err
	}
	return diverged(r.on.Step, h.Op, r.op, d.plain(h.Op, h.Request), d.plain(r.op, r.param))
}

// end records how a call ended, waits until that is durable, and lets those go
// on who wait for it. live is the answer that those get who wait.
//
// While the journal cannot be written the call stays under way, and end goes on
// trying; it returns when that is done, or with ctx. A journal that has failed
// takes nothing more: then the call ends with that error, for everybody who asks.
func (l *Log) end(ctx context.Context, c *chain, f *flight, answer json.RawMessage, live any, bod body, callErr error) error {
	pause := 50 * time.Millisecond
	for {
		err := l.tryEnd(ctx, c, f, answer, live, bod, callErr)
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil || errors.Is(err, journal.ErrClosed):
			err = dsec.Errorf(dsec.Unavailable, "the node is closing")
			l.strand(c, f, err)
			return err
		case errors.Is(err, journal.ErrFailed):
			l.strand(c, f, err)
			l.cfg.Fault(err)
			return err
		}
		l.cfg.Fault(err)
		select {
		case <-ctx.Done(): // one more try tells
		case <-time.After(pause):
		}
		pause = min(2*pause, time.Second)
	}
}

func (l *Log) tryEnd(ctx context.Context, c *chain, f *flight, answer json.RawMessage, live any, bod body, callErr error) error {
	h := &head{Op: f.op, Of: f.request, Answer: answer}
	h.setStep(f.step)
	if callErr != nil {
		h.Answer, h.Error = nil, &dsec.RecordError{Kind: dsec.KindOf(callErr).String(), Text: clipTo(callErr.Error(), maxErrorText)}
	} else {
		bod.describe(h)
	}
	c.mu.Lock()
	if _, open := c.open[f.request]; !open || c.over {
		// The end of the sandbox was recorded first; nothing comes behind it.
		c.mu.Unlock()
		if callErr == nil {
			callErr = dsec.Errorf(dsec.Conflict, "the sandbox has ended")
		}
		l.settle(c, f, nil, 0, callErr)
		return nil
	}
	entry, err := l.append(c, h, bod.inline)
	seq, grown := c.seq, c.bytes > l.cfg.SealBytes
	if err == nil {
		if c.unsynced == nil {
			c.unsynced = map[uint64]*flight{}
		}
		f.wrote, c.unsynced[f.request] = seq, f
	}
	c.mu.Unlock()
	if err != nil {
		return err
	}
	if err := l.cfg.Journal.Sync(ctx, entry); err != nil {
		return unwritable(err)
	}
	l.settle(c, f, live, seq, callErr)
	if grown {
		l.wake()
	}
	return nil
}

// strand ends a flight whose answer this process cannot make durable. Its step
// keeps it, so that whoever repeats it is told the same.
func (l *Log) strand(c *chain, f *flight, err error) {
	c.mu.Lock()
	f.err, f.lost = err, true
	c.mu.Unlock()
	close(f.done)
}

// settle ends a flight. A request that has no answer then is left for takeUp, or
// for the end of its sandbox.
func (l *Log) settle(c *chain, f *flight, live any, seq uint64, err error) {
	c.mu.Lock()
	delete(c.unsynced, f.request)
	if o, ok := c.open[f.request]; ok && o.flight == f {
		o.flight, o.broke = nil, true
		c.open[f.request] = o
	}
	if ref, ok := c.steps[f.step]; ok && ref.flight == f {
		ref.flight = nil
		c.steps[f.step] = ref
	}
	f.live, f.err = live, err
	if err == nil {
		f.answer = seq
	}
	c.mu.Unlock()
	close(f.done)
}

// note appends a record that is request and answer in one, or that nobody
// asked for.
func (l *Log) note(c *chain, h *head) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over {
		return nil
	}
	h.Alone = true
	_, err := l.append(c, h, nil)
	return err
}

// created begins a trajectory. A second call does nothing.
func (l *Log) created(sb dsec.Sandbox, who dsec.Who, from *lineage) error {
	spec, err := marshal(createParam{Spec: sb.Spec, Layers: sb.Layers, Node: sb.Node, Key: sb.Key, Origin: from})
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.chains[sb.ID] != nil || l.archived[sb.ID] != "" {
		return nil
	}
	c := newChain(sb.ID)
	c.who = dsec.Who{Project: sb.Spec.Project, Job: sb.Spec.Job}
	if _, err := l.append(c, &head{Op: dsec.RecordCreate, Alone: true, Project: sb.Spec.Project, Token: who.Token, Request: spec}, nil); err != nil {
		return err
	}
	l.chains[sb.ID] = c
	return nil
}

type createParam struct {
	Spec   dsec.Spec
	Layers []string `json:",omitempty"`
	Node   string
	Key    string   `json:",omitempty"`
	Origin *lineage `json:",omitempty"` // of a copy
}

// Ended closes the trajectory of a sandbox that ended: commands without an
// answer are interrupted, then comes the record of the end. It does not block
// on more than appends to the journal, and does nothing when called again.
func (l *Log) Ended(id dsec.SandboxID, state dsec.State, cause dsec.Cause, detail string) {
	c := l.chain(id)
	if c == nil {
		return
	}
	if err := l.close(c, state, cause, detail); err != nil {
		l.cfg.Fault(err)
		l.mu.Lock()
		l.unclosed[id] = endParam{state, cause, detail} // Tidy tries again
		l.mu.Unlock()
		return
	}
	if l.over.Add(c.size()) >= l.cfg.ArchiveBytes {
		l.wake()
	}
}

func (c *chain) size() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.bytes
}

func (l *Log) close(c *chain, state dsec.State, cause dsec.Cause, detail string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over {
		return nil
	}
	for seq, o := range c.open {
		if o.op != dsec.RecordCommand {
			continue
		}
		why := fmt.Sprintf("the sandbox ended (%s)", cause)
		p := c.partial[seq]
		a, err := marshal(commandAnswer{
			ID: p.id, Outcome: dsec.Interrupted, Code: 137, Detail: why, Ended: time.Now().UnixNano(),
			Stdout: stat(p.stdout), Stderr: stat(p.stderr),
		})
		if err != nil {
			return err
		}
		h := &head{Op: o.op, Of: seq, Answer: a}
		p.output.describe(h)
		if o.step.Session != hiddenSession {
			h.setStep(o.step)
		}
		if _, err := l.append(c, h, p.output.inline); err != nil {
			return err
		}
	}
	c.partial = nil
	p, err := marshal(endParam{state, cause, detail})
	if err != nil {
		return err
	}
	_, err = l.append(c, &head{Op: dsec.RecordEnd, Alone: true, Request: p}, nil)
	return err
}

type endParam struct {
	State  dsec.State
	Cause  dsec.Cause
	Detail string `json:",omitempty"`
}

// wake lets the archiver run soon.
func (l *Log) wake() {
	select {
	case l.full <- struct{}{}:
	default:
	}
}

// read gives a record as it is stored.
func (l *Log) read(ctx context.Context, id dsec.SandboxID, seq uint64) ([]byte, error) {
	for {
		c := l.chain(id)
		if c == nil {
			return l.readOld(ctx, id, seq)
		}
		c.mu.Lock()
		first, last := c.tailFirst(), c.seq
		var at journal.Place
		var seg blob.Digest
		if seq >= first && seq <= last {
			at = c.tail[seq-first]
		} else {
			seg = segmentOf(c.extents, seq)
		}
		c.mu.Unlock()
		switch {
		case seq == 0 || seq > last:
			return nil, dsec.Errorf(dsec.NotFound, "the trajectory has no record %d", seq)
		case seg != "":
			return l.indexes.record(ctx, seg, id, seq)
		}
		b, err := l.cfg.Journal.ReadAt(at)
		if errors.Is(err, journal.ErrGone) {
			if ctx.Err() != nil {
				return nil, context.Cause(ctx)
			}
			runtime.Gosched() // a checkpoint is about to say where it is now
			continue
		}
		return b, err
	}
}

// archivedSection finds the last part of an archived trajectory, and where it
// is.
func (l *Log) archivedSection(ctx context.Context, id dsec.SandboxID) (*section, blob.Digest, error) {
	l.mu.RLock()
	seg, ok := l.archived[id]
	l.mu.RUnlock()
	if !ok {
		return nil, "", errNoChain
	}
	s, err := l.ending(ctx, seg, id)
	if err == nil && s == nil {
		err = corrupt(seg, "it has no end of sandbox %s", id)
	}
	return s, seg, err
}

// ending finds the section of a segment that has the end of a sandbox.
func (l *Log) ending(ctx context.Context, seg blob.Digest, id dsec.SandboxID) (*section, error) {
	x, err := l.indexes.get(ctx, seg)
	if err != nil {
		return nil, err
	}
	for i := range x.Sections {
		if s := &x.Sections[i]; s.ID == id && s.Over {
			return s, nil
		}
	}
	return nil, nil
}

// oldSection finds the end of a trajectory wherever it is archived.
func (l *Log) oldSection(ctx context.Context, id dsec.SandboxID) (*section, blob.Digest, error) {
	s, seg, err := l.archivedSection(ctx, id)
	if errors.Is(err, errNoChain) {
		s, seg, err = l.foreignSection(ctx, id)
	}
	if errors.Is(err, errNoChain) {
		err = dsec.Errorf(dsec.NotFound, "sandbox %s has no trajectory here", clip(string(id)))
	}
	return s, seg, err
}

func (l *Log) readOld(ctx context.Context, id dsec.SandboxID, seq uint64) ([]byte, error) {
	s, seg, err := l.oldSection(ctx, id)
	if err != nil {
		return nil, err
	}
	if seq >= s.First && seq <= s.last() {
		return readRecord(ctx, l.cfg.Store, seg, s.At[seq-s.First])
	}
	if seg := segmentOf(s.Earlier, seq); seg != "" {
		return l.indexes.record(ctx, seg, id, seq)
	}
	return nil, dsec.Errorf(dsec.NotFound, "the trajectory has no record %d", seq)
}

var _ dsec.Trajectories = (*Log)(nil)

// Head gives the end of a trajectory.
func (l *Log) Head(ctx context.Context, id dsec.SandboxID) (dsec.Head, error) {
	if c := l.chain(id); c != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		return dsec.Head{Seq: c.seq, Hash: c.head.String(), Over: c.over}, nil
	}
	s, _, err := l.oldSection(ctx, id)
	if err != nil {
		return dsec.Head{}, err
	}
	return dsec.Head{Seq: s.last(), Hash: s.Head, Over: true}, nil
}

// Records yields a trajectory.
func (l *Log) Records(ctx context.Context, id dsec.SandboxID, after uint64) iter.Seq2[dsec.Record, error] {
	return func(yield func(dsec.Record, error) bool) {
		end, err := l.Head(ctx, id)
		if err != nil {
			yield(dsec.Record{}, err)
			return
		}
		for seq := after + 1; seq <= end.Seq; seq++ {
			b, err := l.read(ctx, id, seq)
			if err == nil {
				err = ctx.Err()
			}
			var r dsec.Record
			if err == nil {
				_, r, err = Decode(b)
			}
			if !yield(r, err) || err != nil {
				return
			}
		}
	}
}

// Body opens the body of a record.
func (l *Log) Body(ctx context.Context, id dsec.SandboxID, seq uint64) (io.ReadCloser, error) {
	b, err := l.read(ctx, id, seq)
	if err != nil {
		return nil, err
	}
	r, h, err := decode(b)
	if err != nil {
		return nil, err
	}
	return l.openBody(ctx, r, h)
}

func boottime() int64 {
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts) != nil {
		return 0
	}
	return ts.Nano()
}
