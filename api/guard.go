package api

import (
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
)

// cutGrace is how long a call whose token has ended may take to say so.
const cutGrace = 2 * time.Second

// guard ends a call whose token is revoked or expires while it is under way: an
// attached reader or a forwarded port would else outlive its token by days.
type guard struct {
	h      *Handler
	w      http.ResponseWriter
	secret string
	ctx    context.Context // of the call
	cancel context.CancelCauseFunc

	mu    sync.Mutex
	timer *time.Timer
	left  bool // w is not to be touched any more
}

// guard gives the guard of a call that was let in; its leave is called at the
// end of the call.
func (h *Handler) guard(ctx context.Context, w http.ResponseWriter, secret string) *guard {
	g := &guard{h: h, w: w, secret: secret}
	g.ctx, g.cancel = context.WithCancelCause(ctx)
	g.mu.Lock()
	defer g.mu.Unlock()
	g.timer = time.AfterFunc(h.cfg.Recheck, g.check)
	return g
}

// check looks the token up again. One that could not be looked up is as good as
// before.
func (g *guard) check() {
	_, err := g.h.cfg.Auth.Authenticate(g.ctx, g.secret)
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case g.left:
		return
	case err == nil || dsec.KindOf(err) != dsec.Unauthenticated:
		g.timer.Reset(g.h.cfg.Recheck)
		return
	}
	g.cancel(err)
	// What waits for a caller that sends nothing, or that takes nothing, does
	// not see the end of its context.
	c := http.NewResponseController(g.w)
	_ = c.SetReadDeadline(time.Now())
	_ = c.SetWriteDeadline(time.Now().Add(cutGrace))
}

// leave ends the guard. The context ends with that of the request.
func (g *guard) leave() {
	g.mu.Lock()
	g.left = true
	g.timer.Stop()
	g.mu.Unlock()
}
