package fncall_test

import (
	"testing"

	"github.com/dsec-go/dsec"
)

func benchmarkCall(b *testing.B, f dsec.Function) {
	r := newRig(b)
	r.want(f, dsec.FunctionOK, "hi\n")
	for b.Loop() {
		r.want(f, dsec.FunctionOK, "hi\n")
	}
}

func BenchmarkPython(b *testing.B) { benchmarkCall(b, python("print('hi')")) }
func BenchmarkShell(b *testing.B)  { benchmarkCall(b, shell("echo hi")) }
