package client_test

import (
	"context"
	"iter"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/client"
	"github.com/dsec-go/dsec/rpc"
)

// callee is a dsec.Functions that remembers what it was asked for.
type callee struct {
	called dsec.Function
	batch  dsec.FunctionBatch
	result dsec.FunctionResult
	items  []dsec.FunctionItem
	err    error
}

func (c *callee) Call(_ context.Context, f dsec.Function) (dsec.FunctionResult, error) {
	c.called = f
	return c.result, c.err
}

func (c *callee) Batch(_ context.Context, b dsec.FunctionBatch) iter.Seq2[dsec.FunctionItem, error] {
	c.batch = b
	return func(yield func(dsec.FunctionItem, error) bool) {
		for _, i := range c.items {
			if !yield(i, nil) {
				return
			}
		}
		if c.err != nil {
			yield(dsec.FunctionItem{}, c.err)
		}
	}
}

func TestFunctions(t *testing.T) {
	c := &callee{result: dsec.FunctionResult{
		Outcome: dsec.FunctionTimeout, Limit: dsec.LimitCPU, Code: 124, Signal: "KILL", Detail: "d", Out: []byte("out\xff"), Err: []byte("err"),
		Stdout: dsec.StreamStat{Total: 100, Kept: 4}, Stderr: dsec.StreamStat{Total: 3, Kept: 3},
		Wall: 1500 * time.Millisecond, CPU: time.Second, Memory: 1 << 20, Warm: true,
	}}
	url := serve(t, rpc.Handler(dsec.Services{Functions: c}, rpc.Options{}))
	s, err := client.Open(client.Config{URL: url})
	if err != nil {
		t.Fatal(err)
	}
	f := dsec.Function{
		Environment: dsec.Environment{Base: "debian", Workspace: "task", Toolkits: []string{"a"}}, Project: "p",
		Runtime: dsec.RuntimePython, Preload: []string{"json"}, Source: []byte("s\x00\xff"),
		Files: []dsec.FunctionFile{{Path: "a/" + odd, Mode: 0o755, Data: []byte("d")}},
		Args:  []string{"x", odd}, Stdin: []byte("in"), Env: map[string]string{"A": "b", "ODD": odd}, User: "1000",
		Limits: dsec.FunctionLimits{CPU: time.Second, Wall: 2 * time.Second, Memory: 64 << 20, Output: 100, Pids: 5},
	}
	r, err := s.Functions.Call(t.Context(), f)
	if err != nil || !reflect.DeepEqual(r, c.result) {
		t.Errorf("result\n%#v (%v), want\n%#v", r, err, c.result)
	}
	if !reflect.DeepEqual(c.called, f) {
		t.Errorf("the node was asked for\n%#v, want\n%#v", c.called, f)
	}

	b := dsec.FunctionBatch{Function: f, AtATime: 3, Cases: []dsec.FunctionCase{
		{}, {Source: []byte("t"), Args: []string{odd}, Stdin: []byte{}, Env: map[string]string{"X": odd}, Limits: dsec.FunctionLimits{CPU: time.Second}},
	}}
	c.items = []dsec.FunctionItem{{Index: 1, Result: c.result}, {Index: 0, Err: dsec.Errorf(dsec.Exhausted, "full")}}
	var got []dsec.FunctionItem
	for i, err := range s.Functions.Batch(t.Context(), b) {
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, i)
	}
	if !reflect.DeepEqual(c.batch, b) {
		t.Errorf("the node was asked for\n%#v, want\n%#v", c.batch, b)
	}
	if len(got) != 2 || !reflect.DeepEqual(got[0], c.items[0]) || got[1].Index != 0 || dsec.KindOf(got[1].Err) != dsec.Exhausted || !strings.Contains(got[1].Err.Error(), "full") {
		t.Errorf("items are %#v", got)
	}

	c.err, c.items = dsec.Errorf(dsec.Unsupported, "no go here"), c.items[:1]
	if _, err := s.Functions.Call(t.Context(), f); dsec.KindOf(err) != dsec.Unsupported || !strings.Contains(err.Error(), "no go here") {
		t.Errorf("refused call: %v", err)
	}
	var last error
	for _, err := range s.Functions.Batch(t.Context(), b) {
		last = err
	}
	if dsec.KindOf(last) != dsec.Unsupported {
		t.Errorf("a batch that breaks off ends with %v", last)
	}
}

// TestFunctionsHaveNoNames refuses what would make a call repeatable by name:
// nothing is recorded, so it would run twice.
func TestFunctionsHaveNoNames(t *testing.T) {
	c := &callee{}
	url := serve(t, rpc.Handler(dsec.Services{Functions: c}, rpc.Options{}))
	for _, h := range []string{rpc.HeaderStep, rpc.HeaderKey} {
		q, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/dsec.v1.Functions/Call", strings.NewReader(`{"function":{"runtime":"sh"}}`))
		if err != nil {
			t.Fatal(err)
		}
		q.Header.Set("Content-Type", "application/json")
		q.Header.Set(h, "s:1")
		a, err := http.DefaultClient.Do(q)
		if err != nil {
			t.Fatal(err)
		}
		a.Body.Close()
		if a.StatusCode != http.StatusNotImplemented || c.called.Runtime != "" {
			t.Errorf("a call with %s: status %d, called %v", h, a.StatusCode, c.called.Runtime != "")
		}
	}
}
