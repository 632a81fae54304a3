package rpc_test

import (
	"net/http/httptest"
	"testing"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc"
	"github.com/dsec-go/dsec/rpc/dsecv1"
	"github.com/dsec-go/dsec/rpc/rpctest"
)

// TestPortCalls makes the calls of a connection one by one: what is repeated is
// harmless, and what nobody uses is closed.
func TestPortCalls(t *testing.T) {
	f := rpctest.New()
	srv := httptest.NewServer(rpc.Handler(f.Services(), rpc.Options{PortIdle: time.Second}))
	defer srv.Close()
	b, err := f.Services().Sandboxes.Create(t.Context(), dsec.Spec{Environment: dsec.Environment{Base: "d"}}, dsec.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	c := dsecv1.NewPortsClient(connect.NewClient(connecthttp.NewTransport(srv.Client(), srv.URL)))
	ctx, info := connect.NewClientContext(t.Context())
	info.RequestHeader().Set("Dsec-Sandbox", string(b.ID))

	dial, err := c.Dial(ctx, &dsecv1.PortsDialRequest{Port: 7})
	if err != nil {
		t.Fatal(err)
	}
	in, err := c.Receive(ctx, &dsecv1.PortsReceiveRequest{Conn: dial.GetConn()})
	if err != nil {
		t.Fatal(err)
	}
	send := func(offset int64, data string, last bool) (int64, error) {
		res, err := c.Send(ctx, &dsecv1.PortsSendRequest{Conn: dial.GetConn(), Offset: offset, Data: []byte(data), Close: last})
		return res.GetOffset(), err
	}
	for _, x := range []struct {
		offset int64
		data   string
		last   bool
		want   int64
	}{{0, "abc", false, 3}, {0, "abc", false, 3}, {2, "cde", false, 5}, {5, "", true, 5}, {5, "", true, 5}, {0, "ab", false, 5}} {
		if off, err := send(x.offset, x.data, x.last); err != nil || off != x.want {
			t.Errorf("Send(%d, %q): %d, %v, want %d", x.offset, x.data, off, err, x.want)
		}
	}
	if _, err := send(9, "x", false); connect.CodeOf(err) != connect.CodeInvalidArgument {
		t.Errorf("Send with a gap: %v, want Invalid", err)
	}
	if _, err := send(5, "x", false); connect.CodeOf(err) != connect.CodeFailedPrecondition {
		t.Errorf("Send after the close: %v, want Conflict", err)
	}
	var got []byte
	for {
		m, err := in.Receive()
		if err != nil {
			break
		}
		got = append(got, m.GetData()...)
	}
	if string(got) != "abcdebye" {
		t.Errorf("received %q", got)
	}
	again, err := c.Receive(ctx, &dsecv1.PortsReceiveRequest{Conn: dial.GetConn()})
	if err == nil {
		_, err = again.Receive()
		again.Close()
	}
	if code := connect.CodeOf(err); code != connect.CodeFailedPrecondition && code != connect.CodeNotFound {
		t.Errorf("Receive again: %v, want Conflict, or NotFound once it is idle", err)
	}

	// Another one that nobody uses is closed. Asking is using, so ask after
	// the idle time only.
	dial, err = c.Dial(ctx, &dsecv1.PortsDialRequest{Port: 7})
	if err != nil {
		t.Fatal(err)
	}
	for pause := 1100 * time.Millisecond; ; pause *= 2 {
		<-time.After(pause)
		if _, err = send(0, "", false); connect.CodeOf(err) == connect.CodeNotFound {
			break
		}
		if pause > 5*time.Second {
			t.Fatalf("the idle connection is open: %v", err)
		}
	}
	if _, err := c.Close(ctx, &dsecv1.PortsCloseRequest{Conn: dial.GetConn()}); err != nil {
		t.Errorf("Close of a closed one: %v", err)
	}
}
