package wire

import (
	"reflect"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
)

func TestCellCodec(t *testing.T) {
	c := CellCall{
		Warm: "w", Argv: []string{"a", "", "\xff"}, Env: map[string]string{"A": "b"}, User: "u", Dir: "/d",
		Files: []CellFile{{Path: "p", Mode: 0o755, Data: []byte("x")}}, Stdin: []byte("in"), Wall: time.Second, CPU: 2, Memory: 3, Output: 4,
		Pids: 5, Build: "b", BuildAt: "/b", Collect: "/c",
	}
	d := decoder{b: appendCellCall(nil, &c)}
	if got := d.cellCall(); d.bad || len(d.b) > 0 || !reflect.DeepEqual(got, c) {
		t.Errorf("call\n%+v, want\n%+v", got, c)
	}
	r := CellResult{
		End: CellCPU, Code: 3, Signal: "KILL", Detail: "d", Out: []byte("o"), Err: []byte("e"), Stdout: dsec.StreamStat{Total: 9, Kept: 1},
		Stderr: dsec.StreamStat{Total: 1, Kept: 1}, Wall: 7, CPU: 8, Memory: 9, Files: c.Files, TooMuch: true, Broken: true,
	}
	d = decoder{b: appendCellResult(nil, &r)}
	if got := d.cellResult(); d.bad || len(d.b) > 0 || !reflect.DeepEqual(got, r) {
		t.Errorf("result\n%+v, want\n%+v", got, r)
	}
	w := Warm{Name: "n", Argv: []string{"a"}, Env: map[string]string{"A": "b"}}
	d = decoder{b: appendWarm(nil, w)}
	if got := d.warm(); d.bad || !reflect.DeepEqual(got, w) {
		t.Errorf("warm %+v, want %+v", got, w)
	}
}

// FuzzCell decodes what a peer may send: nothing of it ends the program or
// makes much of little.
func FuzzCell(f *testing.F) {
	f.Add(appendCellCall(nil, &CellCall{Argv: []string{"a"}, Files: []CellFile{{Path: "p"}}}))
	f.Add(appendCellResult(nil, &CellResult{Out: []byte("x"), Files: []CellFile{{Path: "p"}}}))
	f.Add(appendWarm(nil, Warm{Name: "n", Argv: []string{"a"}}))
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 0x7f})
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, decode := range []func(*decoder){
			func(d *decoder) { d.cellCall() }, func(d *decoder) { d.cellResult() }, func(d *decoder) { d.warm() }, func(d *decoder) { d.cellFiles() },
		} {
			d := decoder{b: b}
			decode(&d)
			if len(d.b) > len(b) {
				t.Fatal("a decoder made bytes")
			}
		}
	})
}
