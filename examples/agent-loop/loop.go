package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"time"

	"github.com/dsec-go/dsec"
)

// model decides what an agent does next, from all that happened. It is asked
// again with the same events after a crash, and need not answer the same.
type model interface {
	next(ctx context.Context, events []event) (line string, done bool, err error)
}

// script is a model that looks around and then answers.
type script struct{}

func (script) next(_ context.Context, events []event) (string, bool, error) {
	lines := []string{"pwd", "ls /", "id -u"}
	acts := 0
	for _, e := range events {
		if e.Kind == kindAct {
			acts++
		}
	}
	if acts < len(lines) {
		return lines[acts], false, nil
	}
	return "the last look says: " + events[len(events)-1].Text, true, nil
}

// agent is the loop.
type agent struct {
	s     dsec.Services
	log   *eventLog
	model model
}

// run goes on from the end of the log to the model's answer.
func (a *agent) run(ctx context.Context, image, goal string) error {
	if len(a.log.events) == 0 {
		if err := a.log.append(event{Kind: kindBegin, Text: goal, Image: image, Session: rand.Text()}); err != nil {
			return err
		}
	}
	begin := a.log.events[0]
	sb, err := open(ctx, a.s, begin)
	if err != nil {
		return err
	}
	for {
		last := a.log.last()
		switch last.Kind {
		case kindFinish:
			_, err := a.s.Sandboxes.Stop(ctx, sb.ID)
			return err
		case kindAct:
			e, err := act(ctx, a.s, sb.ID, begin.Session, last)
			if err != nil {
				return err
			}
			if err := a.log.append(e); err != nil {
				return err
			}
			continue
		}
		line, done, err := a.model.next(ctx, a.log.events)
		if err != nil {
			return err
		}
		e := event{Kind: kindAct, Text: line}
		if done {
			e.Kind = kindFinish
		}
		if err := a.log.append(e); err != nil {
			return err
		}
	}
}

// open gives the agent's sandbox: the key makes it the same one every time.
func open(ctx context.Context, s dsec.Services, begin event) (dsec.Sandbox, error) {
	spec := dsec.Spec{Environment: dsec.Environment{Base: begin.Image}, Labels: map[string]string{"agent": begin.Session}}
	return s.Sandboxes.Create(ctx, spec, dsec.CreateOptions{Key: "agent/" + begin.Session})
}

// act runs an action as the step that its number in the log makes it.
func act(ctx context.Context, s dsec.Services, id dsec.SandboxID, session string, e event) (event, error) {
	began := time.Now()
	on := dsec.Call{Sandbox: id, Step: dsec.Step{Session: session, Number: e.Seq}}
	r, err := s.Commands.Run(ctx, on, dsec.Command{Shell: e.Text, Timeout: time.Minute}, nil)
	if err != nil {
		return event{}, err
	}
	return event{Kind: kindSee, Text: string(r.Out) + string(r.Err), Code: r.Code, Took: time.Since(began), Replayed: r.Replayed}, nil
}

// fork begins a log with the first events of another. Its sandbox comes to be as
// that of the other did: by the same actions, whose results must be the same.
func fork(ctx context.Context, s dsec.Services, from *eventLog, at uint64, to string) error {
	if at < 1 || at > uint64(len(from.events)) {
		return fmt.Errorf("fork at %d: the log has events 1 to %d", at, len(from.events))
	}
	l, err := openLog(to)
	if err != nil {
		return err
	}
	defer l.close()
	old := from.events[0].Session
	var sb dsec.Sandbox
	for i, e := range from.events[:at] {
		if i < len(l.events) && i > 0 {
			continue // an earlier attempt came so far
		}
		switch e.Kind {
		case kindBegin:
			if len(l.events) == 0 {
				e.Session, e.Of = rand.Text(), old
				if err := l.append(e); err != nil {
					return err
				}
			}
			if sb, err = open(ctx, s, l.events[0]); err != nil {
				return err
			}
			continue
		case kindSee:
			again, err := act(ctx, s, sb.ID, l.events[0].Session, l.last())
			if err != nil {
				return err
			}
			if again.Code != e.Code || again.Text != e.Text {
				return fmt.Errorf("fork: event %d is not the same in the new sandbox: %q, was %q", e.Seq, again.Text, e.Text)
			}
		}
		e.Of = old
		if err := l.append(e); err != nil {
			return err
		}
	}
	return nil
}
