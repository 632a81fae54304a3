// Command agent-loop is an example: a durable agent loop in one sandbox. What
// the agent did and saw is an event log with sequence numbers; the loop can be
// killed at any instant and resumed, followed from any number, forked at any
// number, and printed as a trace.
//
//	agent-loop run --log a.jsonl --image debian "find the largest file"
//	agent-loop run --log a.jsonl                      # again: goes on where it was
//	agent-loop fork --log a.jsonl --at 4 --to b.jsonl # another future of the first 4
//	agent-loop trace --log a.jsonl --after 2
//
// The log says what is to be run before it is run, and each action is a step of
// the log's session: if the loop dies in between, the node answers the repeated
// step from its record, and nothing runs twice. The model is a stand-in with a
// script; a real one is another implementation of model.
//
// Server and token come from DSEC_URL and DSEC_TOKEN, so the loop runs the same
// inside a sandbox that has an API.
//
// Read next: loop.go, log.go.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/client"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "agent-loop:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 {
		return fmt.Errorf("say run, fork or trace")
	}
	flags := flag.NewFlagSet(args[0], flag.ContinueOnError)
	path := flags.String("log", "agent.jsonl", "`file` of the event log")
	image := flags.String("image", "debian", "image of a new agent's sandbox")
	at := flags.Uint64("at", 0, "fork: the last event that both have")
	to := flags.String("to", "fork.jsonl", "fork: `file` of the new log")
	after := flags.Uint64("after", 0, "trace: the last event that is known")
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	l, err := openLog(*path)
	if err != nil {
		return err
	}
	defer l.close()
	if args[0] == "trace" {
		return l.trace(os.Stdout, *after)
	}
	s, err := client.Open(client.Config{URL: os.Getenv(dsec.EnvURL), Token: os.Getenv(dsec.EnvToken)})
	if err != nil {
		return err
	}
	switch args[0] {
	case "run":
		a := agent{s: s, log: l, model: script{}}
		return a.run(ctx, *image, strings.Join(flags.Args(), " "))
	case "fork":
		return fork(ctx, s, l, *at, *to)
	}
	return fmt.Errorf("%s is not run, fork or trace", args[0])
}
