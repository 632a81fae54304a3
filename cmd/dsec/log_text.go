package main

import (
	"bytes"
	"context"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/trajectory"
)

// What of an output is shown unless all is asked for.
const (
	headLines = 12
	tailLines = 6
	readCut   = 64 << 10 // bytes that are read of a body which does not lie in its record
)

// The colours of a session on a terminal.
const (
	styleNone = ""
	styleDim  = "2"
	styleBold = "1"
	styleBad  = "31"
	styleName = "36"
)

// sessionText prints a trajectory as a session to read. A request is held back
// until it is known whether its answer is what comes next: then both are one
// entry. Otherwise the answer is an entry of its own where it came.
type sessionText struct {
	a      *app
	t      tape
	full   bool
	colour bool

	held     *dsec.Record
	requests map[uint64]dsec.Record // without an answer yet
	who      string                 // of the last entry
	day      string
}

func newSessionText(a *app, t tape, full bool) *sessionText {
	_, tty := terminalOf(a.Stdout)
	return &sessionText{a: a, t: t, full: full, colour: tty && a.Getenv("NO_COLOR") == "", requests: map[uint64]dsec.Record{}}
}

func (s *sessionText) paint(style, text string) string {
	if !s.colour || style == styleNone || text == "" {
		return text
	}
	return "\x1b[" + style + "m" + text + "\x1b[m"
}

func (s *sessionText) line(format string, args ...any) error {
	_, err := fmt.Fprintf(s.a.Stdout, format+"\n", args...)
	return err
}

// pause prints what is held back: its answer may take a while.
func (s *sessionText) pause(context.Context) error {
	if s.held == nil {
		return nil
	}
	r := *s.held
	s.held = nil
	return s.open(r, nil)
}

func (s *sessionText) record(ctx context.Context, r dsec.Record) error {
	if !isAnswer(r) {
		if err := s.pause(ctx); err != nil {
			return err
		}
		if alone(r) {
			return s.open(r, nil)
		}
		s.requests[r.Seq] = r
		s.held = &r
		return nil
	}
	q, known := s.requests[r.Of]
	delete(s.requests, r.Of)
	if s.held != nil && s.held.Seq == r.Of {
		s.held = nil
		if err := s.open(q, &r); err != nil {
			return err
		}
		return s.result(ctx, q, r)
	}
	if err := s.pause(ctx); err != nil {
		return err
	}
	if !known {
		return fmt.Errorf("record %d answers record %d, which has its answer or is none", r.Seq, r.Of)
	}
	what := string(q.Op)
	if q.Op == dsec.RecordCommand {
		c, err := trajectory.CommandOf(q.Request)
		if err != nil {
			return err
		}
		what = oneLine(commandLine(c))
	}
	if err := s.line("%s end of #%d, %s%s", s.head(r), q.Seq, printable(what), s.outcome(q, &r)); err != nil {
		return err
	}
	return s.result(ctx, q, r)
}

// head is how an entry begins.
func (s *sessionText) head(r dsec.Record) string {
	return s.paint(styleDim, r.Time.UTC().Format("15:04:05.000")) + " " + s.paint(styleName, fmt.Sprintf("#%d", r.Seq))
}

// open prints the first line of an entry, and the command line of a command.
// answer is nil if it does not come next.
func (s *sessionText) open(r dsec.Record, answer *dsec.Record) error {
	if day := r.Time.UTC().Format("2006-01-02 (Monday), UTC"); day != s.day {
		s.day = day
		if err := s.line("%s", s.paint(styleDim, day)); err != nil {
			return err
		}
	}
	p, err := parse[params](r, r.Request)
	if err != nil {
		return err
	}
	head := s.head(r)
	if who := whoText(r.Who); who != "" && who != s.who && (r.Who.Token != "" || r.Op == dsec.RecordCreate) {
		s.who = who
		head += " " + s.paint(styleDim, who)
	}
	if !r.Step.IsZero() {
		head += " " + s.paint(styleDim, printable(stepText(r.Step)))
	}
	words, err := operation(r, p)
	if err != nil {
		return err
	}
	if err := s.line("%s %s%s", head, printable(words), s.outcome(r, answer)); err != nil || r.Op != dsec.RecordCommand {
		return err
	}
	c, err := trajectory.CommandOf(r.Request)
	if err != nil {
		return err
	}
	for i, l := range strings.Split(strings.TrimRight(commandLine(c), "\n"), "\n") {
		mark := "$ "
		if i > 0 {
			mark = "  "
		}
		if err := s.line("  %s%s", mark, s.paint(styleBold, printable(l))); err != nil {
			return err
		}
	}
	if b, ok := trajectory.InlineBody(r); ok {
		return s.quote(b)
	}
	return nil
}

func whoText(w dsec.Who) string {
	who := printable(w.Token)
	if w.Project != "" {
		who = strings.TrimPrefix(who+" of "+printable(string(w.Project)), " ")
	}
	return who
}

func stepText(s dsec.Step) string { return s.Session + ":" + strconv.FormatUint(s.Number, 10) }

// outcome gives how a call other than a command ended, for the line that it
// has; nothing if that is not known there.
func (s *sessionText) outcome(q dsec.Record, r *dsec.Record) string {
	if r == nil || r.Error != nil || r.Op == dsec.RecordCommand {
		return ""
	}
	a, err := parse[answers](*r, r.Answer)
	if err != nil {
		a = answers{} // a plain number, as that of stdin
	}
	text := ""
	switch r.Op {
	case dsec.RecordWrite, dsec.RecordUnpack:
		text = size(a.Size) + ", "
	case dsec.RecordDial:
		text = fmt.Sprintf("%s sent, %s received, ", size(a.Sent), size(a.Received))
	case dsec.RecordCommit:
		text = "layer " + printable(a.Digest) + ", "
	}
	return s.paint(styleDim, " ("+text+took(r.Mono-q.Mono)+")")
}

// result prints what does not fit the line of an entry: an error, what was
// written, what a command printed and how it ended.
func (s *sessionText) result(ctx context.Context, q, r dsec.Record) error {
	switch {
	case r.Error != nil:
		text := fmt.Sprintf("fails after %s: %s: %s", took(r.Mono-q.Mono), r.Error.Kind, printable(r.Error.Text))
		return s.line("  %s", s.paint(styleBad, text))
	case r.Op == dsec.RecordCommand:
		return s.ended(ctx, q, r)
	case r.Op == dsec.RecordWrite:
		if b, ok := trajectory.InlineBody(r); ok {
			return s.quote(b)
		}
	}
	return nil
}

// ended prints the output of a command and its outcome.
func (s *sessionText) ended(ctx context.Context, q, r dsec.Record) error {
	st, err := trajectory.StatusOf(q, r)
	if err != nil {
		return err
	}
	if err := s.output(ctx, r); err != nil {
		return err
	}
	d := r.Mono - q.Mono
	if !st.Ended.IsZero() && !st.Started.IsZero() {
		d = st.Ended.Sub(st.Started)
	}
	text, style := outcomeText(st), styleDim
	if st.Code != 0 {
		style = styleBad
	}
	text += " after " + took(d)
	if n := st.Stdout.Total + st.Stderr.Total; n > 0 {
		text += ", " + size(n)
	}
	if n := trajectory.FetchedOf(r); n > 0 {
		text += ", " + size(n) + " of the image fetched"
	}
	return s.line("  %s", s.paint(style, text))
}

// outcomeText gives how a command ended in words.
func outcomeText(st dsec.CommandStatus) string {
	switch st.Outcome {
	case dsec.Exited:
		return "exit " + strconv.Itoa(st.Code)
	case dsec.Signaled:
		return "killed by " + printable(st.Signal)
	case dsec.TimedOut:
		return "killed at its timeout"
	case dsec.Inactive:
		return "killed for being silent"
	case dsec.NotStarted:
		return fmt.Sprintf("not started (%d): %s", st.Code, printable(st.Detail))
	case dsec.OutOfMemory:
		return "killed for want of memory"
	case dsec.Interrupted:
		return "interrupted: " + printable(st.Detail)
	}
	return printable(string(st.Outcome))
}

// output prints what a command wrote, each stream's lines with a mark of its own.
func (s *sessionText) output(ctx context.Context, r dsec.Record) error {
	var lines excerpt
	lines.all = s.full
	left := int64(readCut)
	if r.Blob == "" || s.full {
		left = 1 << 62
	}
	var part [3]bytes.Buffer // the unfinished line of each stream
	flush := func(stream dsec.Stream) {
		if part[stream].Len() > 0 {
			lines.add(shownLine{stream, part[stream].String()})
			part[stream].Reset()
		}
	}
	for o, err := range s.t.output(ctx, r) {
		if err != nil {
			return fmt.Errorf("read the output of record %d: %w", r.Seq, err)
		}
		if o.Gap > 0 {
			flush(dsec.Stdout)
			flush(dsec.Stderr)
			lines.add(shownLine{0, fmt.Sprintf("… %s were not kept …", size(o.Gap))})
			continue
		}
		if left -= int64(len(o.Data)); left < 0 {
			lines.cut = true
			break
		}
		for data := o.Data; len(data) > 0; {
			i := bytes.IndexByte(data, '\n')
			if i < 0 {
				part[o.Stream].Write(data)
				break
			}
			part[o.Stream].Write(data[:i])
			lines.add(shownLine{o.Stream, part[o.Stream].String()})
			part[o.Stream].Reset()
			data = data[i+1:]
		}
	}
	flush(dsec.Stdout)
	flush(dsec.Stderr)
	return lines.each(func(l shownLine) error {
		switch l.stream {
		case dsec.Stdout:
			return s.line("    %s", readable(l.text))
		case dsec.Stderr:
			return s.line("  ! %s", s.paint(styleBad, readable(l.text)))
		}
		return s.line("    %s", s.paint(styleDim, l.text))
	})
}

// quote prints what was fed to a command or a file.
func (s *sessionText) quote(b []byte) error {
	if bytes.IndexByte(b, 0) >= 0 {
		return s.line("  < %s", s.paint(styleDim, size(int64(len(b)))+" of binary data"))
	}
	lines := excerpt{all: s.full}
	for l := range strings.Lines(string(b)) {
		lines.add(shownLine{dsec.Stdout, strings.TrimSuffix(l, "\n")})
	}
	return lines.each(func(l shownLine) error {
		style := styleNone
		if l.stream == 0 {
			style = styleDim
		}
		return s.line("  < %s", s.paint(style, readable(l.text)))
	})
}

// shownLine is one line of output; stream 0 is a remark.
type shownLine struct {
	stream dsec.Stream
	text   string
}

// excerpt keeps the first and the last of many lines.
type excerpt struct {
	all  bool
	cut  bool // there is more than was added
	head []shownLine
	tail []shownLine
	left int // out between the two
}

func (e *excerpt) add(l shownLine) {
	switch {
	case e.all || len(e.head) < headLines:
		e.head = append(e.head, l)
	default:
		if len(e.tail) == tailLines {
			e.tail = append(e.tail[:0], e.tail[1:]...)
			e.left++
		}
		e.tail = append(e.tail, l)
	}
}

func (e *excerpt) each(f func(shownLine) error) error {
	for _, l := range e.head {
		if err := f(l); err != nil {
			return err
		}
	}
	if e.left > 0 {
		if err := f(shownLine{0, fmt.Sprintf("… %d more lines …", e.left)}); err != nil {
			return err
		}
	}
	for _, l := range e.tail {
		if err := f(l); err != nil {
			return err
		}
	}
	if e.cut {
		return f(shownLine{0, "… and more (--full) …"})
	}
	return nil
}

// escapes are the sequences by which output moves a cursor or sets colours.
var escapes = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[@-Z\\^_])`)
})

// readable gives a line of output as a terminal would leave it, without what
// could move a cursor here: no escapes, and of overwritten text the last.
func readable(l string) string {
	l = escapes().ReplaceAllString(strings.TrimRight(l, "\r"), "")
	if i := strings.LastIndexByte(l, '\r'); i >= 0 {
		l = l[i+1:]
	}
	return printable(strings.ReplaceAll(strings.ToValidUTF8(l, "\uFFFD"), "\t", "        "))
}

// commandLine gives a command as a shell would take it.
func commandLine(c dsec.Command) string {
	if c.Shell != "" {
		return c.Shell
	}
	parts := make([]string, len(c.Argv))
	for i, a := range c.Argv {
		parts[i] = quoted(a)
	}
	return strings.Join(parts, " ")
}

var plainWord = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[A-Za-z0-9_@%+=:,./-]+$`) })

func quoted(word string) string {
	if plainWord().MatchString(word) {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}

// oneLine shortens a text to what fits a line.
func oneLine(s string) string {
	s, _, more := strings.Cut(strings.TrimRight(s, "\n"), "\n")
	if r := []rune(s); more || len(r) > 100 {
		s = string(r[:min(len(r), 99)]) + "…"
	}
	return s
}

// operation gives a request in words.
func operation(r dsec.Record, p params) (string, error) {
	as := ""
	if p.User != "" {
		as = " as " + string(p.User)
	}
	switch r.Op {
	case dsec.RecordCreate:
		c, err := parse[creation](r, r.Request)
		return creationText(c), err
	case dsec.RecordCommand:
		c, err := trajectory.CommandOf(r.Request)
		return commandText(c), err
	case dsec.RecordStdin:
		text := fmt.Sprintf("feed %s", p.Command)
		if r.Size > 0 {
			text += fmt.Sprintf(" %s at %d", size(r.Size), p.Offset)
		}
		if b, ok := trajectory.InlineBody(r); ok && len(b) <= 200 {
			text += " " + strconv.Quote(string(b))
		}
		if p.Close {
			text += ", and no more"
		}
		return text, nil
	case dsec.RecordResize:
		return fmt.Sprintf("resize the terminal of %s to %d by %d", p.Command, p.Size.Cols, p.Size.Rows), nil
	case dsec.RecordSignal:
		return fmt.Sprintf("send %s to %s", p.Signal, p.Command), nil
	case dsec.RecordWrite:
		return "write " + quoted(string(p.Path)) + writeText(p) + as, nil
	case dsec.RecordMkdir:
		return "make folder " + quoted(string(p.Path)) + as, nil
	case dsec.RecordMove:
		return "move " + quoted(string(p.Path)) + " to " + quoted(string(p.To)) + as, nil
	case dsec.RecordRemove:
		return "remove " + quoted(string(p.Path)) + as, nil
	case dsec.RecordChmod:
		return fmt.Sprintf("set mode %04o of %s%s", p.Mode, quoted(string(p.Path)), as), nil
	case dsec.RecordChown:
		return fmt.Sprintf("set owner %s of %s%s", p.Owner, quoted(string(p.Path)), as), nil
	case dsec.RecordSymlink:
		return "link " + quoted(string(p.Path)) + " to " + quoted(string(p.Link)) + as, nil
	case dsec.RecordUnpack:
		return "unpack an archive into " + quoted(string(p.Path)) + as, nil
	case dsec.RecordDial:
		return fmt.Sprintf("connect to port %d", p.Port), nil
	case dsec.RecordExtend:
		return "let it live for " + time.Duration(p.TTL).String() + " from now", nil
	case dsec.RecordLabel:
		return labelText(p.Labels), nil
	case dsec.RecordCommit:
		return "commit as " + p.Name, nil
	case dsec.RecordSave:
		return "save a snapshot", nil
	case dsec.RecordFork:
		return fmt.Sprintf("fork into %d", p.Count), nil
	case dsec.RecordInput:
		return fmt.Sprintf("%d events of keyboard and pointer", len(p.Events)), nil
	case dsec.RecordStop:
		return "ask for the end", nil
	case dsec.RecordEnd:
		return strings.TrimSpace(fmt.Sprintf("ended: %s (%s) %s", p.State, p.Cause, p.Detail)), nil
	}
	return strings.TrimSpace(string(r.Op) + " " + p.Detail), nil
}

func creationText(c creation) string {
	s := c.Spec
	text := fmt.Sprintf("created: %s of %s, %g CPU, %s, on node %s", s.Kind, strings.Join(s.Environment.Parts(), " + "), s.Resources.CPU, size(s.Resources.Memory), c.Node)
	if s.Job != "" {
		text += ", job " + string(s.Job)
	}
	if o := c.Origin; o != nil {
		text += fmt.Sprintf(", a copy of %s at its record %d", o.Sandbox, o.Sequence)
	}
	return text
}

func commandText(c dsec.Command) string {
	text := "run"
	if c.TTY != nil {
		text += fmt.Sprintf(" on a terminal of %d by %d", c.TTY.Cols, c.TTY.Rows)
	}
	if c.Cwd != "" {
		text += " in " + quoted(c.Cwd)
	}
	if c.User != "" {
		text += " as " + c.User
	}
	if len(c.Env) > 0 {
		text += " with"
		for _, k := range sortedKeys(c.Env) {
			text += " " + k + "=" + quoted(c.Env[k])
		}
	}
	if c.Timeout > 0 {
		text += " for at most " + c.Timeout.String()
	}
	return text
}

func writeText(p params) string {
	switch {
	case p.Append:
		return " at its end"
	case p.At != nil:
		return fmt.Sprintf(" at %d", *p.At)
	}
	return ""
}

// labelText says what became of labels.
func labelText(set map[string]string) string {
	var put, gone []string
	for _, k := range sortedKeys(set) {
		if set[k] == "" {
			gone = append(gone, k)
		} else {
			put = append(put, quoted(k+"="+set[k]))
		}
	}
	var parts []string
	if len(put) > 0 {
		parts = append(parts, "set label "+strings.Join(put, " "))
	}
	if len(gone) > 0 {
		parts = append(parts, "take label "+strings.Join(gone, " ")+" away")
	}
	return strings.Join(parts, ", ")
}
