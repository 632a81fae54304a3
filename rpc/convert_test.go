package rpc_test

import (
	"reflect"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

// FuzzMessages gives any bytes as messages of the wire. What they mean must
// stay the same over another trip.
func FuzzMessages(f *testing.F) {
	spec, _ := proto.Marshal(rpc.SpecToWire(dsec.Spec{Env: map[string]string{"\xff": "b"}, Cwd: "/\xfe", Resources: dsec.Resources{Pids: 1 << 40}}))
	cmd, _ := proto.Marshal(rpc.CommandToWire(dsec.Command{Argv: []string{"a", "\xff", ""}, TTY: &dsec.WinSize{Rows: 1}}))
	out, _ := proto.Marshal(rpc.OutputToWire(dsec.Output{Stream: dsec.Stderr, Offset: 3, Gap: 1, Data: []byte("x"), Status: &dsec.CommandStatus{}}))
	for _, s := range [][]byte{nil, spec, cmd, out} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var s dsecv1.Spec
		if proto.Unmarshal(b, &s) == nil {
			first := rpc.SpecFromWire(&s)
			if again := rpc.SpecFromWire(trip(t, rpc.SpecToWire(first))); !same(first, again) {
				t.Errorf("spec %+v came back as %+v", first, again)
			}
		}
		var c dsecv1.Command
		if proto.Unmarshal(b, &c) == nil {
			if first, err := rpc.CommandFromWire(&c); err == nil {
				if again, err := rpc.CommandFromWire(trip(t, rpc.CommandToWire(first))); err != nil || !same(first, again) {
					t.Errorf("command %+v came back as %+v, %v", first, again, err)
				}
			}
		}
		var o dsecv1.Output
		if proto.Unmarshal(b, &o) == nil {
			if first, err := rpc.OutputFromWire(&o); err == nil {
				if again, err := rpc.OutputFromWire(trip(t, rpc.OutputToWire(first))); err != nil || !same(first, again) {
					t.Errorf("output %+v came back as %+v, %v", first, again, err)
				}
			}
		}
	})
}

func trip[M proto.Message](t *testing.T, m M) M {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	proto.Reset(m)
	if err := proto.Unmarshal(b, m); err != nil {
		t.Fatal(err)
	}
	return m
}

// same compares values in which nil and empty mean the same.
func same(a, b any) bool { return equal(reflect.ValueOf(a), reflect.ValueOf(b)) }

func equal(a, b reflect.Value) bool {
	switch a.Kind() {
	case reflect.Slice, reflect.Map:
		if a.Len() == 0 && b.Len() == 0 {
			return true
		}
		if a.Kind() == reflect.Map {
			return reflect.DeepEqual(a.Interface(), b.Interface())
		}
		if a.Len() != b.Len() {
			return false
		}
		for i := range a.Len() {
			if !equal(a.Index(i), b.Index(i)) {
				return false
			}
		}
		return true
	case reflect.Pointer:
		if a.IsNil() || b.IsNil() {
			return a.IsNil() == b.IsNil()
		}
		return equal(a.Elem(), b.Elem())
	case reflect.Struct:
		if a.Type().PkgPath() == "time" {
			return reflect.DeepEqual(a.Interface(), b.Interface())
		}
		for i := range a.NumField() {
			if !equal(a.Field(i), b.Field(i)) {
				return false
			}
		}
		return true
	case reflect.Float64:
		return a.Float() == b.Float() || a.Float() != a.Float()
	}
	return reflect.DeepEqual(a.Interface(), b.Interface())
}
