package wire

import (
	"maps"
	"slices"
	"time"

	"github.com/dsec-go/dsec"
)

func appendStep(b []byte, s dsec.Step) []byte {
	return appendUint(appendString(b, s.Session), s.Number)
}

func (d *decoder) step() dsec.Step { return dsec.Step{Session: d.str(), Number: d.uint()} }

func appendSize(b []byte, s dsec.WinSize) []byte {
	return appendUint(appendUint(b, uint64(s.Rows)), uint64(s.Cols))
}

func (d *decoder) size() dsec.WinSize {
	return dsec.WinSize{Rows: uint16(d.uint()), Cols: uint16(d.uint())}
}

func appendCommand(b []byte, c *dsec.Command) []byte {
	b = appendUint(b, uint64(len(c.Argv)))
	for _, a := range c.Argv {
		b = appendString(b, a)
	}
	b = appendString(b, c.Shell)
	b = appendString(b, c.Cwd)
	b = appendString(b, c.User)
	b = appendUint(b, uint64(len(c.Env)))
	for _, k := range slices.Sorted(maps.Keys(c.Env)) {
		b = appendString(appendString(b, k), c.Env[k])
	}
	b = appendString(b, c.Stdin)
	b = appendBool(b, c.TTY != nil)
	if c.TTY != nil {
		b = appendSize(b, *c.TTY)
	}
	b = appendInt(b, int64(c.Timeout))
	b = appendInt(b, int64(c.Idle))
	return appendInt(b, c.Output)
}

func (d *decoder) command() dsec.Command {
	var c dsec.Command
	if n := d.count(); n > 0 {
		c.Argv = make([]string, 0, min(n, 1024))
		for range n {
			c.Argv = append(c.Argv, d.str())
		}
	}
	c.Shell, c.Cwd, c.User = d.str(), d.str(), d.str()
	if n := d.count(); n > 0 {
		c.Env = make(map[string]string, min(n, 1024))
		for range n {
			if d.bad {
				break
			}
			k := d.str()
			c.Env[k] = d.str()
		}
	}
	c.Stdin = dsec.StdinMode(d.str())
	if d.bool() {
		s := d.size()
		c.TTY = &s
	}
	c.Timeout, c.Idle = time.Duration(d.int()), time.Duration(d.int())
	c.Output = d.int()
	return c
}

func appendStat(b []byte, s dsec.StreamStat) []byte { return appendInt(appendInt(b, s.Total), s.Kept) }

func (d *decoder) stat() dsec.StreamStat { return dsec.StreamStat{Total: d.int(), Kept: d.int()} }

func appendStatus(b []byte, s *dsec.CommandStatus) []byte {
	b = appendString(b, s.ID)
	b = appendStep(b, s.Step)
	b = appendCommand(b, &s.Command)
	b = appendString(b, s.Outcome)
	b = appendInt(b, int64(s.Code))
	b = appendString(b, s.Signal)
	b = appendString(b, s.Detail)
	b = appendInt(b, int64(s.Pid))
	b = appendTime(b, s.Started)
	b = appendTime(b, s.Ended)
	b = appendStat(b, s.Stdout)
	b = appendStat(b, s.Stderr)
	b = appendInt(b, int64(s.CPU))
	b = appendInt(b, s.MaxRSS)
	return appendBool(b, s.Replayed)
}

func (d *decoder) status() dsec.CommandStatus {
	return dsec.CommandStatus{
		ID:       dsec.CommandID(d.str()),
		Step:     d.step(),
		Command:  d.command(),
		Outcome:  dsec.Outcome(d.str()),
		Code:     int(d.int()),
		Signal:   d.str(),
		Detail:   d.str(),
		Pid:      int(d.int()),
		Started:  d.time(),
		Ended:    d.time(),
		Stdout:   d.stat(),
		Stderr:   d.stat(),
		CPU:      time.Duration(d.int()),
		MaxRSS:   d.int(),
		Replayed: d.bool(),
	}
}

func appendFileOp(b []byte, f dsec.FileOp) []byte {
	return appendString(appendString(b, f.Path), f.User)
}

func (d *decoder) fileOp() dsec.FileOp { return dsec.FileOp{Path: d.str(), User: d.str()} }

func appendInfo(b []byte, f *dsec.FileInfo) []byte {
	b = appendString(b, f.Path)
	b = appendString(b, f.Type)
	b = appendUint(b, uint64(f.Mode))
	b = appendUint(b, uint64(f.UID))
	b = appendUint(b, uint64(f.GID))
	b = appendInt(b, f.Size)
	b = appendTime(b, f.ModTime)
	b = appendString(b, f.Target)
	return appendUint(b, f.Nlink)
}

func (d *decoder) info() dsec.FileInfo {
	return dsec.FileInfo{
		Path:    d.str(),
		Type:    dsec.FileType(d.str()),
		Mode:    uint32(d.uint()),
		UID:     uint32(d.uint()),
		GID:     uint32(d.uint()),
		Size:    d.int(),
		ModTime: d.time(),
		Target:  d.str(),
		Nlink:   d.uint(),
	}
}

func appendWriteOptions(b []byte, o dsec.WriteOptions) []byte {
	b = appendUint(b, uint64(o.Mode))
	b = appendBool(b, o.Parents)
	b = appendBool(b, o.At != nil)
	if o.At != nil {
		b = appendInt(b, *o.At)
	}
	return appendBool(b, o.Append)
}

func (d *decoder) writeOptions() dsec.WriteOptions {
	o := dsec.WriteOptions{Mode: uint32(d.uint()), Parents: d.bool()}
	if d.bool() {
		at := d.int()
		o.At = &at
	}
	o.Append = d.bool()
	return o
}

func appendEvent(b []byte, e dsec.WatchEvent) []byte {
	return appendString(appendString(appendString(b, e.Op), e.Path), e.To)
}

func (d *decoder) event() dsec.WatchEvent {
	return dsec.WatchEvent{Op: dsec.WatchOp(d.str()), Path: d.str(), To: d.str()}
}

func appendActivity(b []byte, a dsec.Activity) []byte {
	return appendTime(appendInt(b, int64(a.Running)), a.Last)
}

func (d *decoder) activity() dsec.Activity {
	return dsec.Activity{Running: int(d.int()), Last: d.time()}
}
