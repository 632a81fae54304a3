package main

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/dsec-go/dsec"
)

// Where a node serves and what it keeps, unless told otherwise.
const (
	defaultListen = "127.0.0.1:7070"
	defaultData   = "/var/lib/dsec"
)

// upCmd runs a node.
type upCmd struct {
	Data      string   `help:"Folder for everything the node keeps." default:"/var/lib/dsec" placeholder:"DIR"`
	Listen    string   `help:"Address to serve at; port 0 takes a free one." default:"127.0.0.1:7070" placeholder:"ADDRESS"`
	Name      string   `help:"Name of the node (default the host's)." placeholder:"NAME"`
	Guest     string   `help:"The dsec-guest program (default the one beside this program)." placeholder:"FILE"`
	Verbose   bool     `short:"v" help:"Log every sandbox."`
	Detach    bool     `short:"d" help:"Return when the node is healthy; it runs on, its log is up.log in the data folder, and beyond 16 MiB up.log.1."`
	Record    bool     `help:"Record what is asked of sandboxes and what they answer; without it no step is answered after a crash." default:"true" negatable:""`
	Swap      byteSize `help:"Make this much swap in the data folder, so that paused sandboxes give their memory back; dsec down removes it (default: what the host has)." placeholder:"SIZE" positive:""`
	Store     string   `help:"Where layers lie: file:///FOLDER on a mount, or s3://BUCKET/PREFIX?endpoint=URL, with keys from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a file; docs/stores.md has all (default in the data folder)." placeholder:"URL"`
	Cache     byteSize `help:"How much of such a store the node keeps (default a quarter of the data folder's file system)." placeholder:"SIZE" needs:"store" positive:""`
	Warm      string   `help:"How many machines are kept ready before anybody asks, as KIND=COUNT[,...]: container (default 8), microvm (booted when the node starts; default 2 from the first create on), fullvm (images kept as they are after their boot; default 2)." placeholder:"KINDS"`
	Snapshots string   `help:"Folder for snapshots, which several nodes may share: each finds those of the others by their IDs (default in the data folder)." placeholder:"DIR"`
	ReadyFD   int      `name:"ready-fd" hidden:""`
}

// Help says what is left and what is found again.
func (c *upCmd) Help() string {
	return `Everything runs in this one process: the front door, the node and their store.
Ctrl-C ends the process and leaves the sandboxes running; the next dsec up finds
them again. dsec down ends both. A context file under the user's configuration
folder lets the other commands of this account find the server.

  dsec up --detach   # returns when the node serves; dsec down ends it`
}

// Run runs the node until it is interrupted or taken down.
func (c *upCmd) Run(ctx context.Context, a *app) error {
	if os.Geteuid() != 0 {
		return dsec.Errorf(dsec.Denied, "a node makes namespaces and mounts: run it as root")
	}
	if _, err := openStore(Up{Data: c.Data, Store: c.Store, Cache: int64(c.Cache)}); err != nil {
		return err
	}
	warm, err := parseWarmth(c.Warm)
	if err != nil {
		return err
	}
	if c.Detach {
		return c.detach(ctx, a)
	}
	if c.ReadyFD > 0 {
		syscall.CloseOnExec(c.ReadyFD)
	}
	path, err := a.contextPath()
	if err != nil {
		a.warn(fmt.Errorf("no context file is written: %w", err))
	}
	level := slog.LevelInfo
	if c.Verbose {
		level = slog.LevelDebug
	}
	// A second signal ends the process at once: the sandboxes do not mind.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	signals, unnotify := a.Notify(os.Interrupt, syscall.SIGTERM)
	go func() {
		select {
		case <-signals:
			cancel()
		case <-ctx.Done():
		}
		unnotify()
	}()
	if c.ReadyFD > 0 { // detached: its output is the log
		go boundUpLog(ctx, filepath.Join(c.Data, upLog), func(err error) { a.warn(err) })
	}
	up := Up{
		Data: c.Data, Listen: c.Listen, Name: c.Name, Guest: c.Guest, Context: path,
		Log: newLog(a.Stderr, level), Unrecorded: !c.Record, Swap: int64(c.Swap), Snapshots: c.Snapshots, Warm: warm,
		Store: c.Store, Cache: int64(c.Cache),
		Ready: func(r Ready) {
			fmt.Fprintf(a.Stdout, "dsec %s serves at %s, data in %s; Ctrl-C leaves sandboxes running\n", dsec.Version, r.URL, r.Data)
			c.tell(r.URL)
		},
	}
	left, err := up.Run(ctx)
	if err != nil {
		return err
	}
	switch {
	case left < 0:
		fmt.Fprintln(a.Stdout, "dsec: the node was taken down")
	case left == 0:
		fmt.Fprintln(a.Stdout, "dsec: no sandboxes are left")
	default:
		fmt.Fprintf(a.Stdout, "dsec: %d sandboxes run on; dsec up finds them again, dsec down ends them\n", left)
	}
	return nil
}

// Up is a node with its front door in one process. Fields without a stated
// default are required.
type Up struct {
	Data    string // folder, made if missing
	Listen  string // address
	Name    string // of the node; default the host's name
	Guest   string // path of dsec-guest; default beside this program
	Context string // path of the context file to leave; default none
	Pool    int    // boxes kept ready; default the driver's
	Warm    warmth // machines kept ready, by kind; default the drivers'

	Store      string // where blobs are: a folder's path or a store URL with options, see store.go; default in Data
	Cache      int64  // bytes of local cache for a Store elsewhere; default a quarter of the file system
	Snapshots  string // folder of saved states, which nodes may share; default in Data
	Swap       int64  // bytes of swap to make; default none
	Unrecorded bool   // nothing that is asked of sandboxes is recorded

	Ready func(Ready) // called once when it serves; default none
	Log   *slog.Logger
}

// Ready is what a node that serves tells.
type Ready struct {
	URL   string
	Token string // of the operator
	Data  string
	Node  *node
}

// Limits of the way down.
const (
	drainLimit = time.Second      // for requests under way; streams go on at the next process
	downLimit  = 60 * time.Second // for sandboxes to end
)

// Run serves until ctx ends, which leaves the sandboxes running and returns
// their number, or until dsec down asks, which ends them and returns -1.
func (u Up) Run(ctx context.Context) (left int, err error) {
	if host, _, err := net.SplitHostPort(u.Listen); err != nil || host == "" {
		return 0, dsec.Errorf(dsec.Invalid, "listen address %q is not HOST:PORT; all interfaces are 0.0.0.0:PORT", u.Listen)
	}
	where, err := openStore(u)
	if err != nil {
		return 0, err
	}
	if err := where.same(filepath.Join(u.Data, placeFile)); err != nil {
		return 0, err
	}
	// The address first: nothing has to be undone when it is bad or taken.
	// Whoever calls from here on waits until the node serves.
	listener, err := net.Listen("tcp", u.Listen)
	if err != nil {
		if errors.Is(err, syscall.EADDRINUSE) && isOpen(u.Data) {
			return 0, fmt.Errorf("open data folder %s: %w", u.Data, errInUse)
		}
		return 0, fmt.Errorf("serve: %w", err)
	}
	defer listener.Close()
	u.Listen = listener.Addr().String()
	n, err := openNode(ctx, u)
	if err != nil {
		return 0, err
	}
	if err := where.note(n.data.at(placeFile)); err != nil {
		return 0, errors.Join(err, n.close())
	}
	for _, err := range n.limits {
		u.Log.Warn("host limit is low", logErr, err)
	}
	down := false
	defer func() {
		if !down {
			left = n.alive()
			err = errors.Join(err, n.close())
		}
	}()
	ctl, err := listenControl(n.data.path)
	if err != nil {
		return 0, err
	}
	defer ctl.close()
	token, err := n.operatorToken(ctx)
	if err != nil {
		return 0, err
	}
	url := "http://" + u.Listen
	server := &http.Server{
		Handler:           n.door(),
		ErrorLog:          slog.NewLogLogger(u.Log.Handler(), slog.LevelDebug),
		ReadHeaderTimeout: 10 * time.Second,
		BaseContext:       func(net.Listener) context.Context { return context.WithoutCancel(ctx) },
	}
	n.inside.serve(n.front(sandboxTokens{n.inside, n.edge}), n.log)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	// The node's own clock runs only while it serves: takeDown has none.
	lifeCtx, endLife := context.WithCancel(context.WithoutCancel(ctx))
	defer endLife()
	lived := make(chan error, 2)
	go func() { lived <- n.edge.Run(lifeCtx) }()
	go func() { lived <- n.jobs.Run(lifeCtx) }()
	if u.Context != "" {
		if old, err := readContextFile(u.Context); err == nil && old.Data != "" && old.Data != n.data.path && isOpen(old.Data) {
			u.Log.Warn("commands of this account come here now, no more to another node that runs", "url", old.URL, "data", old.Data)
		}
		if err := writeContext(u.Context, serverContext{URL: url, Token: token, Data: n.data.path}); err != nil {
			return 0, errors.Join(err, server.Close())
		}
	}
	if u.Ready != nil {
		u.Ready(Ready{URL: url, Token: token, Data: n.data.path, Node: n})
	}

	select {
	case <-ctx.Done():
		return 0, drain(server)
	case err := <-served:
		return 0, fmt.Errorf("serve: %w", err)
	case err := <-lived:
		return 0, errors.Join(fmt.Errorf("run node: %w", err), server.Close())
	case ask := <-ctl.asked:
		// The door stays open while sandboxes end, for what still runs in them.
		down = true
		downCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), downLimit)
		defer cancel()
		err := errors.Join(n.down(downCtx), drain(server))
		if u.Context != "" {
			removeContext(u.Context, n.data.path)
		}
		ask.answer(err)
		return -1, err
	}
}

// drain lets requests end that are under way, but does not wait for streams
// that have no end of their own.
func drain(s *http.Server) error {
	ctx, cancel := context.WithTimeout(context.Background(), drainLimit)
	defer cancel()
	if err := s.Shutdown(ctx); err != nil {
		return s.Close()
	}
	return nil
}

// checkGuest refuses a program that is no dsec-guest before anything depends on
// it.
func checkGuest(ctx context.Context, path string) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "version")
	cmd.WaitDelay = time.Second // for what it may have started
	out, err := cmd.Output()
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("run dsec-guest: %w", err)
	}
	if err != nil || !strings.HasPrefix(string(out), "dsec-guest ") {
		return dsec.Errorf(dsec.Invalid, "%s is not a dsec-guest (make build leaves one in bin)", path)
	}
	return checkStatic(path)
}

// checkStatic refuses a program that needs a loader: a sandbox has none until
// its guest has made it.
func checkStatic(path string) error {
	f, err := elf.Open(path)
	if err != nil {
		return fmt.Errorf("read dsec-guest: %w", err)
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			return dsec.Errorf(dsec.Invalid, "%s is linked dynamically; it must be built with CGO_ENABLED=0, as make build does", path)
		}
	}
	return nil
}

// guestBeside finds dsec-guest next to this program.
func guestBeside() (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find dsec-guest: %w", err)
	}
	path := filepath.Join(filepath.Dir(self), "dsec-guest")
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("find dsec-guest: %w (make build leaves both programs in bin)", err)
	}
	return path, nil
}
