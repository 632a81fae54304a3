package main

import (
	"fmt"
	"strings"
	"text/tabwriter"
	"time"
)

// table prints rows in columns. The first row is the head.
func (a *app) table(rows ...[]string) error {
	w := tabwriter.NewWriter(a.Stdout, 0, 8, 2, ' ', 0)
	for _, r := range rows {
		for i := range r {
			r[i] = printable(r[i])
		}
		fmt.Fprintln(w, strings.Join(r, "\t"))
	}
	return w.Flush()
}

// printable keeps text that a sandbox or a caller chose from moving the
// terminal's cursor or breaking a row.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 {
			return '?'
		}
		return r
	}, s)
}

// size gives a byte count for people: "1.2 GiB".
func size(n int64) string {
	const units = "KMGTPE"
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	f, i := float64(n)/1024, 0
	for f >= 1023.95 && i < len(units)-1 {
		f, i = f/1024, i+1
	}
	return fmt.Sprintf("%.1f %ciB", f, units[i])
}

// age gives a duration for people, in its largest unit: "3m".
func age(d time.Duration) string {
	switch {
	case d < 0:
		return "0s"
	case d < time.Minute:
		return fmt.Sprintf("%ds", d/time.Second)
	case d < time.Hour:
		return fmt.Sprintf("%dm", d/time.Minute)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", d/time.Hour)
	}
	return fmt.Sprintf("%dd", d/(24*time.Hour))
}

// until gives the time from now to t for people, rounded to its unit: right
// after a start with two hours that is "2h".
func until(t, now time.Time) string {
	d := t.Sub(now)
	if d <= 0 {
		return "expired"
	}
	for _, u := range []struct {
		unit, limit time.Duration
		name        string
	}{
		{time.Second, 2 * time.Minute, "s"},
		{time.Minute, 2 * time.Hour, "m"},
		{time.Hour, 48 * time.Hour, "h"},
	} {
		if r := d.Round(u.unit); r < u.limit {
			return fmt.Sprintf("%d%s", max(1, r/u.unit), u.name)
		}
	}
	return fmt.Sprintf("%dd", d.Round(24*time.Hour)/(24*time.Hour))
}

// since gives the age of t at now, "-" for the zero time.
func since(t, now time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return age(now.Sub(t))
}

// took gives a short duration for people: "12.3ms", "4.56s".
func took(d time.Duration) string {
	switch {
	case d < time.Millisecond:
		return fmt.Sprintf("%.3gms", float64(d)/1e6)
	case d < time.Second:
		return fmt.Sprintf("%.1fms", float64(d)/1e6)
	case d < time.Minute:
		return fmt.Sprintf("%.2fs", d.Seconds())
	}
	return d.Round(time.Second).String()
}

// or gives s, or "-" when it is empty.
func or(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
