package rpc

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"net/http"
	"strconv"
	"strings"

	"connectrpc.com/connect/v2"

	"github.com/dsec-go/dsec"
)

// Answer is a ResponseWriter that follows what passes through it, so that
// whoever stands before a Handler, near or far, knows how a call ended: a
// stream has its status sent long before, and says in its last message or its
// trailers whether it failed. It passes flushes on.
type Answer struct {
	http.ResponseWriter
	status int
	sent   int64
	broken bool // the caller did not take it

	form  form
	head  [5]byte // of the present message of a stream: flags and length
	nhead int
	left  uint32 // of the present message
	last  []byte // the end message of a stream, or the body of an error
	ended bool
}

// form is how an answer says that it failed.
type form int

const (
	unaryForm    form       = iota // by its status, with the reason in its body
	streamForm                     // in its last message
	grpcWebForm                    // in the trailers, which are its last message
	grpcForm                       // in the trailers
	maxLast      = 64 << 10        // an end message is a few hundred bytes
	endOfStream  = 0b10
	endOfGRPCWeb = 0x80
)

// Follow gives w as an Answer.
func Follow(w http.ResponseWriter) *Answer { return &Answer{ResponseWriter: w} }

// Status is the answer's status of HTTP, 0 if there was none.
func (a *Answer) Status() int { return a.status }

// Sent is how many bytes its body had.
func (a *Answer) Sent() int64 { return a.sent }

// WriteHeader implements http.ResponseWriter.
func (a *Answer) WriteHeader(status int) {
	if a.status == 0 {
		a.begin(status)
	}
	a.ResponseWriter.WriteHeader(status)
}

// begin notes what the head of the answer says.
func (a *Answer) begin(status int) {
	a.status = status
	switch t := a.Header().Get("Content-Type"); {
	case strings.HasPrefix(t, "application/connect+"):
		a.form = streamForm
	case strings.HasPrefix(t, "application/grpc-web"):
		a.form = grpcWebForm
	case strings.HasPrefix(t, "application/grpc"):
		a.form = grpcForm
	}
}

// Write implements http.ResponseWriter.
func (a *Answer) Write(p []byte) (int, error) {
	if a.status == 0 {
		a.begin(http.StatusOK)
	}
	n, err := a.ResponseWriter.Write(p)
	a.sent += int64(n)
	a.broken = a.broken || err != nil
	switch {
	case a.form == streamForm:
		a.follow(p[:n], endOfStream)
	case a.form == grpcWebForm:
		a.follow(p[:n], endOfGRPCWeb)
	case a.form == unaryForm && a.status != http.StatusOK:
		a.keep(p[:n])
	}
	return n, err
}

// follow finds the end message: the one whose flags have the bit.
func (a *Answer) follow(p []byte, bit byte) {
	for len(p) > 0 {
		if a.nhead < len(a.head) {
			n := copy(a.head[a.nhead:], p)
			a.nhead += n
			p = p[n:]
			if a.nhead < len(a.head) {
				return
			}
			a.left = binary.BigEndian.Uint32(a.head[1:])
			a.ended = a.ended || a.head[0]&bit != 0
		}
		n := min(int64(a.left), int64(len(p)))
		if a.head[0]&bit != 0 {
			a.keep(p[:n])
		}
		a.left -= uint32(n)
		p = p[n:]
		if a.left == 0 {
			a.nhead = 0
		}
	}
}

func (a *Answer) keep(p []byte) {
	a.last = append(a.last, p[:min(len(p), maxLast-len(a.last))]...)
}

// Served says that the handler has returned. One that wrote nothing has
// answered with an empty body, which is what an empty message is.
func (a *Answer) Served() {
	if a.status == 0 {
		a.begin(http.StatusOK)
	}
}

// Flush implements http.Flusher.
func (a *Answer) Flush() {
	if f, ok := a.ResponseWriter.(http.Flusher); ok {
		f.Flush()
	}
}

// Unwrap lets http.ResponseController reach the connection.
func (a *Answer) Unwrap() http.ResponseWriter { return a.ResponseWriter }

// Failure gives how the call failed, once it has been served; ok is true if it
// did not. An answer without an end is blamed on the end of ctx, the call's,
// else on the node.
func (a *Answer) Failure(ctx context.Context) (kind dsec.ErrorKind, ok bool) {
	switch {
	case a.form == unaryForm && a.status == http.StatusOK && !a.broken:
		return 0, true
	case a.form == unaryForm && a.status != 0 && a.status != http.StatusOK:
		return a.unaryKind(), false
	case a.form == streamForm && a.ended:
		var end struct {
			Error *struct{ Code connect.Code }
		}
		if err := json.Unmarshal(a.last, &end); err != nil {
			return dsec.Internal, false
		}
		if end.Error == nil {
			return 0, true
		}
		return KindOf(end.Error.Code), false
	case a.form == grpcWebForm || a.form == grpcForm:
		if code, found := a.grpcStatus(); found {
			return KindOf(code), code == 0
		}
	}
	if ctx.Err() != nil {
		return dsec.KindOf(context.Cause(ctx)), false
	}
	return dsec.Unavailable, false
}

// unaryKind reads the body of an error; what is none of ours goes by status.
func (a *Answer) unaryKind() dsec.ErrorKind {
	var body struct{ Code connect.Code }
	if json.Unmarshal(a.last, &body) == nil && body.Code != 0 {
		return KindOf(body.Code)
	}
	switch {
	case a.status == http.StatusNotFound || a.status == http.StatusMethodNotAllowed:
		return dsec.NotFound
	case a.status >= 400 && a.status < 500:
		return dsec.Invalid
	}
	return dsec.Internal
}

// grpcStatus finds the code among the trailers, or in the head of an answer
// that has nothing else.
func (a *Answer) grpcStatus() (connect.Code, bool) {
	const key = "Grpc-Status"
	h := a.Header()
	text := h.Get(key)
	if v := h[http.TrailerPrefix+key]; len(v) > 0 { // not Get: the prefix has a colon
		text = v[0]
	}
	for line := range bytes.Lines(a.last) {
		if k, v, ok := strings.Cut(string(line), ":"); ok && strings.EqualFold(k, key) {
			text = strings.TrimSpace(v)
		}
	}
	n, err := strconv.ParseUint(text, 10, 8)
	return connect.Code(n), err == nil
}
