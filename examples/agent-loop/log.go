package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"
)

// The kinds of events.
const (
	kindBegin  = "begin"  // the sandbox and what it is asked to do
	kindAct    = "act"    // what is run next
	kindSee    = "see"    // what came of it
	kindFinish = "finish" // the model's answer
)

// event is one thing that happened. Events are numbered from 1.
type event struct {
	Seq      uint64        `json:"seq"`
	Time     time.Time     `json:"time"`
	Kind     string        `json:"kind"`
	Text     string        `json:"text"` // task, command line, output or answer
	Session  string        `json:"session,omitempty"`
	Image    string        `json:"image,omitempty"`
	Code     int           `json:"code,omitempty"`
	Took     time.Duration `json:"took,omitempty"`
	Replayed bool          `json:"replayed,omitempty"` // answered from the node's record
	Of       string        `json:"of,omitempty"`       // of a fork: the session that this was copied from
}

// eventLog is a file of events, one a line. What append returned for is on the disk.
type eventLog struct {
	f      *os.File
	events []event
}

func openLog(path string) (*eventLog, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	l := &eventLog{f: f}
	var size int64
	for r := bufio.NewReader(f); ; {
		line, err := r.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			break // half a line is what a crash left
		}
		if err != nil {
			return nil, err
		}
		var e event
		if err := json.Unmarshal(line, &e); err != nil {
			return nil, fmt.Errorf("read event %d: %w", len(l.events)+1, err)
		}
		if e.Seq != uint64(len(l.events))+1 {
			return nil, fmt.Errorf("read event %d: it has the number %d", len(l.events)+1, e.Seq)
		}
		l.events = append(l.events, e)
		size += int64(len(line))
	}
	return l, f.Truncate(size)
}

func (l *eventLog) close() { l.f.Close() }

func (l *eventLog) append(e event) error {
	e.Seq, e.Time = uint64(len(l.events))+1, time.Now().UTC()
	b, err := json.Marshal(e)
	if err != nil {
		return err
	}
	if _, err := l.f.Write(append(b, '\n')); err != nil {
		return err
	}
	if err := l.f.Sync(); err != nil {
		return err
	}
	l.events = append(l.events, e)
	return nil
}

// last gives the newest event; the zero one of an empty log.
func (l *eventLog) last() event {
	if len(l.events) == 0 {
		return event{}
	}
	return l.events[len(l.events)-1]
}

// trace prints the events behind a number.
func (l *eventLog) trace(w io.Writer, after uint64) error {
	out := json.NewEncoder(w)
	for _, e := range l.events[min(after, uint64(len(l.events))):] {
		if err := out.Encode(e); err != nil {
			return err
		}
	}
	return nil
}
