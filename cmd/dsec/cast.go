package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/trajectory"
)

// castCut is the most of one command's output in a cast unless all is asked for.
const castCut = 256 << 10

// cast is a session as an asciicast, version 2: what appears on one terminal.
// Commands on a terminal of their own appear as they were; of others there are
// a prompt, the line and the output.
//
// A record says when a command began and ended, when its input came, and in
// which order it printed, but not when it printed what. So output that echoes
// an input begins with that input, and the rest is spread evenly.
type cast struct {
	t      tape
	full   bool
	begin  time.Time
	size   dsec.WinSize
	events []castEvent
}

// castEvent is one line of the file.
type castEvent struct {
	at   time.Time
	kind string // "o" output, "r" a new size of the terminal
	data string
}

// castHeader is the first line of the file.
type castHeader struct {
	Version   int               `json:"version"`
	Width     int               `json:"width"`
	Height    int               `json:"height"`
	Timestamp int64             `json:"timestamp"`
	Idle      float64           `json:"idle_time_limit,omitempty"`
	Title     string            `json:"title"`
	Env       map[string]string `json:"env"`
}

// writeCast writes a trajectory as an asciicast to a file; - is standard output.
func (a *app) writeCast(ctx context.Context, t tape, path string, idle time.Duration, full bool) error {
	all, err := t.whole(ctx)
	if err != nil {
		return err
	}
	c := cast{t: t, full: full, begin: all[0].Time, size: dsec.WinSize{Rows: 24, Cols: 80}}
	for _, r := range all {
		if err := c.take(ctx, all, r); err != nil {
			return fmt.Errorf("record %d: %w", r.Seq, err)
		}
	}
	if path == "-" {
		w := bufio.NewWriter(a.Stdout)
		return errors.Join(c.write(w, idle), w.Flush())
	}
	f, err := os.Create(a.local(path))
	if err != nil {
		return fmt.Errorf("write cast: %w", err)
	}
	w := bufio.NewWriter(f)
	if err = errors.Join(c.write(w, idle), w.Flush(), f.Close()); err != nil {
		return fmt.Errorf("write cast: %w", err)
	}
	return nil
}

func (c *cast) write(w io.Writer, idle time.Duration) error {
	slices.SortStableFunc(c.events, func(a, b castEvent) int { return a.at.Compare(b.at) })
	line := func(v any) error {
		var b bytes.Buffer
		e := json.NewEncoder(&b)
		e.SetEscapeHTML(false)
		if err := e.Encode(v); err != nil {
			return err
		}
		_, err := w.Write(b.Bytes())
		return err
	}
	err := line(castHeader{
		Version: 2, Width: int(c.size.Cols), Height: int(c.size.Rows), Timestamp: c.begin.Unix(), Idle: idle.Seconds(),
		Title: "dsec " + string(c.t.id), Env: map[string]string{"TERM": "xterm-256color", "SHELL": "/bin/sh"},
	})
	for _, e := range c.events {
		if err != nil {
			return err
		}
		at := strconv.FormatFloat(max(e.at.Sub(c.begin), 0).Seconds(), 'f', 6, 64)
		err = line([]any{json.Number(at), e.kind, e.data})
	}
	return err
}

func (c *cast) out(at time.Time, text string) {
	if text != "" {
		c.events = append(c.events, castEvent{at, "o", text})
	}
}

// onTerminal makes text fit a terminal in raw mode.
func onTerminal(text string) string {
	return strings.ReplaceAll(strings.ReplaceAll(text, "\r\n", "\n"), "\n", "\r\n")
}

// take adds what a record shows.
func (c *cast) take(ctx context.Context, all []dsec.Record, r dsec.Record) error {
	switch {
	case isAnswer(r) && r.Op != dsec.RecordCommand:
		if r.Error != nil {
			c.out(r.Time, "\x1b[31m"+onTerminal(printable(r.Error.Text))+"\x1b[m\r\n")
		}
		return nil
	case isAnswer(r):
		return c.ended(ctx, all, all[r.Of-1], r)
	case r.Op == dsec.RecordCommand:
		cmd, err := trajectory.CommandOf(r.Request)
		if err != nil {
			return err
		}
		c.out(r.Time, "\x1b[1m$ "+onTerminal(printableLines(commandLine(cmd)))+"\x1b[m\r\n")
		if cmd.TTY != nil {
			c.resize(r.Time, *cmd.TTY)
		}
		return nil
	}
	p, err := parse[params](r, r.Request)
	if err != nil {
		return err
	}
	switch r.Op {
	case dsec.RecordStdin, dsec.RecordDial:
		return nil // what is fed shows by its echo
	case dsec.RecordResize:
		c.resize(r.Time, p.Size)
		return nil
	}
	words, err := operation(r, p)
	c.out(r.Time, "\x1b[2m# "+printable(words)+"\x1b[m\r\n")
	return err
}

// printableLines is printable but for the ends of lines.
func printableLines(s string) string {
	lines := strings.Split(s, "\n")
	for i := range lines {
		lines[i] = printable(lines[i])
	}
	return strings.Join(lines, "\n")
}

// resize notes a size. The player's terminal is made as large as the largest.
func (c *cast) resize(at time.Time, size dsec.WinSize) {
	c.size.Rows, c.size.Cols = max(c.size.Rows, size.Rows), max(c.size.Cols, size.Cols)
	c.events = append(c.events, castEvent{at, "r", fmt.Sprintf("%dx%d", size.Cols, size.Rows)})
}

// ended adds the output of a command and how it ended.
func (c *cast) ended(ctx context.Context, all []dsec.Record, q, r dsec.Record) error {
	if r.Error != nil {
		c.out(r.Time, "\x1b[31m"+onTerminal(printable(r.Error.Text))+"\x1b[m\r\n")
		return nil
	}
	st, err := trajectory.StatusOf(q, r)
	if err != nil {
		return err
	}
	var data [][]byte
	left := castCut
	for o, err := range c.t.output(ctx, r) {
		if err != nil {
			return err
		}
		if o.Gap > 0 {
			data = append(data, fmt.Appendf(nil, "\n[%s were not kept]\n", size(o.Gap)))
		}
		if left -= len(o.Data); left < 0 && !c.full {
			data = append(data, []byte("\n[and more]\n"))
			break
		}
		if len(o.Data) > 0 {
			data = append(data, bytes.Clone(o.Data))
		}
	}
	end := r.Time
	if !st.Ended.IsZero() && st.Ended.Before(end) && st.Ended.After(q.Time) {
		end = st.Ended
	}
	last := c.spread(data, q.Time, end, c.inputs(all, q, r, st.ID), st.Command.TTY != nil)
	if last != 0 && last != '\n' {
		c.out(end, "\r\n")
	}
	if st.Outcome != dsec.Exited || st.Code != 0 {
		c.out(end, "\x1b[2m["+outcomeText(st)+"]\x1b[m\r\n")
	}
	return nil
}

// castInput is something fed to a command.
type castInput struct {
	at   time.Time
	text []byte
}

// inputs gives what a command was fed while it ran.
func (c *cast) inputs(all []dsec.Record, q, r dsec.Record, id dsec.CommandID) []castInput {
	var in []castInput
	for _, x := range all[q.Seq:r.Seq] {
		if x.Op != dsec.RecordStdin || isAnswer(x) {
			continue
		}
		p, err := parse[params](x, x.Request)
		b, ok := trajectory.InlineBody(x)
		if err == nil && ok && p.Command == id {
			in = append(in, castInput{x.Time, b})
		}
	}
	return in
}

// burst is how long output that follows an input takes at most.
const burst = time.Second

// anchor ties a place in the output to a time.
type anchor struct {
	offset int
	at     time.Time
}

// anchors finds the echo of each input in the output, or what looks like one.
func anchors(data []byte, begin time.Time, in []castInput, tty bool) []anchor {
	list := []anchor{{0, begin}}
	pos := 0
	for _, x := range in {
		echo, _, _ := bytes.Cut(bytes.TrimLeft(x.text, "\r\n"), []byte("\n")) // its first line: a terminal changes its end
		if echo = bytes.TrimRight(echo, "\r"); len(echo) == 0 {
			echo = []byte("\n")
		}
		i := bytes.Index(data[pos:], echo)
		if i < 0 {
			continue
		}
		at := pos + i
		pos = at + len(echo)
		if !tty { // no echo, but an answer: it begins with its line
			at = max(bytes.LastIndexByte(data[:at], '\n')+1, list[len(list)-1].offset)
		}
		list = append(list, anchor{at, x.at})
	}
	return list
}

// spread adds output between begin and end, and gives its last byte.
func (c *cast) spread(pieces [][]byte, begin, end time.Time, in []castInput, tty bool) (last byte) {
	data := bytes.Join(pieces, nil)
	if len(data) == 0 {
		return 0
	}
	ties := append(anchors(data, begin, in, tty), anchor{len(data), end})
	cuts := make([]int, 0, len(pieces)+len(ties)) // where pieces end
	at := 0
	for _, p := range pieces {
		at += len(p)
		cuts = append(cuts, at)
	}
	for _, t := range ties[1:] {
		cuts = append(cuts, t.offset)
	}
	slices.Sort(cuts)
	cuts = slices.Compact(cuts)
	from := 0
	var rest []byte // of a character that is not complete
	for i, t := range ties[:len(ties)-1] {
		next := ties[i+1]
		until := next.at
		if i+2 < len(ties) && until.Sub(t.at) > burst {
			until = t.at.Add(burst)
		}
		var own []int
		for _, x := range cuts {
			if x > t.offset && x <= next.offset {
				own = append(own, x)
			}
		}
		for k, x := range own {
			part := append(rest, data[from:x]...)
			part, rest = wholeCharacters(part)
			from = x
			text := strings.ToValidUTF8(string(part), "\uFFFD")
			if !tty {
				text = onTerminal(text)
			}
			c.out(t.at.Add(until.Sub(t.at)*time.Duration(k+1)/time.Duration(len(own))), text)
		}
	}
	c.out(end, strings.ToValidUTF8(string(rest), "\uFFFD"))
	return data[len(data)-1]
}

// wholeCharacters cuts off the beginning of a character whose rest is to come.
func wholeCharacters(b []byte) (whole, rest []byte) {
	for i := len(b) - 1; i >= max(0, len(b)-utf8.UTFMax); i-- {
		if utf8.RuneStart(b[i]) {
			if !utf8.FullRune(b[i:]) {
				return b[:i], bytes.Clone(b[i:])
			}
			break
		}
	}
	return b, nil
}
