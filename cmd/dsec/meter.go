package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"
)

// meter shows how far a transfer is: on a terminal a bar with bytes, rate and
// the time that is left; elsewhere nothing.
type meter struct {
	*progress
	what  string
	total int64 // 0 when not known
	begin time.Time
}

// meter starts one. total is 0 when it is not known.
func (a *app) meter(what string, total int64) *meter {
	return &meter{a.progress(), what, total, time.Now()}
}

// report shows a stage of what is done; total 0 means the one of the beginning.
func (m *meter) report(stage string, done, total int64) {
	if total == 0 {
		total = m.total
	}
	label := m.what
	if stage != "" && stage != m.what {
		label = stage + " " + m.what
	}
	m.show("%s", meterLine(label, done, total, time.Since(m.begin)))
}

// barWidth is how many characters the bar itself has.
const barWidth = 24

// meterLine is what a meter shows.
func meterLine(label string, done, total int64, took time.Duration) string {
	rate := ""
	perSecond := 0.0
	if took >= time.Second {
		perSecond = float64(done) / took.Seconds()
		rate = fmt.Sprintf("  %s/s", size(int64(perSecond)))
	}
	if total <= 0 || done > total {
		return fmt.Sprintf("%s  %s%s", label, size(done), rate)
	}
	share := float64(done) / float64(total)
	full := int(share * barWidth)
	bar := strings.Repeat("#", full) + strings.Repeat(".", barWidth-full)
	left := ""
	if perSecond > 0 && done < total {
		left = "  " + age(time.Duration(float64(total-done)/perSecond*1e9)) + " left"
	}
	return fmt.Sprintf("%s  [%s] %3d%%  %s of %s%s%s", label, bar, int(share*100), size(done), size(total), rate, left)
}

// countingReader shows what was read of r.
type countingReader struct {
	r    io.Reader
	m    *meter
	then string // what goes on at the end; empty when nothing does
	n    int64
}

func (c *countingReader) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.n += int64(n)
	if errors.Is(err, io.EOF) && c.then != "" {
		c.m.last = time.Time{} // whatever was shown just now
		c.m.show("%s  %s, %s", c.m.what, size(c.n), c.then)
	} else {
		c.m.report("", c.n, 0)
	}
	return n, err
}

// sizeOf gives the size of a source that is a file, else 0.
func sizeOf(r io.Reader) int64 {
	f, ok := r.(*os.File)
	if !ok {
		return 0
	}
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() {
		return 0
	}
	return info.Size()
}
