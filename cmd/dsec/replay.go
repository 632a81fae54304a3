package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dsec-go/dsec"
)

// replayCmd does what was recorded of a sandbox again, in a fresh one.
type replayCmd struct {
	Sandbox string `arg:"" help:"Sandbox ID; it may have ended."`
	To      string `help:"Stop behind this record or step (default the end)." placeholder:"N|SESSION:N"`
	Keep    bool   `help:"Leave the new sandbox running and print its ID: a branch."`
	Clock   string `help:"Set SOURCE_DATE_EPOCH to this time: RFC 3339, seconds, or recorded (default none)." placeholder:"TIME"`
	Seed    string `help:"Set DSEC_SEED and PYTHONHASHSEED to this number (default none)." placeholder:"N"`
	Pace    span   `help:"Longest pause between operations that is kept while a command runs." default:"1s" placeholder:"TIME"`
	outputFlags
}

// Help explains what is compared and the exit status.
func (c *replayCmd) Help() string {
	return `The new sandbox has the same layers, limits and host name. Operations come in
their recorded order; what had ended before another began has ended before it
begins. Compared are outcome, status and both output streams of commands, errors,
what is known of written files, and, if the first sandbox lives and nothing was
left out, all files that either changed.

  dsec replay sb...                        is it reproducible?
  dsec replay sb... --to trainer:7 --keep  a sandbox as it was after that step

With --keep the last commit before that place is the new sandbox's workspace, and
only what came after it is done again.

The exit status is 0 if all was alike, 1 if something was not, 125 when dsec
itself failed.`
}

// replayLabel names the sandbox that another replays.
const replayLabel = "dsec.replay-of"

// Run replays and reports.
func (c *replayCmd) Run(ctx context.Context, a *app) error {
	t, err := a.tape(c.Sandbox, "")
	if err != nil {
		return err
	}
	s, err := a.services()
	if err != nil {
		return err
	}
	all, err := t.whole(ctx)
	if err != nil {
		return err
	}
	p, err := c.plan(ctx, s, all)
	if err != nil {
		return err
	}

	// From here on Ctrl-C must not leave a sandbox behind.
	ctx, done := a.untilInterrupt(ctx)
	defer done()
	sb, err := s.Sandboxes.Create(ctx, p.spec, dsec.CreateOptions{})
	if err != nil {
		return orInterrupt(ctx, fmt.Errorf("create the sandbox of the replay: %w", err))
	}
	keep := false
	defer func() {
		if !keep {
			a.stopSoon(ctx, s, sb.ID)
		}
	}()
	if !slices.Equal(sb.Layers, p.layers) {
		return fmt.Errorf("the new sandbox has layers %v, recorded are %v", sb.Layers, p.layers)
	}
	r := newReplay(s, t, p, sb, time.Duration(c.Pace), a.progress())
	if err := r.play(ctx); err != nil {
		return orInterrupt(ctx, err)
	}
	if err := r.leaveRest(); err != nil {
		return err
	}
	if p.complete && !c.Keep {
		if err := r.compareFiles(ctx); err != nil {
			return orInterrupt(ctx, fmt.Errorf("compare files: %w", err))
		}
	}
	keep = c.Keep
	return c.report(a, r)
}

// plan is what a replay is to do.
type plan struct {
	of       dsec.SandboxID
	all      []dsec.Record
	from, to int // the records that are played: all[from:to]
	spec     dsec.Spec
	layers   []string // that the new sandbox must have
	base     uint64   // record of the commit that stands for what came before, 0 for none
	complete bool     // all is played, and the environment is the recorded one
}

func (c *replayCmd) plan(ctx context.Context, s dsec.Services, all []dsec.Record) (plan, error) {
	made, err := parse[creation](all[0], all[0].Request)
	if err != nil {
		return plan{}, err
	}
	p := plan{of: dsec.SandboxID(c.Sandbox), all: all, from: 1, to: len(all), spec: made.Spec, layers: made.Layers}
	if c.To != "" {
		if p.to, err = c.end(all); err != nil {
			return p, err
		}
	}
	p.complete = p.to == len(all)
	if p.spec.Environment, err = pinned(ctx, s, made); err != nil {
		return p, err
	}
	if c.Keep {
		if err := p.shorten(ctx, s); err != nil {
			return p, err
		}
	}
	if p.spec.Hostname == "" {
		p.spec.Hostname = c.Sandbox[:min(len(c.Sandbox), 12)] // as it was; the node's default is of the new ID
	}
	for _, r := range all[:p.to] {
		if x, err := parse[params](r, r.Request); r.Op == dsec.RecordExtend && err == nil {
			p.spec.TTL = max(p.spec.TTL, time.Duration(x.TTL))
		}
	}
	p.spec.Job = "" // its trainer did not ask for it
	p.spec.Labels = withVariable(cloned(p.spec.Labels), replayLabel, c.Sandbox)
	return p, c.substitute(&p, all[0].Time)
}

func cloned(m map[string]string) map[string]string {
	out := make(map[string]string, len(m)+1)
	for k, v := range m {
		out[k] = v
	}
	return out
}

// end finds how many records are played: to the one that is named, and if that
// is a request, to its answer.
func (c *replayCmd) end(all []dsec.Record) (int, error) {
	if n, err := strconv.ParseUint(c.To, 10, 64); err == nil {
		if n == 0 || n > uint64(len(all)) {
			return 0, dsec.Errorf(dsec.NotFound, "the trajectory has records 1 to %d, not %s", len(all), c.To)
		}
		return int(n), nil
	}
	var step stepFlag
	if err := step.UnmarshalText([]byte(c.To)); err != nil {
		return 0, dsec.Errorf(dsec.Invalid, "--to %s is neither the number of a record nor SESSION:N", c.To)
	}
	for i := len(all) - 1; i >= 0; i-- {
		if all[i].Step == dsec.Step(step) {
			return i + 1, nil
		}
	}
	return 0, dsec.Errorf(dsec.NotFound, "the trajectory has no step %s", c.To)
}

// pinned gives the recorded environment with the versions that it had. A name
// may stand for another version by now, and a version for other bytes.
func pinned(ctx context.Context, s dsec.Services, made creation) (dsec.Environment, error) {
	env := made.Spec.Environment
	parts := env.Parts()
	if len(parts) != len(made.Layers) {
		return env, fmt.Errorf("the record names %d images and %d layers", len(parts), len(made.Layers))
	}
	for i, part := range parts {
		name, _ := dsec.SplitImageName(part)
		var images []dsec.Image
		for img, err := range dsec.AllImages(ctx, s.Images, dsec.ImageQuery{Digest: made.Layers[i]}) {
			if err != nil {
				return env, fmt.Errorf("look for the images: %w", err)
			}
			images = append(images, img)
		}
		at := slices.IndexFunc(images, func(m dsec.Image) bool { return m.Digest == made.Layers[i] && m.Name == name })
		if at < 0 {
			at = slices.IndexFunc(images, func(m dsec.Image) bool { return m.Digest == made.Layers[i] })
		}
		if at < 0 {
			return env, dsec.Errorf(dsec.NotFound, "image %s is not here any more as it was (layer %s)", part, made.Layers[i])
		}
		parts[i] = images[at].Ref()
	}
	env.Base, parts = parts[0], parts[1:]
	if env.Workspace != "" {
		env.Workspace, parts = parts[0], parts[1:]
	}
	env.Toolkits = parts
	return env, nil
}

// shorten lets the nearest commit stand for what came before it. A commit has
// no processes, so none may have been at work; what a command left behind in
// the background is not in it either.
func (p *plan) shorten(ctx context.Context, s dsec.Services) error {
	open := map[uint64]bool{}
	for i, r := range p.all[:p.to] {
		switch {
		case !isAnswer(r) && !alone(r):
			open[r.Seq] = true
			continue
		case !isAnswer(r):
			continue
		}
		delete(open, r.Of)
		if r.Op != dsec.RecordCommit || r.Error != nil || len(open) > 0 {
			continue
		}
		q, err := parse[params](p.all[r.Of-1], p.all[r.Of-1].Request)
		if err != nil {
			return err
		}
		done, err := parse[answers](r, r.Answer)
		if err != nil {
			return err
		}
		switch img, err := s.Images.Inspect(ctx, q.Name); {
		case err != nil && dsec.KindOf(err) != dsec.NotFound:
			return fmt.Errorf("look for commit %s: %w", q.Name, err)
		case err == nil && img.Digest == done.Digest:
			p.rest(i+1, r.Of, q.Name, img.Digest)
		}
	}
	return nil
}

func (p *plan) rest(from int, base uint64, workspace, digest string) {
	made, err := parse[creation](p.all[0], p.all[0].Request)
	if err != nil {
		return
	}
	layers := []string{made.Layers[0], digest}
	toolkits := made.Layers[1:]
	if made.Spec.Environment.Workspace != "" {
		toolkits = toolkits[1:]
	}
	p.from, p.base, p.complete = from, base, false
	p.spec.Environment.Workspace, p.layers = workspace, append(layers, toolkits...)
}

// substitute sets what programs take for the clock and for chance.
func (c *replayCmd) substitute(p *plan, created time.Time) error {
	env := cloned(p.spec.Env)
	switch n, err := strconv.ParseInt(c.Clock, 10, 64); {
	case c.Clock == "":
	case c.Clock == "recorded":
		env["SOURCE_DATE_EPOCH"] = strconv.FormatInt(created.Unix(), 10)
	case err == nil:
		env["SOURCE_DATE_EPOCH"] = strconv.FormatInt(n, 10)
	default:
		at, err := time.Parse(time.RFC3339, c.Clock)
		if err != nil {
			return dsec.Errorf(dsec.Invalid, "--clock %s is not like 2006-01-02T15:04:05Z, a number of seconds, or recorded", c.Clock)
		}
		env["SOURCE_DATE_EPOCH"] = strconv.FormatInt(at.Unix(), 10)
	}
	if c.Seed != "" {
		n, err := strconv.ParseUint(c.Seed, 10, 64)
		if err != nil {
			return dsec.Errorf(dsec.Invalid, "--seed %s is not a whole number from 0 on", c.Seed)
		}
		env["DSEC_SEED"] = c.Seed
		env["PYTHONHASHSEED"] = strconv.FormatUint(n%(1<<32), 10) // more it does not take
	}
	if len(env) > 0 {
		p.spec.Env = env
	}
	return nil
}

// replayed is what replay --json prints.
type replayed struct {
	Of          dsec.SandboxID
	Sandbox     dsec.SandboxID // with --keep
	Commit      uint64         // record of the commit that was begun with, 0 for none
	Operations  int            // done again and compared
	Alike       int
	Skipped     []skipped
	NotCompared []skipped // done again, but the record has no end of it
	Differences []difference
	Files       *filesCompared // nil if they were not compared
	FilesWhy    string         // why they were not
}

// report prints what came of a replay and gives the exit status.
func (c *replayCmd) report(a *app, r *replay) error {
	out := replayed{
		Of: r.of, Commit: r.base, Operations: r.compared, Alike: r.alike, Skipped: r.skipped,
		NotCompared: r.unended, Differences: r.differences, Files: r.files, FilesWhy: r.filesWhy,
	}
	w := a.Stdout
	var err error
	switch {
	case c.JSON:
		if c.Keep {
			out.Sandbox = r.box.ID
		}
		err = a.json(out)
	case c.Keep:
		_, err = fmt.Fprintln(a.Stdout, r.box.ID)
		w = a.Stderr
		fallthrough
	default:
		_, e := fmt.Fprint(w, out.text())
		err = errors.Join(err, e)
	}
	if err == nil && len(out.Differences) > 0 {
		err = exitStatus(statusFailed)
	}
	return err
}

// text gives the report for people: the first difference, and how many there are.
func (r replayed) text() string {
	var b strings.Builder
	if len(r.Differences) > 0 {
		d := r.Differences[0]
		b.WriteString("first difference: ")
		if d.Record > 0 {
			fmt.Fprintf(&b, "#%d", d.Record)
			if d.Step != "" {
				fmt.Fprintf(&b, " (step %s)", printable(d.Step))
			}
			b.WriteString(" ")
		}
		fmt.Fprintf(&b, "%s\n  %s: recorded %s, now %s\n", printable(d.Operation), d.Field, printable(d.Recorded), printable(d.Now))
		for l := range strings.Lines(d.Diff) {
			fmt.Fprintf(&b, "    %s\n", readable(strings.TrimSuffix(l, "\n")))
		}
	}
	for _, s := range r.Skipped {
		fmt.Fprintf(&b, "not repeated: #%d %s: %s\n", s.Record, printable(s.Operation), s.Why)
	}
	for _, s := range r.NotCompared {
		fmt.Fprintf(&b, "not compared: #%d %s: %s\n", s.Record, printable(s.Operation), s.Why)
	}
	if r.Commit > 0 {
		fmt.Fprintf(&b, "begun with the commit of #%d\n", r.Commit)
	}
	fmt.Fprintf(&b, "%d of %d operations alike\n", r.Alike, r.Operations)
	if f := r.Files; f != nil {
		fmt.Fprintf(&b, "%d of %d changed files alike\n", f.Alike, f.Changed)
	} else if r.FilesWhy != "" {
		fmt.Fprintf(&b, "files not compared: %s\n", r.FilesWhy)
	}
	return b.String()
}
