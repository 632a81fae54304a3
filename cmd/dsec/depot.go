package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec/depot"
	"github.com/dsec-go/dsec/hold"
	"github.com/dsec-go/dsec/rootfs"
)

// Names in a data folder that are of lazy data.
const (
	holdDir  = "hold"     // socket and lock of dsec hold
	lazyDir  = "lazy"     // where dsec data shows blobs as files
	dataLog  = "data.log" // of dsec data and dsec hold
	maxLog   = 16 << 20   // of dataLog when dsec data starts
	depotEnd = 15 * time.Second
)

// dataCmd is the process that serves lazy data to a node's mounts: package depot. dsec up
// starts it and starts it again.
type dataCmd struct {
	Data  string `required:"" help:"The node's folder (no default)."`
	Store string `required:"" help:"As dsec up has it (no default)."`
	Cache int64  `help:"As dsec up has it (default a quarter of the file system)."`
	Label string `help:"What tells this process from its predecessor (default none)."`
}

// Run serves until it is told to end.
func (c *dataCmd) Run(ctx context.Context, a *app) error {
	os.WriteFile("/proc/self/oom_score_adj", []byte("-500"), 0) //nolint:errcheck // only root's to give
	os.WriteFile("/proc/self/comm", []byte("dsec-data"), 0)     //nolint:errcheck // for people
	signal.Ignore(syscall.SIGHUP, syscall.SIGINT, syscall.SIGPIPE)
	where, err := openStore(Up{Data: c.Data, Store: c.Store, Cache: c.Cache})
	if err != nil {
		return err
	}
	far, err := where.far(ctx)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(where.lazy, 0o700); err != nil {
		return err
	}
	n, err := where.cacheBytes()
	if err != nil {
		return err
	}
	return depot.Run(ctx, depot.Config{
		Dir: where.lazy, Mount: filepath.Join(c.Data, lazyDir), Holder: filepath.Join(c.Data, holdDir),
		Store: far, Bytes: n, Limit: where.readLimit, InPlace: where.way == wayInPlace, Label: c.Label,
		Log: newLog(a.Stderr, slog.LevelInfo),
	})
}

// lazyData is dsec up's side of the processes beside it: it starts dsec hold and dsec data,
// and again when they die.
type lazyData struct {
	depot.Client
	data   string
	args   []string // of dsec data
	self   string
	label  string
	layers *rootfs.Layers
	log    *slog.Logger

	life context.Context
	end  context.CancelFunc
	work sync.WaitGroup
}

// openLazyData begins them. It returns once there is a holder; dsec data may still start.
func openLazyData(u Up, data string, where storeConfig, layers *rootfs.Layers) (*lazyData, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this program: %w", err)
	}
	d := &lazyData{Client: depot.Client{Dir: where.lazy}, data: data, self: self, layers: layers, log: u.Log}
	d.label, err = labelOf(self, u)
	if err != nil {
		return nil, err
	}
	d.args = []string{"data", "--data", data, "--store", u.Store, "--cache", strconv.FormatInt(u.Cache, 10), "--label", d.label}
	for _, dir := range []string{where.lazy, filepath.Join(data, holdDir)} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, fmt.Errorf("make folder: %w", err)
		}
	}
	holder, err := d.openHolder()
	if err != nil {
		return nil, err
	}
	d.life, d.end = context.WithCancel(context.Background())
	d.work.Go(func() { d.keepHolder(holder) })
	d.work.Go(d.keepDepot)
	return d, nil
}

// labelOf says what a depot is made of: one of another label is replaced.
func labelOf(self string, u Up) (string, error) {
	var st unix.Stat_t
	if err := unix.Stat(self, &st); err != nil {
		return "", fmt.Errorf("look at this program: %w", err)
	}
	return fmt.Sprintf("%d.%d.%d %s %d", st.Ino, st.Mtim.Sec, st.Mtim.Nsec, u.Store, u.Cache), nil
}

// openLog opens the log of the processes. They outlive this one, so they do not write to its
// standard error.
func (d *lazyData) openLog() (*os.File, error) {
	path := filepath.Join(d.data, dataLog)
	if fi, err := os.Stat(path); err == nil && fi.Size() > maxLog {
		if err := os.Rename(path, path+".1"); err != nil {
			return nil, err
		}
	}
	return os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
}

func (d *lazyData) openHolder() (*hold.Client, error) {
	log, err := d.openLog()
	if err != nil {
		return nil, fmt.Errorf("open log: %w", err)
	}
	defer log.Close()
	h, err := hold.Open(hold.Config{Dir: filepath.Join(d.data, holdDir), Command: []string{d.self, "hold"}, Log: log})
	if err != nil {
		return nil, err
	}
	if err := d.layers.Adopt(h); err != nil {
		h.Close()
		return nil, fmt.Errorf("adopt layer mounts: %w", err)
	}
	return h, nil
}

// keepHolder starts another holder when one has died.
func (d *lazyData) keepHolder(h *hold.Client) {
	for {
		select {
		case <-h.Gone():
			d.log.Warn("the holder died; another takes its place", "pid", h.Pid())
		case <-d.life.Done():
			h.Close()
			return
		}
		for {
			next, err := d.openHolder()
			if err == nil {
				h = next
				break
			}
			d.log.Error("no holder can be started", logErr, err)
			if !d.pause(time.Second) {
				return
			}
		}
	}
}

func (d *lazyData) pause(t time.Duration) bool {
	select {
	case <-time.After(t):
		return true
	case <-d.life.Done():
		return false
	}
}

// Pauses before dsec data is started again.
const (
	firstPause = 20 * time.Millisecond
	lastPause  = 5 * time.Second
)

// keepDepot watches the depot, whoever started it, and starts one when there is none.
func (d *lazyData) keepDepot() {
	pause := firstPause
	for d.life.Err() == nil {
		label, gone, err := d.Watch(d.life)
		switch {
		case err == nil && label != d.label:
			d.log.Info("another dsec data takes over")
			d.Retire(d.life) //nolint:errcheck // one that is just dying
			select {
			case <-gone:
			case <-d.life.Done():
			}
			continue
		case err == nil:
			pause = firstPause
			select {
			case <-gone:
				if d.life.Err() == nil {
					d.log.Warn("dsec data is gone; another takes over")
				}
			case <-d.life.Done():
			}
			continue
		}
		if ended, err := d.start(); err != nil {
			d.log.Error("start dsec data", logErr, err)
		} else if d.ready(ended) {
			continue
		} else if d.life.Err() == nil {
			d.log.Error("dsec data ended before it served; see " + dataLog)
		}
		if !d.pause(pause) {
			return
		}
		pause = min(2*pause, lastPause)
	}
}

// start runs a dsec data.
func (d *lazyData) start() (ended <-chan struct{}, err error) {
	log, err := d.openLog()
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := exec.Command(d.self, d.args...)
	cmd.Dir = "/"
	cmd.Stderr = log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	done := make(chan struct{})
	go func() {
		cmd.Wait() //nolint:errcheck // its log says why
		close(done)
	}()
	return done, nil
}

// ready waits until a depot serves or the process that should is gone.
func (d *lazyData) ready(ended <-chan struct{}) bool {
	for {
		ctx, cancel := context.WithCancel(d.life)
		_, _, err := d.Watch(ctx)
		cancel()
		if err == nil {
			return true
		}
		select {
		case <-ended:
			return false
		case <-d.life.Done():
			return false
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// keepEvery is how often dsec data is told which layers are in use.
const keepEvery = 10 * time.Minute

// keepInUse tells it, so that it can forget others.
func (d *lazyData) keepInUse(inUse func() []string) {
	d.work.Go(func() {
		for d.pause(keepEvery) {
			if err := d.Keep(d.life, inUse()); err != nil && d.life.Err() == nil {
				d.log.Warn("tell dsec data what is in use", logErr, err)
			}
		}
	})
}

// close leaves the processes to the next dsec up.
func (d *lazyData) close() {
	d.end()
	d.work.Wait()
}

// endLazyData ends the processes of a node that goes down, if there are any.
func endLazyData(data string) error {
	ctx, cancel := context.WithTimeout(context.Background(), depotEnd)
	defer cancel()
	where, err := openStore(Up{Data: data})
	if err != nil {
		return err
	}
	c := depot.Client{Dir: where.lazy}
	var errs []error
	if _, gone, err := c.Watch(ctx); err == nil {
		if err := c.End(ctx); err != nil {
			errs = append(errs, fmt.Errorf("end dsec data: %w", err))
		}
		select {
		case <-gone:
		case <-ctx.Done():
			errs = append(errs, errors.New("dsec data does not end"))
		}
	}
	h, err := hold.Dial(filepath.Join(data, holdDir))
	if err == nil {
		errs = append(errs, h.End())
	} else if !errors.Is(err, hold.ErrGone) {
		errs = append(errs, err)
	}
	// Of a depot that was dead.
	if err := unix.Unmount(filepath.Join(data, lazyDir), unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, fs.ErrNotExist) {
		errs = append(errs, fmt.Errorf("unmount lazy data: %w", err))
	}
	return errors.Join(errs...)
}

// canSpawn reports whether this program can start itself as another command: a test cannot.
func canSpawn() bool {
	self, err := os.Executable()
	return err == nil && !strings.HasSuffix(self, ".test")
}
