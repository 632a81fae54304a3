// Command rollout-worker is an example: a worker that runs inside a sandbox,
// drives other sandboxes through its loopback, and serves a trainer over a port.
//
//	dsec create --image IMAGE --api --ttl 1d             # the worker's sandbox
//	dsec exec ID -- rollout-worker --state /state.jsonl  # runs on when the caller goes
//
// The trainer connects through the node (dsec.Ports, or dsec ports ID 9000), says
// what it wants and what it has, and reads results; each is one line of JSON:
//
//	-> {"submit":[{"id":"t1","image":"debian","steps":["make","make test"]}],"after":0}
//	<- {"seq":1,"task":"t1","step":1,"code":0,"out":"..."}
//	<- {"seq":2,"task":"t1","step":2,"code":1,"out":"...","done":true}
//
// What rollouts there are, and how far, is the worker's: in a log in its own
// sandbox. A trainer that dies and comes back repeats its line with the sequence
// number it has seen last and goes on there; nothing is replayed, and the
// rollouts did not wait for it. A worker that dies and is started again goes on
// from its log; steps have keys, so what ran does not run again.
//
// Read next: worker.go.
package main

import (
	"context"
	"flag"
	"log"
	"net"
	"os"
	"os/signal"
	"syscall"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/client"
)

func main() {
	listen := flag.String("listen", "127.0.0.1:9000", "`address` for the trainer")
	state := flag.String("state", "rollouts.jsonl", "`file` that keeps the rollouts")
	parallel := flag.Int("parallel", 4, "rollouts at a time")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *listen, *state, *parallel); err != nil {
		log.Fatalf("rollout-worker: %v", err)
	}
}

func run(ctx context.Context, listen, state string, parallel int) error {
	s, err := client.Open(client.Config{URL: os.Getenv(dsec.EnvURL), Token: os.Getenv(dsec.EnvToken)})
	if err != nil {
		return err
	}
	w, err := openWorker(s, state, parallel)
	if err != nil {
		return err
	}
	defer w.close()
	l, err := net.Listen("tcp", listen)
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { l.Close() })()
	go w.run(ctx)
	for {
		c, err := l.Accept()
		if err != nil {
			return ctx.Err()
		}
		go func() {
			defer c.Close()
			if err := w.serve(ctx, c); err != nil {
				log.Printf("trainer: %v", err)
			}
		}()
	}
}
