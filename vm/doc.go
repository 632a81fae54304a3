// Package vm is the words between a host and the guest of a virtual machine,
// beside those of package wire: how a connection begins on a port that has no
// beginning, and the calls by which the host makes a machine into a sandbox and
// tells it what it cannot know, such as that it has been asleep.
//
// There are two ports. WirePort carries package wire's frames. ControlPort
// carries this package's calls, Client to Serve. Both are byte streams that
// outlive the programs at their ends: a virtio-serial port may hold what was
// meant for an earlier edge, or half of it, and a restored machine believes in
// connections of the machine that was saved. So a connection begins with a
// random word, see Dial and Port, and everything from before is passed over.
//
// It does no work inside the guest: that is cmd/dsec-guest, which implements
// Handler. It does not know how a port is reached on the host: that is a
// driver's, which gives Dial a connection.
//
// Invariants:
//   - Nothing that the other end sends makes memory grow beyond the stated
//     limits, or ends the program.
//   - Bytes of one connection never show up in another, whatever was in flight.
//   - One request is answered at a time, in order; the guest does not queue.
//
// Read next: port.go, then message.go, and cmd/dsec-guest.
package vm
