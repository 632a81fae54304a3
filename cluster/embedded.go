package cluster

import (
	"context"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"sync"

	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// EmbeddedOptions say how an embedded etcd runs.
type EmbeddedOptions struct {
	Dir string       // its data; made with mode 0700
	Log *slog.Logger // gets its warnings; nil drops them
}

// Embedded is an etcd of one member inside this process. It listens on a Unix socket in its
// folder and nowhere else: etcd has no passwords here, so only who may enter the folder may ask.
type Embedded struct {
	etcd   *embed.Etcd
	socket string
	handle *os.File // keeps a short path to the folder alive, if one is needed
	once   sync.Once
}

// maxSocketPath is what the kernel takes for the path of a Unix socket.
const maxSocketPath = 107

// StartEmbedded starts an etcd and returns when it answers.
func StartEmbedded(ctx context.Context, o EmbeddedOptions) (_ *Embedded, err error) {
	dir, err := filepath.Abs(o.Dir)
	if err != nil {
		return nil, fmt.Errorf("start etcd: %w", err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("start etcd: %w", err)
	}
	e := &Embedded{socket: filepath.Join(dir, "etcd.sock")}
	if len(e.socket) > maxSocketPath {
		if e.handle, err = os.Open(dir); err != nil {
			return nil, fmt.Errorf("start etcd: %w", err)
		}
		// Good in this process only, and that is who asks.
		e.socket = fmt.Sprintf("/proc/self/fd/%d/etcd.sock", e.handle.Fd())
	}
	if e.etcd, err = embed.StartEtcd(e.config(dir, o.Log)); err != nil {
		e.Close()
		return nil, fmt.Errorf("start etcd in %s: %w", dir, err)
	}
	select {
	case <-e.etcd.Server.ReadyNotify():
		return e, nil
	case err = <-e.etcd.Err():
	case <-e.etcd.Server.StopNotify():
		err = fmt.Errorf("it stopped")
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	e.Close()
	return nil, fmt.Errorf("start etcd in %s: %w", dir, err)
}

func (e *Embedded) config(dir string, log *slog.Logger) *embed.Config {
	c := embed.NewConfig()
	c.Name = "dsec"
	c.Dir = filepath.Join(dir, "data")
	c.ListenClientUrls = []url.URL{{Scheme: "unix", Path: e.socket}}
	c.AdvertiseClientUrls = c.ListenClientUrls
	// One member talks to no other: no listener. The URL is only its name in the member list.
	c.ListenPeerUrls = nil
	c.AdvertisePeerUrls = []url.URL{{Scheme: "http", Host: "127.0.0.1:1"}}
	c.InitialCluster = c.Name + "=" + c.AdvertisePeerUrls[0].String()
	c.EnableGRPCGateway = false

	// The state is a few megabytes; the defaults are for far more.
	c.SnapshotCount = 5000
	c.SnapshotCatchUpEntries = 500
	c.MaxSnapFiles, c.MaxWalFiles = 2, 2
	c.AutoCompactionMode, c.AutoCompactionRetention = "revision", "1000"
	c.QuotaBackendBytes = 1 << 30

	core := zapcore.NewNopCore()
	if log != nil {
		core = slogCore{log: log}
	}
	c.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.New(core))
	c.LogLevel = "warn"
	return c
}

// Endpoints returns where it listens, for Open in the same process.
func (e *Embedded) Endpoints() []string { return []string{"unix://" + e.socket} }

// Close stops etcd and waits for its end. It may be called twice.
func (e *Embedded) Close() {
	e.once.Do(func() {
		if e.etcd != nil {
			e.etcd.Close()
		}
		if e.handle != nil {
			e.handle.Close()
		}
	})
}

// slogCore hands warnings of etcd to slog.
type slogCore struct {
	log    *slog.Logger
	fields []zapcore.Field
}

func (c slogCore) Enabled(l zapcore.Level) bool { return l >= zapcore.WarnLevel }

func (c slogCore) With(fields []zapcore.Field) zapcore.Core {
	return slogCore{c.log, append(c.fields[:len(c.fields):len(c.fields)], fields...)}
}

func (c slogCore) Check(e zapcore.Entry, ce *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) {
		return ce.AddCore(e, c)
	}
	return ce
}

func (c slogCore) Write(e zapcore.Entry, fields []zapcore.Field) error {
	enc := zapcore.NewMapObjectEncoder()
	for _, f := range append(c.fields[:len(c.fields):len(c.fields)], fields...) {
		f.AddTo(enc)
	}
	level := slog.LevelWarn
	if e.Level >= zapcore.ErrorLevel {
		level = slog.LevelError
	}
	attrs := make([]any, 0, 2*len(enc.Fields))
	for k, v := range enc.Fields {
		attrs = append(attrs, k, v)
	}
	c.log.Log(context.Background(), level, "etcd: "+e.Message, slog.Group("etcd", attrs...))
	return nil
}

func (c slogCore) Sync() error { return nil }
