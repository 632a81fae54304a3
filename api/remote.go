package api

import (
	"context"
	"crypto/subtle"
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/client"
	"github.com/dsec-go/dsec/rpc"
)

// The headers by which a front door tells a node of another process who calls.
// They count only beside the right secret.
const (
	headerPeer    = "Dsec-Peer"
	headerProject = "Dsec-Caller-Project"
	headerToken   = "Dsec-Caller-Token"
	headerAdmin   = "Dsec-Caller-Admin"
)

// Remote is a node of another process.
type Remote struct {
	Name   string
	Number uint16
	URL    string
	Secret string // of the cluster; the node's Trust has the same

	// Fault is told why the node did not answer, which the caller is not: it
	// names addresses. It may be nil.
	Fault func(node string, err error)
}

// Open gives the node. Its connections are closed by the function that comes
// with it.
func (r Remote) Open() (Node, func(), error) {
	u, err := url.Parse(r.URL)
	if err != nil {
		return Node{}, nil, dsec.Errorf(dsec.Invalid, "node URL %q: %v", r.URL, err)
	}
	plain, multiplexed := client.NewTransport(), client.NewTransport()
	multiplexed.Protocols = new(http.Protocols)
	multiplexed.Protocols.SetUnencryptedHTTP2(true)
	multiplexed.Protocols.SetHTTP2(true)
	t := &transport{secret: r.Secret, plain: plain, grpc: multiplexed}
	s, err := client.Open(client.Config{URL: r.URL, Transport: t})
	if err != nil {
		return Node{}, nil, err
	}
	closing := func() {
		plain.CloseIdleConnections()
		multiplexed.CloseIdleConnections()
	}
	return Node{Name: r.Name, Number: r.Number, Handler: t.proxy(u, r), Services: s}, closing, nil
}

// transport adds who calls to each request.
type transport struct {
	secret string
	plain  http.RoundTripper
	grpc   http.RoundTripper // gRPC has no HTTP/1.1
}

// RoundTrip implements http.RoundTripper.
func (t *transport) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set(headerPeer, t.secret)
	if c, ok := dsec.CallerFrom(r.Context()); ok {
		r.Header.Set(headerProject, rpc.KeyText(string(c.Project)))
		r.Header.Set(headerToken, rpc.KeyText(c.Token))
		if c.Admin {
			r.Header.Set(headerAdmin, "1")
		}
	}
	if id := rpc.RequestID(r.Context()); id != "" {
		r.Header.Set(rpc.HeaderRequest, id)
	}
	if strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc") {
		return t.grpc.RoundTrip(r)
	}
	return t.plain.RoundTrip(r)
}

// proxy relays calls byte by byte.
func (t *transport) proxy(u *url.URL, node Remote) http.Handler {
	relay := &httputil.ReverseProxy{
		Rewrite: func(p *httputil.ProxyRequest) {
			p.SetURL(u)
			p.Out.Header.Set("User-Agent", p.In.UserAgent())
		},
		Transport:     t,
		FlushInterval: -1, // a stream's message is passed on when it comes
		BufferPool:    relayBuffers{},
		ErrorLog:      log.New(io.Discard, "", 0), // an answer that breaks off is told to Events.Access
		ModifyResponse: func(r *http.Response) error {
			// The node was told the id of the request; it is set once.
			if id := r.Request.Header.Get(rpc.HeaderRequest); id != "" {
				r.Header.Set(rpc.HeaderRequest, id)
			}
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			kind := dsec.Unavailable
			if node.Fault != nil {
				node.Fault(node.Name, err)
			}
			text := errNode
			if r.Context().Err() != nil {
				kind = dsec.KindOf(context.Cause(r.Context()))
				if why, ok := errors.AsType[*dsec.Error](context.Cause(r.Context())); ok {
					text = why.Err // the guard's reason
				}
			}
			rpc.WriteError(w, r, rpc.RequestIDOr(r.Header.Get(rpc.HeaderRequest)),
				&dsec.Error{Op: "api.Relay", Kind: kind, Sandbox: dsec.SandboxID(r.Header.Get(rpc.HeaderSandbox)), Err: text})
		},
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// A node may answer before the relay has read the end of the request. A
		// server of HTTP/1 would then read and close the request's body itself, and
		// the connection to the node would be closed for it, in the middle of the
		// answer. HTTP/2 needs no leave for this and knows no such call.
		_ = http.NewResponseController(w).EnableFullDuplex()
		relay.ServeHTTP(w, r)
	})
}

var errNode = dsec.Errorf(dsec.Unavailable, "the node does not answer").Err

// relayBuffers are the buffers of the proxy.
type relayBuffers struct{}

var relayPool = sync.Pool{New: func() any {
	b := make([]byte, 64<<10)
	return &b
}}

// Get implements httputil.BufferPool.
func (relayBuffers) Get() []byte { return *relayPool.Get().(*[]byte) }

// Put implements httputil.BufferPool.
func (relayBuffers) Put(b []byte) { relayPool.Put(&b) }

// Trust stands before a node's handler in a process of its own: a request with
// the cluster's secret is served for the caller that it names, any other is
// Unauthenticated.
func Trust(secret string, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if secret == "" || subtle.ConstantTimeCompare([]byte(r.Header.Get(headerPeer)), []byte(secret)) != 1 {
			rpc.WriteError(w, r, rpc.RequestIDOr(r.Header.Get(rpc.HeaderRequest)), dsec.Errorf(dsec.Unauthenticated, "this address is for front doors of the cluster"))
			return
		}
		ctx, err := callerOf(r)
		if err != nil {
			rpc.WriteError(w, r, rpc.RequestIDOr(r.Header.Get(rpc.HeaderRequest)), err)
			return
		}
		next.ServeHTTP(w, r.WithContext(ctx))
	})
}

// callerOf reads who calls. A request without a token's name is the cluster's
// own.
func callerOf(r *http.Request) (context.Context, error) {
	if len(r.Header.Values(headerToken)) == 0 {
		return r.Context(), nil
	}
	project, err := rpc.ParseKey(r.Header.Get(headerProject))
	if err != nil {
		return nil, err
	}
	token, err := rpc.ParseKey(r.Header.Get(headerToken))
	if err != nil {
		return nil, err
	}
	return dsec.WithCaller(r.Context(), dsec.Caller{
		Project: dsec.ProjectID(project), Token: token, Admin: r.Header.Get(headerAdmin) == "1",
	}), nil
}
