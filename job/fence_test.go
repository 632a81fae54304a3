package job_test

import (
	"context"
	"reflect"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
)

// none are services that are never reached: a call that passes the fence is a
// nil dereference.
type none struct {
	dsec.Commands
	dsec.Files
	dsec.Ports
}

// Every call on a sandbox, in every service, is fenced; a method that is added
// to a contract and forgotten here passes through, and fails this test. The
// epoch comes by the call or by the context.
func TestEveryCallIsFenced(t *testing.T) {
	r := newRig(t)
	j := r.make("train", "", time.Minute)
	box := r.fill("train", j.Epoch, 1)[0].Sandbox
	if _, err := r.jobs.Open(t.Context(), "train"); err != nil {
		t.Fatal(err)
	}
	r.get("train")
	n := &none{}
	s := r.jobs.Fence(dsec.Services{Sandboxes: r.node, Commands: n.Commands, Files: n.Files, Ports: n.Ports})
	if s.Commands != nil || s.Files != nil || s.Ports != nil {
		t.Error("a service that is not there was fenced")
	}
	s = r.jobs.Fence(dsec.Services{Sandboxes: r.node, Commands: struct{ dsec.Commands }{}, Files: struct{ dsec.Files }{}, Ports: struct{ dsec.Ports }{}})
	job := spec()
	job.Job = "train"
	for _, service := range []any{s.Sandboxes, s.Commands, s.Files, s.Ports} {
		v := reflect.ValueOf(service)
		for i := range v.NumMethod() {
			m, name := v.Method(i), v.Type().String()+"."+v.Type().Method(i).Name
			if v.Type().Method(i).Name == "List" && service == s.Sandboxes {
				continue // is of no sandbox
			}
			for _, by := range []string{"context", "call"} {
				ctx, on, takes := t.Context(), dsec.Call{Sandbox: box.ID}, false
				if by == "context" {
					ctx = dsec.WithEpoch(ctx, 1)
				} else {
					on.Epoch = 1
				}
				args := []reflect.Value{reflect.ValueOf(ctx)}
				for k := 1; k < m.Type().NumIn(); k++ {
					switch in := m.Type().In(k); in {
					case reflect.TypeFor[dsec.Call]():
						takes = true
						args = append(args, reflect.ValueOf(on))
					case reflect.TypeFor[dsec.SandboxID]():
						args = append(args, reflect.ValueOf(box.ID))
					case reflect.TypeFor[dsec.Spec]():
						args = append(args, reflect.ValueOf(job))
					default:
						args = append(args, reflect.Zero(in))
					}
				}
				if by == "call" && !takes {
					continue
				}
				if err := errorOf(m.Call(args)); err == nil || dsec.KindOf(err) != dsec.Conflict {
					t.Errorf("%s, epoch by the %s: %v, want Conflict", name, by, err)
				}
			}
		}
	}
}

// errorOf gives the error of a call's results, also of the first step of a
// sequence.
func errorOf(out []reflect.Value) (err error) {
	last := out[len(out)-1]
	if last.Kind() != reflect.Func {
		err, _ = last.Interface().(error)
		return err
	}
	last.Call([]reflect.Value{reflect.MakeFunc(last.Type().In(0), func(args []reflect.Value) []reflect.Value {
		err, _ = args[1].Interface().(error)
		return []reflect.Value{reflect.ValueOf(false)}
	})})
	return err
}

// What Fence gives is whole: a create of an owner is cut off when the job is
// opened anew.
func TestCreateIsCutOff(t *testing.T) {
	r := newRig(t)
	r.make("train", "", time.Minute)
	begun, ended := make(chan struct{}), make(chan error)
	r.node.set(func() {
		r.node.create = func(ctx context.Context, _ dsec.Spec) error {
			close(begun)
			<-ctx.Done()
			return context.Cause(ctx)
		}
	})
	go func() {
		s := spec()
		s.Job = "train"
		_, err := r.s.Sandboxes.Create(dsec.WithEpoch(t.Context(), 1), s, dsec.CreateOptions{})
		ended <- err
	}()
	<-begun
	if _, err := r.jobs.Open(t.Context(), "train"); err != nil {
		t.Fatal(err)
	}
	wantKind(t, "the create", <-ended, dsec.Conflict)
	r.node.set(func() { r.node.create = nil })
}
