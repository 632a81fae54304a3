package fuse

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Version of the protocol that is spoken here: that of Linux 6.9.
const (
	protoMajor = 7
	protoMinor = 40
)

// opcode says what a request asks for.
type opcode uint32

// The opcodes that are served. All others are ENOSYS, which the kernel remembers.
const (
	opLookup      opcode = 1
	opForget      opcode = 2
	opGetattr     opcode = 3
	opOpen        opcode = 14
	opRead        opcode = 15
	opStatfs      opcode = 17
	opRelease     opcode = 18
	opInit        opcode = 26
	opOpendir     opcode = 27
	opReaddir     opcode = 28
	opReleasedir  opcode = 29
	opInterrupt   opcode = 36
	opDestroy     opcode = 38
	opBatchForget opcode = 42
)

// Flags of INIT, as one number of 64 bits.
const (
	flagAsyncRead       = 1 << 0
	flagAsyncDIO        = 1 << 15
	flagParallelDirops  = 1 << 18
	flagMaxPages        = 1 << 22
	flagInitExt         = 1 << 30 // the upper 32 flags are there
	flagDirectAllowMmap = 1 << 36
	flagHasResend       = 1 << 39

	wanted = flagAsyncRead | flagAsyncDIO | flagParallelDirops | flagMaxPages | flagInitExt | flagDirectAllowMmap | flagHasResend
)

// Flags of OPEN. A close without a flush asks nobody: who ends or executes a program
// beside an open file does not wait for a server, which may be the one to be started.
const (
	openDirectIO = 1 << 0
	openNoFlush  = 1 << 5
)

const notifyResend = 7

// Sizes of what is on the wire.
const (
	inHeaderSize  = 40
	outHeaderSize = 16
	attrSize      = 88
	entrySize     = 40 + attrSize
	direntSize    = 24

	// maxRead is the most that the kernel asks for at once, maxWrite what it may send:
	// it wants a buffer for a write however little is ever written.
	maxRead    = 1 << 20
	maxWrite   = 4096
	requestBuf = 8192 // the least that the kernel takes
)

// Requests in the kernel's hands at once that nobody waits for by name: those of EROFS.
const (
	maxBackground = 256
	congested     = 192
)

// request is a decoded one. Which fields are set depends on op.
type request struct {
	op     opcode
	unique uint64
	node   uint64
	pid    uint32

	name string // lookup

	off  uint64 // read, readdir
	size uint32

	target uint64 // interrupt: the request that is called off

	minor uint32 // init
	major uint32
	ahead uint32
	flags uint64
}

var errMalformed = errors.New("malformed FUSE request")

// decode reads a request as it comes from /dev/fuse. Opcodes that are not served have only
// their header read.
func decode(b []byte) (r request, err error) {
	le := binary.NativeEndian
	if len(b) < inHeaderSize || uint64(le.Uint32(b)) != uint64(len(b)) {
		return r, fmt.Errorf("%w of %d bytes", errMalformed, len(b))
	}
	r = request{op: opcode(le.Uint32(b[4:])), unique: le.Uint64(b[8:]), node: le.Uint64(b[16:]), pid: le.Uint32(b[32:])}
	body := b[inHeaderSize:]
	// Extensions, which are not asked for, would lie behind the body.
	if ext := 8 * int(le.Uint16(b[36:])); ext <= len(body) {
		body = body[:len(body)-ext]
	}
	need := func(n int) bool {
		if len(body) < n {
			err = fmt.Errorf("%w: opcode %d with a body of %d bytes", errMalformed, r.op, len(body))
		}
		return err == nil
	}
	switch r.op {
	case opLookup:
		n := len(body) - 1
		if need(2) && (body[n] != 0 || n > unix.NAME_MAX*4) {
			err = fmt.Errorf("%w: a name without an end", errMalformed)
		} else if err == nil {
			r.name = string(body[:n])
		}
	case opRead, opReaddir:
		if need(40) {
			r.off, r.size = le.Uint64(body[8:]), le.Uint32(body[16:])
		}
	case opInterrupt:
		if need(8) {
			r.target = le.Uint64(body)
		}
	case opInit:
		if need(16) {
			r.major, r.minor, r.ahead, r.flags = le.Uint32(body), le.Uint32(body[4:]), le.Uint32(body[8:]), uint64(le.Uint32(body[12:]))
			if r.flags&flagInitExt != 0 && len(body) >= 20 {
				r.flags |= uint64(le.Uint32(body[16:])) << 32
			}
		}
	}
	return r, err
}

// initReply is what the server says to INIT.
func initReply(r request) []byte {
	le := binary.NativeEndian
	flags := r.flags & wanted
	b := make([]byte, 64)
	le.PutUint32(b, protoMajor)
	le.PutUint32(b[4:], protoMinor)
	if r.major > protoMajor {
		return b // the kernel asks again with the version that it finds here
	}
	le.PutUint32(b[8:], r.ahead)
	le.PutUint32(b[12:], uint32(flags))
	le.PutUint16(b[16:], maxBackground)
	le.PutUint16(b[18:], congested)
	le.PutUint32(b[20:], maxWrite)
	le.PutUint32(b[24:], 1) // nanoseconds
	le.PutUint16(b[28:], maxRead/4096)
	le.PutUint32(b[32:], uint32(flags>>32))
	return b
}

// Files and names never change: what the kernel was told holds as long as it likes.
const forever = 1 << 30 // seconds

func putAttr(b []byte, f File) {
	le := binary.NativeEndian
	mode, links := uint32(unix.S_IFREG|0o444), uint32(1)
	if f.Node == RootNode {
		mode, links = unix.S_IFDIR|0o555, 2
	}
	le.PutUint64(b, f.Node)
	le.PutUint64(b[8:], uint64(f.Size))
	le.PutUint64(b[16:], uint64(f.Size+511)/512)
	le.PutUint32(b[60:], mode)
	le.PutUint32(b[64:], links)
	le.PutUint32(b[80:], 4096)
}

func attrReply(f File) []byte {
	b := make([]byte, 16+attrSize)
	binary.NativeEndian.PutUint64(b, forever)
	putAttr(b[16:], f)
	return b
}

func entryReply(f File) []byte {
	le := binary.NativeEndian
	b := make([]byte, entrySize)
	le.PutUint64(b, f.Node)
	le.PutUint64(b[16:], forever)
	le.PutUint64(b[24:], forever)
	putAttr(b[40:], f)
	return b
}

func openReply(flags uint32) []byte {
	b := make([]byte, 16)
	binary.NativeEndian.PutUint32(b[8:], flags)
	return b
}

func statfsReply(files []File) []byte {
	le := binary.NativeEndian
	var blocks uint64
	for _, f := range files {
		blocks += uint64(f.Size+4095) / 4096
	}
	b := make([]byte, 80)
	le.PutUint64(b, blocks)
	le.PutUint64(b[24:], uint64(len(files)))
	le.PutUint32(b[40:], 4096)
	le.PutUint32(b[44:], unix.NAME_MAX)
	le.PutUint32(b[48:], 4096)
	return b
}

// readdirReply lists files from the off'th on, as many as fit.
func readdirReply(files []File, off uint64, size uint32) []byte {
	le := binary.NativeEndian
	var b []byte
	for i := off; i < uint64(len(files)); i++ {
		f := files[i]
		n := (direntSize + len(f.Name) + 7) &^ 7
		if len(b)+n > int(size) {
			break
		}
		e := make([]byte, n)
		le.PutUint64(e, f.Node)
		le.PutUint64(e[8:], i+1)
		le.PutUint32(e[16:], uint32(len(f.Name)))
		le.PutUint32(e[20:], unix.DT_REG)
		copy(e[direntSize:], f.Name)
		b = append(b, e...)
	}
	return b
}
