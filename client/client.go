// Package client is the Go SDK: Open gives the services of a server that speaks
// dsec.v1, as the same interfaces that a node in this process has.
//
//	s, err := client.Open(client.Config{URL: "http://127.0.0.1:7070", Token: secret})
//	box, err := s.Sandboxes.Create(ctx, dsec.Spec{Environment: dsec.Environment{Base: "debian"}}, dsec.CreateOptions{})
//	out, err := s.Commands.Run(ctx, dsec.Call{Sandbox: box.ID}, dsec.Command{Shell: "make test"}, nil)
//
// What it does not do: it reads no environment and no files, keeps nothing, and
// decides nothing that the server decides. It imports rpc and dsec only.
//
// Invariants:
//   - A call is repeated only where that cannot do a thing twice: it never
//     reached the server, it only reads, its repetition has no further effect,
//     or it has a key or a step. Create always has a key.
//   - Every error is a *dsec.Error; one of the server's carries its request id.
//   - Attach and Wait outlive dropped connections; Attach goes on at the next
//     byte.
//   - A stream that ends early is an error, never an end.
//   - Cancelling the context ends any call at once, save one that blocks in the
//     caller's own io.Reader.
//
// Read next: package rpc.
package client

import (
	"cmp"
	"context"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

// Config says where the server is. Only URL is required.
type Config struct {
	URL   string // "http://host:port", with a path if the server is below one
	Token string // secret sent with every call

	// Epoch of the job whose owner this client is: every call that has none of its own
	// carries it, and is fenced by a later owner. 0 means no owner's.
	Epoch uint64

	// Transport carries the requests; default one of its own over HTTP/1.1, or
	// HTTP/2 where TLS offers it.
	Transport http.RoundTripper

	// Retry is how long a call that is safe to repeat is repeated while there is
	// no answer; default 2 s. An Attach or Wait that was under way is repeated
	// fifteen times as long. Negative means never.
	Retry time.Duration

	Agent string // names the program to the server; default dsec/VERSION
}

// Limits of the transport that Open makes.
const (
	dialTimeout = 5 * time.Second
	idleConns   = 256
	idleTimeout = 30 * time.Second // shorter than any server's, so that it is not the server who closes
)

// NewTransport gives the transport that a Config without one uses. A caller that
// wants to close its connections makes it, passes it and closes it.
func NewTransport() *http.Transport {
	return &http.Transport{
		Proxy:               http.ProxyFromEnvironment,
		DialContext:         (&net.Dialer{Timeout: dialTimeout, KeepAlive: 15 * time.Second}).DialContext,
		ForceAttemptHTTP2:   true,
		DisableCompression:  true,
		MaxIdleConns:        idleConns,
		MaxIdleConnsPerHost: idleConns,
		IdleConnTimeout:     idleTimeout,
		TLSHandshakeTimeout: dialTimeout,
		WriteBufferSize:     64 << 10,
		ReadBufferSize:      64 << 10,
	}
}

// Open gives the services of the server that c names. It makes no call. A
// malformed URL is Invalid.
func Open(c Config) (dsec.Services, error) {
	u, err := url.Parse(c.URL)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" {
		return dsec.Services{}, dsec.Errorf(dsec.Invalid, "server URL %q is not http://HOST:PORT or https://HOST", c.URL)
	}
	if c.Transport == nil {
		c.Transport = NewTransport()
	}
	if c.Retry == 0 {
		c.Retry = 2 * time.Second
	}
	if c.Agent == "" {
		c.Agent = "dsec/" + dsec.Version
	}
	transport := connecthttp.NewTransport(doer{&http.Client{Transport: c.Transport}}, c.URL,
		connecthttp.WithCompressors(),
		connecthttp.WithReadMaxBytes(0)) // a long listing is one message; the server is trusted
	rc := connect.NewClient(transport)
	core := &core{token: c.Token, agent: c.Agent, epoch: c.Epoch, retry: c.Retry}
	return dsec.Services{
		Sandboxes:    &sandboxes{core, dsecv1.NewSandboxesClient(rc)},
		Snapshots:    &snapshots{core, dsecv1.NewSnapshotsClient(rc)},
		Screens:      &screens{core, dsecv1.NewScreensClient(rc)},
		Commands:     &commands{core, dsecv1.NewCommandsClient(rc)},
		Files:        &files{core, dsecv1.NewFilesClient(rc)},
		Ports:        &ports{core, dsecv1.NewPortsClient(rc)},
		Images:       &images{core, dsecv1.NewImagesClient(rc)},
		Jobs:         &jobs{core, dsecv1.NewJobsClient(rc)},
		Functions:    &functions{core, dsecv1.NewFunctionsClient(rc)},
		Trajectories: &trajectories{core, dsecv1.NewTrajectoriesClient(rc)},
		Tokens:       &tokens{core, dsecv1.NewTokensClient(rc)},
		Projects:     &projects{core, dsecv1.NewProjectsClient(rc)},
		Nodes:        &nodes{core, dsecv1.NewNodesClient(rc)},
	}, nil
}

// core is what the services share.
type core struct {
	token string
	agent string
	epoch uint64
	retry time.Duration
}

// to names one call: for errors, for routing, and whether it can be repeated.
type to struct {
	op      string
	sandbox dsec.SandboxID
	step    dsec.Step
	epoch   uint64
	key     string
	again   bool // repeating it has no further effect
}

// on names a call in a sandbox. It can be repeated if it has a step.
func on(op string, c dsec.Call) to {
	return to{op: op, sandbox: c.Sandbox, step: c.Step, epoch: c.Epoch, again: !c.Step.IsZero()}
}

// repeatable says that repeating the call has no further effect.
func (t to) repeatable() to {
	t.again = true
	return t
}

// headers gives a context whose calls carry the headers of t.
func (c *core) headers(ctx context.Context, t to) context.Context {
	ctx, info := connect.NewClientContext(ctx)
	h := info.RequestHeader()
	h.Set("User-Agent", c.agent)
	if c.token != "" {
		h.Set(rpc.HeaderAuth, "Bearer "+c.token)
	}
	if t.sandbox != "" {
		h.Set(rpc.HeaderSandbox, string(t.sandbox))
	}
	if !t.step.IsZero() {
		h.Set(rpc.HeaderStep, rpc.StepText(t.step))
	}
	if epoch := cmp.Or(t.epoch, dsec.EpochFrom(ctx), c.epoch); epoch != 0 {
		h.Set(rpc.HeaderEpoch, strconv.FormatUint(epoch, 10))
	}
	if t.key != "" {
		h.Set(rpc.HeaderKey, rpc.KeyText(t.key))
	}
	return ctx
}

// check refuses what cannot be a header, before a call is made of it.
func (t to) check() error {
	for i := 0; i < len(t.sandbox); i++ {
		if c := t.sandbox[i]; c <= ' ' || c >= 0x7f {
			return dsec.WithOp(t.op, "", dsec.Errorf(dsec.NotFound, "no sandbox has the id %q", t.sandbox[:min(len(t.sandbox), 64)]))
		}
	}
	return nil
}

// unary makes one call, again and again while that is safe and there is no
// answer.
func unary[Q, A any](ctx context.Context, c *core, t to, f func(context.Context, *Q) (*A, error), q *Q) (*A, error) {
	if err := t.check(); err != nil {
		return nil, err
	}
	p := c.patience(t)
	for {
		a, err := f(c.headers(ctx, t), q)
		if err == nil {
			return a, nil
		}
		err = rpc.CallError(ctx, t.op, t.sandbox, err)
		if !p.again(ctx, err) {
			return nil, err
		}
	}
}
