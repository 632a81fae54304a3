package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/trajectory"
)

// The names of exported files: one with the end of the trajectory, one for each
// record and for each body that does not lie in its record.
const (
	headFile   = "head.json"
	recordFile = ".record"
	bodyFile   = ".body"
)

// exportHead is what headFile holds.
type exportHead struct {
	Sandbox dsec.SandboxID `json:"sandbox"`
	Seq     uint64         `json:"seq"`
	Hash    string         `json:"hash"`
	Over    bool           `json:"over"`
}

func exportName(seq uint64, suffix string) string { return fmt.Sprintf("%08d%s", seq, suffix) }

// export writes a trajectory to a new or empty folder.
func (t tape) export(ctx context.Context, dir string) (exportHead, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return exportHead{}, fmt.Errorf("export records: %w", err)
	}
	if old, err := os.ReadDir(dir); err != nil || len(old) > 0 {
		return exportHead{}, errors.Join(err, dsec.Errorf(dsec.Exists, "folder %s is not empty", dir))
	}
	end, err := t.from.Head(ctx, t.id)
	if err != nil {
		return exportHead{}, err
	}
	h := exportHead{t.id, end.Seq, end.Hash, end.Over}
	for r, err := range t.records(ctx, 0) {
		if err != nil {
			return h, err
		}
		if err := t.exportRecord(ctx, dir, r); err != nil {
			return h, fmt.Errorf("export record %d: %w", r.Seq, err)
		}
		if r.Seq == end.Seq {
			break // there may be more by now
		}
	}
	b, err := json.MarshalIndent(h, "", "  ")
	if err != nil {
		return h, err
	}
	return h, os.WriteFile(filepath.Join(dir, headFile), append(b, '\n'), 0o600)
}

func (t tape) exportRecord(ctx context.Context, dir string, r dsec.Record) error {
	if err := os.WriteFile(filepath.Join(dir, exportName(r.Seq, recordFile)), r.Raw, 0o600); err != nil {
		return err
	}
	if r.Blob == "" {
		return nil
	}
	in, err := t.from.Body(ctx, t.id, r.Seq)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(filepath.Join(dir, exportName(r.Seq, bodyFile)), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}

// exported is a folder of exported records as dsec.Trajectories.
type exported struct {
	dir  string
	head exportHead
}

var _ dsec.Trajectories = exported{}

func openExport(dir string) (exported, error) {
	e := exported{dir: dir}
	b, err := os.ReadFile(filepath.Join(dir, headFile))
	if err == nil {
		err = json.Unmarshal(b, &e.head)
	}
	if err != nil {
		return e, fmt.Errorf("open exported records: %w", err)
	}
	return e, nil
}

// Head gives the end as it was exported.
func (e exported) Head(context.Context, dsec.SandboxID) (dsec.Head, error) {
	return dsec.Head{Seq: e.head.Seq, Hash: e.head.Hash, Over: e.head.Over}, nil
}

// Records yields the files in order. One that cannot be read comes with the
// error and its bytes, so that whoever verifies can say more.
func (e exported) Records(ctx context.Context, _ dsec.SandboxID, after uint64) iter.Seq2[dsec.Record, error] {
	return func(yield func(dsec.Record, error) bool) {
		names, err := e.numbers()
		if err != nil {
			yield(dsec.Record{}, err)
			return
		}
		for _, seq := range names {
			if seq <= after {
				continue
			}
			b, err := os.ReadFile(filepath.Join(e.dir, exportName(seq, recordFile)))
			var r dsec.Record
			if err == nil {
				if _, r, err = trajectory.Decode(b); err != nil {
					r, err = dsec.Record{Raw: b}, fmt.Errorf("record %d: %w", seq, err)
				}
			}
			if err == nil {
				err = ctx.Err()
			}
			if !yield(r, err) || err != nil {
				return
			}
		}
	}
}

func (e exported) numbers() ([]uint64, error) {
	entries, err := os.ReadDir(e.dir)
	var all []uint64
	for _, f := range entries {
		if text, ok := strings.CutSuffix(f.Name(), recordFile); ok {
			if n, err := strconv.ParseUint(text, 10, 64); err == nil {
				all = append(all, n)
			}
		}
	}
	slices.Sort(all)
	return all, err
}

// Body opens the body of a record.
func (e exported) Body(_ context.Context, _ dsec.SandboxID, seq uint64) (io.ReadCloser, error) {
	f, err := os.Open(filepath.Join(e.dir, exportName(seq, bodyFile)))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, dsec.Errorf(dsec.NotFound, "the body of record %d was not exported", seq)
	}
	return f, err
}

// verified is what log --verify says of a chain that is whole.
type verified struct {
	Sandbox dsec.SandboxID
	Records uint64
	Bodies  int // that lie beside the records and were read
	Head    string
	Over    bool
}

// verify walks the chain to the end that its keeper names, or to the one that
// the caller knows. With bodies it reads those as well that lie beside.
func (t tape) verify(ctx context.Context, known string, bodies bool) (verified, error) {
	end, err := t.from.Head(ctx, t.id)
	if err != nil {
		return verified{}, err
	}
	out := verified{Sandbox: t.id, Head: end.Hash, Over: end.Over}
	v := trajectory.NewVerifier(t.id)
	for r, err := range t.from.Records(ctx, t.id, 0) {
		if err != nil && len(r.Raw) == 0 {
			return out, err
		}
		if err := v.Add(r.Raw); err != nil {
			return out, err
		}
		if err != nil {
			return out, err
		}
		out.Records++
		if bodies && r.Blob != "" {
			if err := t.verifyBody(ctx, r); err != nil {
				return out, fmt.Errorf("body of record %d: %w", r.Seq, err)
			}
			out.Bodies++
		}
		if out.Records == end.Seq && t.living() {
			break // there may be more by now
		}
	}
	if err := v.End(end); err != nil {
		return out, err
	}
	if known != "" && known != end.Hash {
		return out, fmt.Errorf("the head is %s, not %s", end.Hash, known)
	}
	return out, nil
}

// living reports whether the trajectory may grow while it is read.
func (t tape) living() bool {
	_, still := t.from.(exported)
	return !still
}

func (t tape) verifyBody(ctx context.Context, r dsec.Record) error {
	_, inside, err := trajectory.Decode(r.Raw) // what the chain vouches for
	if err != nil {
		return err
	}
	in, err := t.from.Body(ctx, t.id, r.Seq)
	if err != nil {
		return err
	}
	defer in.Close()
	sum := sha256.New()
	n, err := io.Copy(sum, in)
	if err != nil {
		return err
	}
	if got := "sha256:" + hex.EncodeToString(sum.Sum(nil)); got != inside.Blob || n != inside.Size {
		return fmt.Errorf("it is %s of %d bytes, recorded is %s of %d", got, n, inside.Blob, inside.Size)
	}
	return nil
}
