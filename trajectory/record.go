package trajectory

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/dsec-go/dsec"
)

// FormatVersion is that of records and segments. Another one is refused by name.
const FormatVersion = 1

// maxInline is the largest body that lies in its record.
const maxInline = 32 << 10

// linkHash is the SHA-256 of a record.
type linkHash [sha256.Size]byte

func (h linkHash) String() string { return hex.EncodeToString(h[:]) }

// origin is what the first record of a sandbox carries as the one before.
func origin(id dsec.SandboxID) linkHash {
	return sha256.Sum256([]byte("dsec trajectory of " + string(id)))
}

// head is the part of a record that is JSON. Its names are short because there
// are thousands of them for every sandbox.
type head struct {
	Seq     uint64            `json:"n"`
	Time    int64             `json:"t"` // nanoseconds since 1970
	Mono    int64             `json:"m"` // nanoseconds since boot
	Op      dsec.RecordOp     `json:"op"`
	Of      uint64            `json:"of,omitempty"`
	Alone   bool              `json:"alone,omitempty"` // request and answer in one
	Project dsec.ProjectID    `json:"p,omitempty"`
	Token   string            `json:"k,omitempty"`
	Job     dsec.JobID        `json:"j,omitempty"`
	Session string            `json:"ss,omitempty"`
	Step    uint64            `json:"sn,omitempty"`
	Request json.RawMessage   `json:"q,omitempty"`
	Answer  json.RawMessage   `json:"a,omitempty"`
	Error   *dsec.RecordError `json:"e,omitempty"`
	Body    string            `json:"b,omitempty"`
	Size    int64             `json:"z,omitempty"`
	Blob    string            `json:"d,omitempty"`
}

func (h *head) step() dsec.Step { return dsec.Step{Session: h.Session, Number: h.Step} }

func (h *head) setStep(s dsec.Step) { h.Session, h.Step = s.Session, s.Number }

// The layout of a record: version (1 byte), hash of the record before (32),
// length of the sandbox's ID (1), the ID, length of the head (4, little-endian),
// the head, and the body to the end.
const fixedBytes = 1 + sha256.Size + 1 + 4

var errMalformed = errors.New("malformed record")

// encode gives a record's bytes. body is the inline body.
func encode(id dsec.SandboxID, prev linkHash, h *head, body []byte) ([]byte, error) {
	j, err := marshal(h)
	if err != nil {
		return nil, fmt.Errorf("encode record: %w", err)
	}
	b := make([]byte, 0, fixedBytes+len(id)+len(j)+len(body))
	b = append(b, FormatVersion)
	b = append(b, prev[:]...)
	b = append(b, byte(len(id)))
	b = append(b, id...)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(j)))
	b = append(b, j...)
	return append(b, body...), nil
}

// raw is a record taken apart; all of it lies in the bytes it was made from.
type raw struct {
	id   dsec.SandboxID
	prev linkHash
	head []byte
	body []byte
}

func split(b []byte) (r raw, err error) {
	if len(b) < fixedBytes {
		return raw{}, fmt.Errorf("%w: %d bytes", errMalformed, len(b))
	}
	if b[0] != FormatVersion {
		return raw{}, fmt.Errorf("record of format %d, this build reads %d", b[0], FormatVersion)
	}
	copy(r.prev[:], b[1:])
	b = b[1+len(r.prev):]
	n := int(b[0])
	if b = b[1:]; len(b) < n+4 {
		return raw{}, fmt.Errorf("%w: its sandbox is cut off", errMalformed)
	}
	r.id = dsec.SandboxID(b[:n])
	size := binary.LittleEndian.Uint32(b[n:])
	if b = b[n+4:]; uint64(len(b)) < uint64(size) {
		return raw{}, fmt.Errorf("%w: its head is cut off", errMalformed)
	}
	r.head, r.body = b[:size], b[size:]
	return r, nil
}

// decode reads the head of a record.
func decode(b []byte) (raw, *head, error) {
	r, err := split(b)
	if err != nil {
		return raw{}, nil, err
	}
	h := new(head)
	if err := json.Unmarshal(r.head, h); err != nil {
		return raw{}, nil, fmt.Errorf("%w: %w", errMalformed, err)
	}
	if h.Seq == 0 || h.Op == "" || h.Of >= h.Seq || h.Size < 0 {
		return raw{}, nil, fmt.Errorf("%w: number %d, operation %q, answer of %d", errMalformed, h.Seq, h.Op, h.Of)
	}
	return r, h, nil
}

// Decode reads a record as it is stored. The bytes become part of it.
func Decode(b []byte) (dsec.SandboxID, dsec.Record, error) {
	r, h, err := decode(b)
	if err != nil {
		return "", dsec.Record{}, err
	}
	return r.id, h.record(r, b), nil
}

func (h *head) record(r raw, b []byte) dsec.Record {
	return dsec.Record{
		Seq: h.Seq, Time: time.Unix(0, h.Time).UTC(), Mono: time.Duration(h.Mono), Op: h.Op, Of: h.Of, Alone: h.Alone,
		Who:  dsec.Who{Project: h.Project, Token: h.Token, Job: h.Job},
		Step: h.step(), Request: h.Request, Answer: h.Answer, Error: h.Error,
		Body: h.Body, Size: h.Size, Blob: h.Blob,
		Prev: r.prev.String(), Hash: linkHash(sha256.Sum256(b)).String(), Raw: b,
	}
}

// Verifier checks a trajectory record by record, first to last.
type Verifier struct {
	id   dsec.SandboxID
	seq  uint64
	prev linkHash
}

// NewVerifier begins the check of a sandbox's trajectory.
func NewVerifier(id dsec.SandboxID) *Verifier { return &Verifier{id: id, prev: origin(id)} }

// Add checks the next record as it is stored. The error names the number at
// which the chain is broken: one altered shows at itself or at the one behind.
func (v *Verifier) Add(b []byte) error {
	r, h, err := decode(b)
	switch {
	case err != nil:
		return fmt.Errorf("record %d: %w", v.seq+1, err)
	case r.id != v.id:
		return fmt.Errorf("record %d is of sandbox %s", v.seq+1, clip(string(r.id)))
	case h.Seq != v.seq+1:
		return fmt.Errorf("record %d is followed by record %d", v.seq, h.Seq)
	case r.prev != v.prev:
		return fmt.Errorf("record %d does not follow from record %d: one of them was changed", h.Seq, v.seq)
	}
	v.seq, v.prev = h.Seq, sha256.Sum256(b)
	return nil
}

// End compares what was added with the end of the trajectory.
func (v *Verifier) End(h dsec.Head) error {
	switch {
	case v.seq < h.Seq:
		return fmt.Errorf("records %d to %d are missing at the end", v.seq+1, h.Seq)
	case v.seq > h.Seq:
		return fmt.Errorf("record %d is beyond the end at %d", v.seq, h.Seq)
	case v.prev.String() != h.Hash:
		return fmt.Errorf("record %d, the last, was changed", v.seq)
	}
	return nil
}

// answersStep reports whether a repetition of the request gets h's answer.
func (h *head) answersStep() bool { return h.Error == nil }

// diverged compares a recorded request with one asked now, field by field, and
// is nil if they are the same.
func diverged(step dsec.Step, opThen, opNow dsec.RecordOp, then, now json.RawMessage) error {
	if opThen != opNow {
		return divergence(step, "operation", string(opThen), string(opNow))
	}
	if bytes.Equal(then, now) {
		return nil
	}
	var a, b map[string]json.RawMessage
	if json.Unmarshal(then, &a) != nil || json.Unmarshal(now, &b) != nil {
		return divergence(step, "request", string(then), string(now))
	}
	for _, name := range sortedKeys(a, b) {
		if !bytes.Equal(a[name], b[name]) {
			return divergence(step, name, spoken(name, a[name]), spoken(name, b[name]))
		}
	}
	return nil
}

// spoken gives the value of a request's member to be read: durations are
// recorded as nanoseconds.
func spoken(name string, value json.RawMessage) string {
	switch name {
	case "timeout", "idle", "ttl":
		var d time.Duration
		if json.Unmarshal(value, &d) == nil {
			return d.String()
		}
	}
	return string(value)
}

func divergence(step dsec.Step, field, then, now string) error {
	if then == "" {
		then = "nothing"
	}
	if now == "" {
		now = "nothing"
	}
	return dsec.Errorf(dsec.Diverged, "step %d of session %q differs from its record in %q: recorded %s, asked %s",
		step.Number, clip(step.Session), field, clip(then), clip(now))
}
