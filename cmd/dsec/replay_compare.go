package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"io"
	"iter"
	"path"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/trajectory"
)

// difference is one thing that is not as it was.
type difference struct {
	Record    uint64 // of the request; 0 for a file
	Step      string
	Operation string
	Field     string
	Recorded  string
	Now       string
	Diff      string // of small outputs, line by line
}

// facts are what is compared of an operation, in the order in which it is.
type facts []fact

type fact struct {
	field string
	value string
	text  []byte // behind the value, where it is small
}

func (f facts) get(field string) (fact, bool) {
	i := slices.IndexFunc(f, func(x fact) bool { return x.field == field })
	if i < 0 {
		return fact{field: field, value: "nothing"}, false
	}
	return f[i], true
}

// smallOutput is how much of an output is kept to show what differs.
const smallOutput = 64 << 10

// streamSum is what is compared of one output stream.
type streamSum struct {
	sum  hash.Hash
	n    int64
	text []byte
}

func (s *streamSum) add(b []byte) {
	s.sum.Write(b)
	s.n += int64(len(b))
	if s.n <= smallOutput {
		s.text = append(s.text, b...)
	}
}

func (s *streamSum) fact(name string, total int64) fact {
	value := fmt.Sprintf("sha256:%s of %d bytes", hex.EncodeToString(s.sum.Sum(nil)), s.n)
	if total > s.n {
		value += fmt.Sprintf(" kept of %d", total)
	}
	f := fact{field: name, value: value}
	if s.n <= smallOutput {
		f.text = s.text
	}
	return f
}

// factsOfCommand takes what is compared of a command that has ended: how, and
// each stream by itself. How the streams interleave is chance.
func factsOfCommand(st dsec.CommandStatus, output iter.Seq2[dsec.Output, error]) (facts, error) {
	streams := [3]streamSum{{}, {sum: sha256.New()}, {sum: sha256.New()}}
	for o, err := range output {
		if err != nil {
			return nil, fmt.Errorf("read output: %w", err)
		}
		if len(o.Data) > 0 {
			streams[o.Stream].add(o.Data)
		}
	}
	return facts{
		{"outcome", string(st.Outcome), nil},
		{"code", strconv.Itoa(st.Code), nil},
		{"signal", or(st.Signal), nil},
		streams[dsec.Stdout].fact("stdout", st.Stdout.Total),
		streams[dsec.Stderr].fact("stderr", st.Stderr.Total),
	}, nil
}

// factsOfFile takes what is compared of a written file; its time is its own.
func factsOfFile(i dsec.FileInfo) facts {
	return facts{
		{"type", string(i.Type), nil},
		{"mode", fmt.Sprintf("%04o", i.Mode), nil},
		{"owner", fmt.Sprintf("%d:%d", i.UID, i.GID), nil},
		{"size", strconv.FormatInt(i.Size, 10), nil},
	}
}

// compare counts an operation and notes the first field in which it differs.
func (r *replay) compare(p *playing, want facts) error {
	r.compared++
	fields := make([]string, 0, len(want)+len(p.got))
	for _, f := range slices.Concat(want, p.got) {
		fields = append(fields, f.field)
	}
	for _, name := range fields {
		was, _ := want.get(name)
		now, _ := p.got.get(name)
		if was.value == now.value {
			continue
		}
		return r.differ(p, was, now)
	}
	r.alike++
	return nil
}

// operationLine gives an operation in one line.
func operationLine(request dsec.Record) (string, error) {
	if request.Op == dsec.RecordCommand {
		c, err := trajectory.CommandOf(request.Request)
		return "$ " + oneLine(commandLine(c)), err
	}
	x, err := parse[params](request, request.Request)
	if err != nil {
		return "", err
	}
	return operation(request, x)
}

func (r *replay) differ(p *playing, was, now fact) error {
	words, err := operationLine(p.request)
	if err != nil {
		return err
	}
	d := difference{Record: p.request.Seq, Operation: words, Field: was.field, Recorded: was.value, Now: now.value}
	if !p.request.Step.IsZero() {
		d.Step = stepText(p.request.Step)
	}
	if len(was.text)+len(now.text) > 0 {
		d.Diff = lineDiff(was.text, now.text)
	}
	r.differences = append(r.differences, d)
	return nil
}

// Limits of what is shown as a difference of lines.
const (
	diffLines = 400 // of either text
	diffShown = 40
)

// lineDiff gives the lines that differ, "-" recorded and "+" now, with those
// that do not between them; "" where that would not help.
func lineDiff(was, now []byte) string {
	if !utf8.Valid(was) || !utf8.Valid(now) || bytes.IndexByte(was, 0) >= 0 || bytes.IndexByte(now, 0) >= 0 {
		return ""
	}
	a, b := splitLines(was), splitLines(now)
	if len(a) > diffLines || len(b) > diffLines {
		return ""
	}
	out := merged(a, b)
	first := slices.IndexFunc(out, func(l string) bool { return l[0] != ' ' })
	if first < 0 {
		return ""
	}
	out = out[max(0, first-2):]
	if len(out) > diffShown {
		out = append(out[:diffShown], fmt.Sprintf("… %d more lines …", len(out)-diffShown))
	}
	return strings.Join(out, "\n") + "\n"
}

func splitLines(b []byte) []string {
	if len(b) == 0 {
		return nil
	}
	return strings.Split(strings.TrimSuffix(string(b), "\n"), "\n")
}

// merged gives both texts as one by their longest common subsequence.
func merged(a, b []string) []string {
	n := make([][]int, len(a)+1) // length of the common part of the rests
	for i := range n {
		n[i] = make([]int, len(b)+1)
	}
	for i := len(a) - 1; i >= 0; i-- {
		for j := len(b) - 1; j >= 0; j-- {
			if a[i] == b[j] {
				n[i][j] = n[i+1][j+1] + 1
			} else {
				n[i][j] = max(n[i+1][j], n[i][j+1])
			}
		}
	}
	var out []string
	for i, j := 0, 0; i < len(a) || j < len(b); {
		switch {
		case i < len(a) && j < len(b) && a[i] == b[j]:
			out = append(out, " "+a[i])
			i, j = i+1, j+1
		case j == len(b) || i < len(a) && n[i+1][j] >= n[i][j+1]:
			out = append(out, "-"+a[i])
			i++
		default:
			out = append(out, "+"+b[j])
			j++
		}
	}
	return out
}

// filesCompared is what came of comparing files.
type filesCompared struct {
	Changed int // files that either sandbox changed
	Alike   int
}

// notFiles are folders that the kernel fills.
var notFiles = []string{"/proc", "/sys", "/dev"}

// compareFiles walks both sandboxes while they live.
func (r *replay) compareFiles(ctx context.Context) error {
	first, err := r.s.Sandboxes.Get(ctx, r.of)
	if err != nil || first.State.Ended() {
		r.filesWhy = "the recorded sandbox has ended"
		return nil
	}
	if len(r.running) > 0 {
		r.filesWhy = "commands still run, which may change them"
		return nil
	}
	a, err := r.walk(ctx, first)
	if err != nil {
		return err
	}
	b, err := r.walk(ctx, r.box)
	if err != nil {
		return err
	}
	r.files = &filesCompared{}
	paths := slices.Collect(func(yield func(string) bool) {
		for p := range a {
			if !yield(p) {
				return
			}
		}
		for p := range b {
			if _, both := a[p]; !both && !yield(p) {
				return
			}
		}
	})
	slices.Sort(paths)
	for _, p := range paths {
		if err := r.compareFile(ctx, first, p, a, b); err != nil {
			return fmt.Errorf("file %s: %w", p, err)
		}
	}
	return nil
}

// walk lists what is in a sandbox.
func (r *replay) walk(ctx context.Context, sb dsec.Sandbox) (map[string]dsec.FileInfo, error) {
	out := map[string]dsec.FileInfo{}
	var down func(dir string, depth int) error
	down = func(dir string, depth int) error {
		for i, err := range r.s.Files.List(ctx, dsec.Call{Sandbox: sb.ID}, dsec.FileOp{Path: dir, User: "0"}, depth) {
			if err != nil {
				return err
			}
			if i.Path == dir || slices.Contains(notFiles, i.Path) {
				continue
			}
			out[i.Path] = i
			if depth == 1 && i.Type == dsec.TypeDir {
				if err := down(i.Path, maxDepth); err != nil {
					return err
				}
			}
		}
		return nil
	}
	return out, down("/", 1)
}

// maxDepth is deeper than any tree of files that can be named.
const maxDepth = dsec.MaxPathBytes

func (r *replay) compareFile(ctx context.Context, first dsec.Sandbox, p string, a, b map[string]dsec.FileInfo) error {
	was, inA := a[p]
	now, inB := b[p]
	// A file of an image is as old as the image, in both.
	changed := was.ModTime.After(first.Created) || now.ModTime.After(r.box.Created) || !was.ModTime.Equal(now.ModTime)
	var wf, nf facts
	switch {
	case !inA:
		wf, nf = facts{{"existence", "missing", nil}}, facts{{"existence", "there", nil}}
	case !inB:
		wf, nf = facts{{"existence", "there", nil}}, facts{{"existence", "missing", nil}}
	default:
		wf, nf = factsOfFile(was), factsOfFile(now)
		if was.Type == dsec.TypeDir { // its size is the file system's own
			wf, nf = wf[:3], nf[:3]
		}
		wf, nf = append(wf, fact{"target", or(was.Target), nil}), append(nf, fact{"target", or(now.Target), nil})
	}
	same := slices.EqualFunc(wf, nf, func(x, y fact) bool { return x.value == y.value })
	if !changed && same {
		return nil
	}
	r.files.Changed++
	if same && was.Type == dsec.TypeFile {
		var err error
		if wf, err = r.contentFacts(ctx, first.ID, p); err != nil {
			return err
		}
		if nf, err = r.contentFacts(ctx, r.box.ID, p); err != nil {
			return err
		}
		same = wf[0].value == nf[0].value
	}
	if same {
		r.files.Alike++
		return nil
	}
	for i := range wf {
		if wf[i].value == nf[i].value {
			continue
		}
		d := difference{Operation: "file " + quoted(path.Clean(p)), Field: wf[i].field, Recorded: wf[i].value, Now: nf[i].value}
		if len(wf[i].text)+len(nf[i].text) > 0 {
			d.Diff = lineDiff(wf[i].text, nf[i].text)
		}
		r.differences = append(r.differences, d)
		return nil
	}
	return nil
}

func (r *replay) contentFacts(ctx context.Context, id dsec.SandboxID, p string) (facts, error) {
	in, err := r.s.Files.Read(ctx, dsec.Call{Sandbox: id}, dsec.FileOp{Path: p, User: "0"}, dsec.ReadRange{})
	if err != nil {
		return nil, err
	}
	defer in.Close()
	s := streamSum{sum: sha256.New()}
	buf := make([]byte, 64<<10)
	for {
		n, err := in.Read(buf)
		s.add(buf[:n])
		if err == io.EOF {
			return facts{s.fact("content", s.n)}, nil
		}
		if err != nil {
			return nil, err
		}
	}
}
