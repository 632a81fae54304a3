package api_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/api"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

// TestBrokenUploadIsNotRelayedAsWhole breaks an upload before the door; the
// node must not take what came for the whole file.
func TestBrokenUploadIsNotRelayedAsWhole(t *testing.T) {
	d := build(t, nil)
	full(d.local)
	s := open(t, d.url, "a", false)
	box, err := s.Sandboxes.Create(t.Context(), spec, dsec.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	on, f := dsec.Call{Sandbox: box.ID}, dsec.FileOp{Path: "/f"}
	if _, err := s.Files.Write(t.Context(), on, f, dsec.WriteOptions{}, strings.NewReader("old")); err != nil {
		t.Fatal(err)
	}
	fire := errors.New("disk on fire")
	for range 20 {
		_, err = s.Files.Write(t.Context(), on, f, dsec.WriteOptions{}, io.MultiReader(bytes.NewReader(make([]byte, 1<<20)), broken{fire}))
		if !errors.Is(err, fire) {
			t.Fatalf("Write: %v, want the reader's error", err)
		}
	}
	if i, err := s.Files.Stat(t.Context(), on, f); err != nil || i.Size != 3 {
		t.Errorf("after broken writes: %d bytes, %v, want the old 3", i.Size, err)
	}
}

type broken struct{ err error }

func (b broken) Read([]byte) (int, error) { return 0, b.err }

// TestStreamBreaksBehindTheDoor ends a node's answer in the middle: the caller
// sees a break, not an end.
func TestStreamBreaksBehindTheDoor(t *testing.T) {
	d := build(t, nil)
	full(d.local)
	s := open(t, d.url, "a", false)
	box, err := s.Sandboxes.Create(t.Context(), spec, dsec.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	on, f := dsec.Call{Sandbox: box.ID}, dsec.FileOp{Path: "/f"}
	if _, err := s.Files.Write(t.Context(), on, f, dsec.WriteOptions{}, bytes.NewReader(make([]byte, 1<<20))); err != nil {
		t.Fatal(err)
	}
	d.remote.SetFail(func(_ context.Context, op string) error {
		if op == "Files.Read.next" && d.remote.Calls(op) > 20 {
			panic(http.ErrAbortHandler)
		}
		return nil
	})
	rc, err := s.Files.Read(t.Context(), on, f, dsec.ReadRange{})
	if err != nil {
		t.Fatal(err)
	}
	defer rc.Close()
	if b, err := io.ReadAll(rc); dsec.KindOf(err) != dsec.Unavailable || err == nil {
		t.Errorf("%d bytes and %v, want Unavailable", len(b), err)
	}
}

// TestGRPCThroughTheDoor reaches both nodes with gRPC.
func TestGRPCThroughTheDoor(t *testing.T) {
	d := build(t, nil)
	tr := &http.Transport{Protocols: new(http.Protocols)}
	tr.Protocols.SetUnencryptedHTTP2(true)
	defer tr.CloseIdleConnections()
	rc := connect.NewClient(connecthttp.NewTransport(&http.Client{Transport: tr}, d.url, connecthttp.WithGRPC()))
	for _, where := range []string{"fake", "fake2"} {
		if where == "fake2" {
			full(d.local)
		}
		box, err := open(t, d.url, "a", false).Sandboxes.Create(t.Context(), spec, dsec.CreateOptions{})
		if err != nil || box.Node != where {
			t.Fatalf("Create: %q, %v", box.Node, err)
		}
		call := func() context.Context {
			ctx, info := connect.NewClientContext(t.Context())
			info.RequestHeader().Set("Authorization", "Bearer a")
			info.RequestHeader().Set("Dsec-Sandbox", string(box.ID))
			return ctx
		}
		res, err := dsecv1.NewCommandsClient(rc).Run(call(), &dsecv1.CommandsRunRequest{Command: &dsecv1.Command{Shell: "echo hi"}})
		if err != nil || string(res.GetStdout()) != "hi\n" {
			t.Errorf("%s: Run: %v, %v", where, res, err)
		}
		_, err = dsecv1.NewFilesClient(rc).Stat(call(), &dsecv1.FilesStatRequest{File: &dsecv1.File{Path: "/none"}})
		if connect.CodeOf(err) != connect.CodeNotFound {
			t.Errorf("%s: Stat: %v, want not found", where, err)
		}
	}
}

// TestAnswerBeforeTheRequestsEnd lets a node answer while the request is still
// being sent: the relay neither waits for the rest nor breaks the answer off.
func TestAnswerBeforeTheRequestsEnd(t *testing.T) {
	node := listen(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c := http.NewResponseController(w)
		_ = c.EnableFullDuplex()
		first := make([]byte, 1)
		if _, err := io.ReadFull(r.Body, first); err != nil {
			panic(http.ErrAbortHandler)
		}
		_, _ = w.Write(first)
		_ = c.Flush()
		_, _ = io.Copy(w, r.Body)
	}))
	n, closing, err := api.Remote{Name: "n", Number: 1, URL: node, Secret: "s"}.Open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(closing)
	url := listen(t, n.Handler)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	body, send := io.Pipe()
	context.AfterFunc(ctx, func() { send.CloseWithError(ctx.Err()) })
	go func() { _, _ = send.Write([]byte("a")) }()
	r, _ := http.NewRequestWithContext(ctx, http.MethodPost, url, body)
	res, err := (&http.Client{Transport: new(http.Transport)}).Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	got := make([]byte, 1)
	if _, err := io.ReadFull(res.Body, got); err != nil || got[0] != 'a' {
		t.Fatalf("the answer begins with %q, %v, want a", got, err)
	}
	_, _ = send.Write([]byte("bc"))
	send.Close()
	if rest, err := io.ReadAll(res.Body); err != nil || string(rest) != "bc" {
		t.Errorf("the answer goes on with %q, %v, want bc", rest, err)
	}
}
