package guest

import (
	"context"
	"net"
	"strconv"

	"github.com/dsec-go/dsec"
)

// ports is the agent as dsec.Ports.
type ports struct{}

func (ports) Dial(ctx context.Context, _ dsec.Call, port int) (dsec.PortConn, error) {
	if port < 1 || port > 65535 {
		return nil, dsec.Errorf(dsec.Invalid, "port %d is not between 1 and 65535", port)
	}
	var d net.Dialer
	var first error
	for _, host := range []string{"127.0.0.1", "::1"} {
		c, err := d.DialContext(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(port)))
		if err == nil {
			return c.(*net.TCPConn), nil
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if first == nil {
			first = err
		}
	}
	return nil, dsec.Errorf(dsec.Unavailable, "dial port %d: %w", port, first)
}
