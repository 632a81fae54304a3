package wire

import (
	"encoding/binary"
	"time"
)

// The codec writes fields one after the other without names: numbers as
// varints, strings and bytes with their length before them. A decoder never
// fails half-way; it remembers that its input was bad and gives zeros.

func appendUint(b []byte, v uint64) []byte { return binary.AppendUvarint(b, v) }
func appendInt(b []byte, v int64) []byte   { return binary.AppendVarint(b, v) }

func appendString[T ~string](b []byte, s T) []byte {
	return append(appendUint(b, uint64(len(s))), s...)
}

func appendBytes(b, p []byte) []byte { return append(appendUint(b, uint64(len(p))), p...) }

func appendBool(b []byte, v bool) []byte {
	if v {
		return append(b, 1)
	}
	return append(b, 0)
}

// appendTime keeps nanoseconds; the zero time is 0.
func appendTime(b []byte, t time.Time) []byte {
	if t.IsZero() {
		return append(b, 0)
	}
	return appendTimeSet(b, t)
}

func appendTimeSet(b []byte, t time.Time) []byte {
	b = append(b, 1)
	b = appendInt(b, t.Unix())
	return appendUint(b, uint64(t.Nanosecond()))
}

type decoder struct {
	b   []byte
	bad bool
}

func (d *decoder) fail() {
	d.bad = true
	d.b = nil
}

func (d *decoder) err() error {
	if d.bad {
		return protocolf("malformed message")
	}
	return nil
}

func (d *decoder) uint() uint64 {
	v, n := binary.Uvarint(d.b)
	if n <= 0 {
		d.fail()
		return 0
	}
	d.b = d.b[n:]
	return v
}

func (d *decoder) int() int64 {
	v, n := binary.Varint(d.b)
	if n <= 0 {
		d.fail()
		return 0
	}
	d.b = d.b[n:]
	return v
}

func (d *decoder) byte() byte {
	if len(d.b) == 0 {
		d.fail()
		return 0
	}
	v := d.b[0]
	d.b = d.b[1:]
	return v
}

func (d *decoder) bool() bool { return d.byte() != 0 }

// bytes gives a part of the input, not a copy.
func (d *decoder) bytes() []byte {
	n := d.uint()
	if n > uint64(len(d.b)) {
		d.fail()
		return nil
	}
	p := d.b[:n:n]
	d.b = d.b[n:]
	return p
}

func (d *decoder) str() string { return string(d.bytes()) }

// count reads the length of a list whose elements take at least one byte each.
func (d *decoder) count() int {
	n := d.uint()
	if n > uint64(len(d.b)) {
		d.fail()
		return 0
	}
	return int(n)
}

func (d *decoder) time() time.Time {
	switch d.byte() {
	case 0:
		return time.Time{}
	case 1:
		sec, ns := d.int(), d.uint()
		if ns >= 1e9 {
			d.fail()
			return time.Time{}
		}
		return time.Unix(sec, int64(ns)).UTC()
	}
	d.fail()
	return time.Time{}
}
