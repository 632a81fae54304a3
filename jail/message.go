package jail

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// A message is a list of byte strings and descriptors in one datagram, or in
// one length-prefixed piece of a stream. It is all the encoding that the
// exchanges before the guest's own protocol need.
type message struct {
	fields []string
	files  []*os.File
}

const (
	maxMessage   = 2 << 20 // an environment may have dsec.MaxEnvBytes
	smallMessage = 6 << 10 // holds an outfit, and all that is sent as a datagram
	maxFiles     = 32

	askTimeout = 10 * time.Second // a shell answers in a millisecond
)

var errMessage = errors.New("malformed message")

func (m *message) encode() []byte {
	var b []byte
	for _, f := range m.fields {
		b = binary.AppendUvarint(b, uint64(len(f)))
		b = append(b, f...)
	}
	return b
}

func decodeFields(b []byte) ([]string, error) {
	var out []string
	for len(b) > 0 {
		n, k := binary.Uvarint(b)
		if k <= 0 || n > uint64(len(b)-k) {
			return nil, errMessage
		}
		out = append(out, string(b[k:k+int(n)]))
		b = b[k+int(n):]
	}
	return out, nil
}

// send writes m to a SOCK_SEQPACKET or SOCK_STREAM descriptor in one piece.
// The files stay the caller's.
func (m *message) send(fd int) error {
	body := m.encode()
	if len(body) > maxMessage || len(m.files) > maxFiles {
		return fmt.Errorf("send message of %d bytes and %d files: %w", len(body), len(m.files), unix.EMSGSIZE)
	}
	b := binary.BigEndian.AppendUint32(nil, uint32(len(body)))
	b = append(b, body...)
	var oob []byte
	if len(m.files) > 0 {
		fds := make([]int, len(m.files))
		for i, f := range m.files {
			fds[i] = int(f.Fd())
		}
		oob = unix.UnixRights(fds...)
	}
	for len(b) > 0 {
		n, err := unix.SendmsgN(fd, b, oob, nil, unix.MSG_NOSIGNAL)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		b, oob = b[n:], nil
	}
	return nil
}

// receive reads one message from a blocking descriptor. The files are the
// caller's, and close on exec. On a SOCK_SEQPACKET descriptor a message has at
// most smallMessage bytes.
func receive(fd int) (*message, error) {
	m := &message{}
	buf, err := m.read(fd, make([]byte, 4+smallMessage))
	if err == nil {
		m.fields, err = decodeFields(buf)
	}
	if err != nil {
		m.close()
		return nil, err
	}
	return m, nil
}

func (m *message) read(fd int, buf []byte) ([]byte, error) {
	var oob [256]byte // room for maxFiles
	for n := 0; ; {
		k, oobn, _, _, err := unix.Recvmsg(fd, buf[n:], oob[:], unix.MSG_CMSG_CLOEXEC)
		if err == unix.EINTR {
			continue
		}
		if err == nil && k == 0 {
			err = unix.ECONNRESET
		}
		if err != nil {
			return nil, err
		}
		if err := m.takeRights(oob[:oobn]); err != nil {
			return nil, err
		}
		if n += k; n < 4 {
			continue
		}
		size := binary.BigEndian.Uint32(buf)
		if size > maxMessage {
			return nil, errMessage
		}
		if end := 4 + int(size); n >= end {
			return buf[4:end], nil
		} else if end > len(buf) {
			buf = append(buf[:n], make([]byte, end-n)...)
		}
	}
}

func (m *message) takeRights(oob []byte) error {
	if len(oob) == 0 {
		return nil
	}
	cmsgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return err
	}
	for i := range cmsgs {
		fds, err := unix.ParseUnixRights(&cmsgs[i])
		if err != nil {
			continue
		}
		for _, fd := range fds {
			m.files = append(m.files, os.NewFile(uintptr(fd), "received"))
		}
	}
	return nil
}

func (m *message) close() {
	for _, f := range m.files {
		f.Close()
	}
	m.files = nil
}
