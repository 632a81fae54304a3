package driver

import (
	"context"
	"errors"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/wire"
)

// Celler is a Guest that can run commands in cells: each with a root that is
// the machine's as it was made, no process, file or name of another, and
// control groups of its own. Once a machine was started with Config.Cells, its
// ordinary commands run in cells too.
type Celler interface {
	// Warm starts a program that forks itself into cells; Invalid, with what it
	// said, if it ends instead. A second program of the same name is nothing
	// new.
	Warm(ctx context.Context, w wire.Warm) error

	// Stage keeps files under a name, for cells that name them as their Build.
	Stage(ctx context.Context, name string, files []wire.CellFile) error

	// CallCell makes a cell, runs one command in it and ends it with all that
	// is in it. It is NotFound for a warm program or a stage that is not there.
	// Unsupported on a machine without cells.
	CallCell(ctx context.Context, c wire.CellCall) (wire.CellResult, error)
}

// Caller is a Machine of kind fncall: it calls functions. One call at a time is
// what isolates them best; it is the caller's to see to that.
type Caller interface {
	Machine

	// Prepare makes ready for calls of a runtime with modules preloaded.
	// Unsupported if the environment lacks the runtime, Invalid if a module
	// cannot be imported.
	Prepare(ctx context.Context, r dsec.Runtime, preload []string) error

	// Compile builds the source of f. A source that cannot be built is no
	// error: the Build is nil and the result is that of the call.
	Compile(ctx context.Context, f dsec.Function) (*Build, dsec.FunctionResult, error)

	// Call runs f, whose source is in b if its runtime compiles.
	Call(ctx context.Context, f dsec.Function, b *Build) (dsec.FunctionResult, error)
}

// Build is what a compiler made of a source. It is never changed and runs on
// every machine of the same environment.
type Build struct {
	Digest string
	Files  []wire.CellFile
}

// ErrBroken says that a machine is of no more use for calls, whatever became
// of the one under way.
var ErrBroken = errors.New("the machine cannot be used again")

// CompileMemory is what a compilation may use: a machine that compiles has it.
const CompileMemory = 1 << 30
