// Command dsec is DSec's one program: the client commands that a person or a
// script uses, and "dsec up", which runs a whole node with its front door in
// one process.
//
// It composes and prints; it decides nothing about sandboxes. A client command
// is a struct whose fields are its flags and whose Run talks to dsec.Services
// through the client, so the tests run every command against a fake or a real
// server without a second process. "dsec up" is the struct Up, readable from
// the inside out: its fields are its settings, its Run the order in which the
// parts are made.
//
// Invariants:
//   - Data goes to standard output, everything else to standard error.
//     Progress shows on a terminal only, so a pipe sees data and errors alone.
//   - A failure is one line, "dsec: ...", and exit status 1; 2 for a command
//     line that cannot be understood. exec and run keep 125 for both, because
//     their other statuses are the command's own.
//   - A token never leaves for a server other than the one it was made for.
//
// Read next: cli.go for the grammar, exec.go for the longest command, up.go for
// the node.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"

	"github.com/alecthomas/kong"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/client"
)

// The exit statuses that are dsec's own.
const (
	statusFailed   = 1
	statusUsage    = 2
	statusTimedOut = 124 // a command was ended at its timeout
	statusExec     = 125 // exec, run or fn: dsec itself could not do it
)

func main() {
	a := &app{
		Stdin:   os.Stdin,
		Stdout:  os.Stdout,
		Stderr:  os.Stderr,
		Getenv:  os.Getenv,
		Connect: client.Open,
		Notify:  notify,
	}
	os.Exit(a.main(context.Background(), os.Args[1:]))
}

// app is what a command may touch of the world. Tests fill it with buffers and
// a fake server.
type app struct {
	Stdin  io.Reader
	Stdout io.Writer
	Stderr io.Writer
	Getenv func(string) string
	Dir    string // what local paths are relative to; empty means the working directory

	// Connect gives the services of a server.
	Connect func(client.Config) (dsec.Services, error)

	// Notify delivers signals until stop is called.
	Notify func(sigs ...os.Signal) (ch <-chan os.Signal, stop func())
}

func notify(sigs ...os.Signal) (<-chan os.Signal, func()) {
	ch := make(chan os.Signal, 4)
	signal.Notify(ch, sigs...)
	return ch, func() { signal.Stop(ch) }
}

// local gives the path on this machine that an argument means. It is not
// cleaned: a slash or dot at its end has a meaning.
func (a *app) local(path string) string {
	if a.Dir == "" || filepath.IsAbs(path) {
		return path
	}
	return a.Dir + string(filepath.Separator) + path
}

// exitStatus is an error that says no more than how the program ends: the
// command's own status, or one whose reason was already printed.
type exitStatus int

func (s exitStatus) Error() string { return fmt.Sprintf("exit status %d", int(s)) }

// helpShown unwinds the parser after it printed a help text.
type helpShown struct{ code int }

// main runs one command line and returns the exit status.
func (a *app) main(ctx context.Context, args []string) (code int) {
	defer func() {
		if r := recover(); r != nil {
			h, ok := r.(helpShown)
			if !ok {
				panic(r)
			}
			code = h.code
		}
	}()
	var c cli
	c.Bench.Plugins = benchPlugins
	parser, err := kong.New(&c,
		kong.Name("dsec"),
		kong.Description(description),
		kong.Writers(a.Stdout, a.Stderr),
		kong.Exit(func(code int) { panic(helpShown{code}) }),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, WrapUpperBound: 100}),
		kong.ValueFormatter(helpText),
		kong.KindMapper(reflect.String, kong.MapperFunc(exactString)),
		kong.KindMapper(reflect.Int, kong.MapperFunc(number)),
		kong.KindMapper(reflect.Float64, kong.MapperFunc(fraction)),
		kong.TypeMapper(reflect.TypeFor[byteSize](), kong.MapperFunc(textual)),
		kong.TypeMapper(reflect.TypeFor[span](), kong.MapperFunc(textual)),
		kong.TypeMapper(reflect.TypeFor[stepFlag](), kong.MapperFunc(textual)),
		kong.TypeMapper(reflect.TypeFor[kindFlag](), kong.MapperFunc(textual)),
		kong.BindTo(ctx, (*context.Context)(nil)),
		kong.Bind(a),
	)
	if err != nil {
		panic(err) // the grammar itself is wrong
	}
	if len(args) == 0 {
		args = []string{"--help"}
	}
	k, err := parser.Parse(args)
	if err == nil {
		err = checkTogether(k)
	}
	if err != nil {
		fmt.Fprintf(a.Stderr, "dsec: %v\n", err)
		if pe := (*kong.ParseError)(nil); errors.As(err, &pe) {
			k = pe.Context
		}
		if k != nil {
			fmt.Fprintf(a.Stderr, "dsec: see: dsec %s--help\n", commandPath(k))
		}
		return failure(args, statusUsage)
	}
	if err := k.Run(); err != nil {
		var s exitStatus
		if errors.As(err, &s) {
			return int(s)
		}
		fmt.Fprintf(a.Stderr, "dsec: %s\n", explain(err))
		return failure(args, statusFailed)
	}
	return 0
}

// failure is the exit status of a failed command line: other for most, 125 for
// those that hand on the status of what they run.
func failure(args []string, other int) int {
	for _, arg := range args {
		if strings.HasPrefix(arg, "-") {
			continue
		}
		if arg == "exec" || arg == "run" || arg == "replay" || arg == "fn" {
			return statusExec
		}
		break
	}
	return other
}

// commandPath gives the commands of a parsed or half-parsed line: "image ls ".
func commandPath(k *kong.Context) string {
	var b strings.Builder
	for _, p := range k.Path {
		if p.Command != nil {
			b.WriteString(p.Command.Name)
			b.WriteByte(' ')
		}
	}
	return b.String()
}

// explain gives err as one line, with what to do about it where that is known.
func explain(err error) string {
	text := strings.Join(strings.FieldsFunc(err.Error(), func(r rune) bool { return r == '\n' || r == '\r' }), "; ")
	if hint := hintFor(err); hint != "" {
		text += " (" + hint + ")"
	}
	return text
}

func hintFor(err error) string {
	var op *net.OpError
	var answer *dsec.Error
	answered := errors.As(err, &answer) && answer.Request != "" // then it is no server of ours that refused
	refused := !answered && (errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ENOENT) && errors.As(err, &op) ||
		dsec.KindOf(err) == dsec.Unavailable && strings.Contains(err.Error(), "connection refused"))
	switch {
	case refused:
		return "is `dsec up` running?"
	case dsec.KindOf(err) == dsec.Unauthenticated:
		return "set DSEC_TOKEN, or use the account that runs `dsec up`"
	case dsec.KindOf(err) == dsec.Exhausted && strings.Contains(err.Error(), "of its quota"):
		return "see `dsec project ls`"
	case dsec.KindOf(err) == dsec.Exhausted:
		return "see `dsec node ls`"
	}
	return ""
}
