package dsec

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"iter"
)

// Frames of recorded output: a byte that names the stream, a length of four
// bytes, little-endian, and so many bytes. With the gap bit the length has eight
// bytes and counts what is not kept; nothing follows.
const (
	outputGap   = 0x80
	maxOutFrame = 1 << 20
)

// AppendOutput appends an event of a command's output as a frame. Data longer
// than a frame takes several.
func AppendOutput(b []byte, o Output) []byte {
	if o.Gap > 0 {
		b = append(b, byte(max(o.Stream, Stdout))|outputGap) // a gap is of both
		b = binary.LittleEndian.AppendUint64(b, uint64(o.Gap))
	}
	for data := o.Data; len(data) > 0; {
		n := min(len(data), maxOutFrame)
		b = append(b, byte(o.Stream))
		b = binary.LittleEndian.AppendUint32(b, uint32(n))
		b = append(b, data[:n]...)
		data = data[n:]
	}
	return b
}

// ReadOutput yields the events of recorded output as Attach would from its
// beginning, without the status. What is malformed is Invalid.
func ReadOutput(r io.Reader) iter.Seq2[Output, error] {
	return func(yield func(Output, error) bool) {
		in := bufio.NewReaderSize(r, 64<<10)
		var offset int64
		var buf []byte
		bad := func(err error) {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			if _, ok := errors.AsType[*Error](err); !ok { // what r knows better stays
				err = &Error{Kind: Invalid, Err: fmt.Errorf("read recorded output: %w", err)}
			}
			yield(Output{}, err)
		}
		for {
			kind, err := in.ReadByte()
			if err == io.EOF {
				return
			}
			if err != nil {
				bad(err)
				return
			}
			o := Output{Stream: Stream(kind &^ outputGap), Offset: offset}
			if o.Stream != Stdout && o.Stream != Stderr {
				bad(fmt.Errorf("stream %d", kind))
				return
			}
			if kind&outputGap != 0 {
				var n [8]byte
				if _, err := io.ReadFull(in, n[:]); err != nil {
					bad(err)
					return
				}
				o.Gap = int64(binary.LittleEndian.Uint64(n[:]))
				if o.Gap < 0 || offset+o.Gap < offset {
					bad(fmt.Errorf("gap of %d bytes", uint64(o.Gap)))
					return
				}
				o.Offset += o.Gap
			} else {
				var n [4]byte
				if _, err := io.ReadFull(in, n[:]); err != nil {
					bad(err)
					return
				}
				size := binary.LittleEndian.Uint32(n[:])
				if size > maxOutFrame {
					bad(fmt.Errorf("frame of %d bytes", size))
					return
				}
				if cap(buf) < int(size) {
					buf = make([]byte, size)
				}
				o.Data = buf[:size]
				if _, err := io.ReadFull(in, o.Data); err != nil {
					bad(err)
					return
				}
			}
			offset = o.Offset + int64(len(o.Data))
			if !yield(o, nil) {
				return
			}
		}
	}
}
