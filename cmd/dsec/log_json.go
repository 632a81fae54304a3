package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/dsec-go/dsec"
)

// bodyCut is how much of a body log --json shows unless all is asked for.
const bodyCut = 4 << 10

// recordLines prints each record as a line of JSON.
type recordLines struct {
	a    *app
	t    tape
	full bool
}

func (l *recordLines) pause(context.Context) error { return nil }

func (l *recordLines) record(ctx context.Context, r dsec.Record) error {
	o := object{
		{"seq", r.Seq}, {"time", r.Time.UTC().Format(time.RFC3339Nano)}, {"mono", r.Mono.Seconds()}, {"op", r.Op},
	}
	add := func(name string, value any, there bool) {
		if there {
			o = append(o, member{name, value})
		}
	}
	add("of", r.Of, r.Of != 0)
	add("project", r.Who.Project, r.Who.Project != "")
	add("token", r.Who.Token, r.Who.Token != "")
	add("job", r.Who.Job, r.Who.Job != "")
	add("step", object{{"session", r.Step.Session}, {"number", r.Step.Number}}, !r.Step.IsZero())
	add("request", inWords(r.Request), len(r.Request) > 0)
	add("answer", inWords(r.Answer), len(r.Answer) > 0)
	if r.Error != nil {
		add("error", object{{"kind", r.Error.Kind}, {"text", r.Error.Text}}, true)
	}
	if r.Body != "" {
		b, err := l.body(ctx, r)
		if err != nil {
			return fmt.Errorf("read the body of record %d: %w", r.Seq, err)
		}
		add("size", r.Size, true)
		add("blob", r.Blob, r.Blob != "")
		o = append(o, b...)
	}
	add("prev", r.Prev, true)
	add("hash", r.Hash, true)
	b, err := json.Marshal(o)
	if err != nil {
		return fmt.Errorf("encode record %d: %w", r.Seq, err)
	}
	_, err = l.a.Stdout.Write(append(b, '\n'))
	return err
}

// body gives the members for the body of a record: "output", a list of pieces,
// or "content"; "cut" if that is not all.
func (l *recordLines) body(ctx context.Context, r dsec.Record) (o object, err error) {
	limit := int64(bodyCut)
	if l.full {
		limit = 1 << 62
	}
	cut := false
	if r.Body == dsec.BodyContent {
		in, err := l.t.body(ctx, r)
		if err != nil {
			return nil, err
		}
		defer in.Close()
		b, err := io.ReadAll(io.LimitReader(in, limit))
		if err != nil {
			return nil, err
		}
		o, cut = object{{contentName(b), plainBytes(b)}}, int64(len(b)) < r.Size
	} else {
		pieces := []any{}
		for p, err := range l.t.output(ctx, r) {
			if err != nil {
				return nil, err
			}
			if limit == 0 {
				cut = true
				break
			}
			n := min(int64(len(p.Data)), limit)
			cut = cut || n < int64(len(p.Data))
			limit -= n
			pieces = append(pieces, piece(p, p.Data[:n]))
		}
		o = object{{"output", pieces}}
	}
	if cut {
		o = append(o, member{"cut", true})
	}
	return o, nil
}

// piece is one event of output: text where it can be, base64 where it must.
func piece(p dsec.Output, data []byte) object {
	name := "stdout"
	if p.Stream == dsec.Stderr {
		name = "stderr"
	}
	if p.Gap > 0 {
		return object{{"gap", p.Gap}}
	}
	if b, ok := plainBytes(data).([]byte); ok {
		return object{{"stream", name}, {"base64", append([]byte(nil), b...)}}
	}
	return object{{"stream", name}, {"text", string(data)}}
}

// contentName says in which form plainBytes gives b.
func contentName(b []byte) string {
	if _, text := plainBytes(b).(string); text {
		return "content"
	}
	return "contentBase64"
}
