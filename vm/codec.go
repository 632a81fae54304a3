package vm

import (
	"encoding/binary"
	"errors"
	"math"
	"time"

	"github.com/dsec-go/dsec"
)

var errMessage = errors.New("malformed control message")

func appendString(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

func appendStrings(b []byte, list []string) []byte {
	b = binary.AppendUvarint(b, uint64(len(list)))
	for _, s := range list {
		b = appendString(b, s)
	}
	return b
}

func appendBool(b []byte, v bool) []byte {
	if v {
		return append(b, 1)
	}
	return append(b, 0)
}

func appendTime(b []byte, t time.Time) []byte {
	return binary.AppendUvarint(binary.AppendVarint(b, t.Unix()), uint64(t.Nanosecond()))
}

// fields reads what the functions above wrote. After a fault all is zero.
type fields struct {
	b   []byte
	bad bool
}

func (f *fields) fail() {
	f.b, f.bad = nil, true
}

// err is that of a message that has been read whole.
func (f *fields) err() error {
	if f.bad || len(f.b) > 0 {
		return errMessage
	}
	return nil
}

func (f *fields) uint() uint64 {
	v, n := binary.Uvarint(f.b)
	if n <= 0 {
		f.fail()
		return 0
	}
	f.b = f.b[n:]
	return v
}

func (f *fields) int() int64 {
	v, n := binary.Varint(f.b)
	if n <= 0 {
		f.fail()
		return 0
	}
	f.b = f.b[n:]
	return v
}

func (f *fields) byte() byte {
	if len(f.b) == 0 {
		f.fail()
		return 0
	}
	v := f.b[0]
	f.b = f.b[1:]
	return v
}

func (f *fields) str() string {
	n := f.uint()
	if n > uint64(len(f.b)) {
		f.fail()
		return ""
	}
	s := string(f.b[:n])
	f.b = f.b[n:]
	return s
}

// count reads the length of a list, whose elements take a byte at least.
func (f *fields) count(most int) int {
	n := f.uint()
	if n > uint64(most) || n > uint64(len(f.b)) {
		f.fail()
		return 0
	}
	return int(n)
}

func (f *fields) strs(most int) []string {
	var out []string
	for range f.count(most) {
		out = append(out, f.str())
	}
	return out
}

func (f *fields) time() time.Time {
	sec, ns := f.int(), f.uint()
	if ns >= 1e9 {
		f.fail()
		return time.Time{}
	}
	return time.Unix(sec, int64(ns)).UTC()
}

func (s *Setup) append(b []byte) []byte {
	b = binary.AppendUvarint(b, uint64(len(s.Layers)))
	for _, l := range s.Layers {
		b = appendString(b, l.Disk)
		b = binary.AppendVarint(binary.AppendVarint(b, l.Offset), l.Size)
		b = appendBool(b, l.DAX)
	}
	for _, t := range []string{s.Upper, s.Output, s.Hostname, s.Hosts, s.Resolv, s.Machine, s.Cwd, s.User} {
		b = appendString(b, t)
	}
	b = appendStrings(b, s.Env)
	b = binary.AppendVarint(b, s.Limits.Memory)
	b = binary.AppendUvarint(b, math.Float64bits(s.Limits.CPU))
	return binary.AppendVarint(b, int64(s.Limits.Pids))
}

func (f *fields) setup() (s Setup) {
	for range f.count(maxLayers) {
		s.Layers = append(s.Layers, Extent{Disk: f.str(), Offset: f.int(), Size: f.int(), DAX: f.byte() != 0})
	}
	for _, t := range []*string{&s.Upper, &s.Output, &s.Hostname, &s.Hosts, &s.Resolv, &s.Machine, &s.Cwd, &s.User} {
		*t = f.str()
	}
	s.Env = f.strs(maxEnv)
	s.Limits.Memory = f.int()
	s.Limits.CPU = math.Float64frombits(f.uint())
	s.Limits.Pids = int(f.int())
	return s
}

func (r *Restored) append(b []byte) []byte {
	b = appendTime(b, r.Now)
	for _, t := range []string{string(r.Seed), r.Hostname, r.Hosts, r.Machine} {
		b = appendString(b, t)
	}
	return b
}

func (f *fields) restored() Restored {
	return Restored{Now: f.time(), Seed: []byte(f.str()), Hostname: f.str(), Hosts: f.str(), Machine: f.str()}
}

func appendUsage(b []byte, u dsec.Usage) []byte {
	for _, v := range []int64{int64(u.CPU), u.Memory, u.MemoryPeak, u.Disk, int64(u.Pids), int64(u.OOMKills)} {
		b = binary.AppendVarint(b, v)
	}
	return b
}

func (f *fields) usage() dsec.Usage {
	return dsec.Usage{CPU: time.Duration(f.int()), Memory: f.int(), MemoryPeak: f.int(), Disk: f.int(), Pids: int(f.int()), OOMKills: int(f.int())}
}
