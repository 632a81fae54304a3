package bench

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/dsec-go/dsec"
)

// imageNode is a private server of one variant.
type imageNode struct {
	server *Server
	dsec.Services
}

// node starts one. store is the URL of its store; empty for its own folder.
func (b *imageBench) node(ctx context.Context, name, store string) (*imageNode, error) {
	c := ServerConfig{Program: b.o.Program, Guest: b.o.Guest, Dir: filepath.Join(b.o.Dir, name)}
	if store != "" {
		c.Up = []string{"--store", store}
	}
	s, err := StartServer(ctx, c)
	if err != nil {
		return nil, err
	}
	services, err := b.o.Connect(s.URL, s.Token)
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return &imageNode{s, services}, nil
}

// restart takes the node down and starts it again without what it had fetched.
func (b *imageBench) restart(ctx context.Context, n *imageNode) error {
	err := n.server.Restart(ctx, func(data string) error { return os.RemoveAll(filepath.Join(data, fetchedDir)) })
	if err == nil {
		n.Services, err = b.o.Connect(n.server.URL, n.server.Token)
	}
	return err
}

func (n *imageNode) close() error { return n.server.Close() }

// adopt names an environment that the node's store has.
func (n *imageNode) adopt(ctx context.Context, e environment) error {
	_, err := n.Images.Adopt(ctx, e.digest, dsec.ImportOptions{Name: e.name})
	return err
}

// What tasks read: of the list that is in each environment, everything, and of other
// files as many as the list has.
const (
	readSome  = "xargs cat </task/list >/dev/null"
	readAll   = "find / -xdev -type f -exec cat {} + >/dev/null"
	readOther = "find / -xdev -type f | awk 'NR%12==5' | xargs cat >/dev/null"
)

// task creates a sandbox, runs a line of shell in it and stops it.
func (n *imageNode) task(ctx context.Context, env, line string) error {
	sb, err := n.Sandboxes.Create(ctx, dsec.Spec{Environment: dsec.Environment{Base: env}}, dsec.CreateOptions{})
	if err != nil {
		return err
	}
	res, err := n.Commands.Run(ctx, dsec.Call{Sandbox: sb.ID}, dsec.Command{Shell: line}, nil)
	if err == nil && (res.Outcome != dsec.Exited || res.Code != 0) {
		err = fmt.Errorf("task ended with %s %d: %s", res.Outcome, res.Code, res.Err)
	}
	_, serr := n.Sandboxes.Stop(context.WithoutCancel(ctx), sb.ID)
	return errors.Join(err, serr)
}

// fetched is how many bytes came from the node's store.
func (n *imageNode) fetched(ctx context.Context) int64 {
	list, err := n.Nodes.Nodes(ctx)
	if err != nil || len(list) == 0 {
		return 0
	}
	return list[0].Fetched
}

// taken is how many bytes of disk the files below a folder take, without what is
// mounted there. Files that go meanwhile count for nothing.
func taken(dir string) (total int64, err error) {
	var own syscall.Stat_t
	if err := syscall.Stat(dir, &own); err != nil {
		return 0, fmt.Errorf("measure folder: %w", err)
	}
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return nil //nolint:nilerr // gone
		}
		st, ok := info.Sys().(*syscall.Stat_t)
		switch {
		case ok && st.Dev != own.Dev && d.IsDir():
			return fs.SkipDir
		case ok && d.Type().IsRegular():
			total += st.Blocks * 512
		}
		return nil
	})
	return total, err
}
