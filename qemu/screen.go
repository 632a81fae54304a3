package qemu

import (
	"bytes"
	"context"
	"fmt"
	"image"
	"image/png"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
)

// Limits of a display. A guest chooses its mode, and what a picture of it costs
// the node.
const maxPixels = 4096 * 4096

// keyTime is how long a key is held, and the time between two: a keyboard
// controller holds a few keys only, and an emulated guest is slow to take them.
const keyTime = 12 * time.Millisecond

// Screenshot gives what the first display shows, as PNG.
func (p *Process) Screenshot(ctx context.Context) ([]byte, error) {
	img, err := p.Picture(ctx)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	e := png.Encoder{CompressionLevel: png.BestSpeed}
	if err := e.Encode(&b, img); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// Picture gives what the first display shows.
func (p *Process) Picture(ctx context.Context) (image.Image, error) {
	fd, err := unix.MemfdCreate("dsec-screen", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("take picture: %w", err)
	}
	file := os.NewFile(uintptr(fd), "screen")
	defer file.Close()
	w, err := memory{file}.writer()
	if err != nil {
		return nil, fmt.Errorf("take picture: %w", err)
	}
	defer w.Close()
	path, err := p.AddFile(ctx, w)
	if err != nil {
		return nil, err
	}
	err = p.Execute(ctx, "screendump", map[string]any{"filename": path}, nil)
	p.RemoveFile(ctx, path) //nolint:errcheck // it went with its last use, or goes with the process
	if err != nil {
		return nil, err
	}
	st, err := file.Stat()
	if err != nil {
		return nil, err
	}
	if st.Size() > 3*maxPixels+64 {
		return nil, dsec.Errorf(dsec.Exhausted, "the display's picture of %d bytes is too large", st.Size())
	}
	b := make([]byte, st.Size())
	if _, err := file.ReadAt(b, 0); err != nil {
		return nil, fmt.Errorf("read picture: %w", err)
	}
	return decodePPM(b)
}

// decodePPM reads the binary form of a portable pixmap with 8 bits a sample:
// what QEMU writes.
func decodePPM(b []byte) (image.Image, error) {
	var f [4]string // P6, width, height, maximum
	rest := b
	for i := range f {
		rest = bytes.TrimLeft(rest, " \t\r\n")
		end := bytes.IndexAny(rest, " \t\r\n")
		if end < 0 || end > 16 {
			return nil, fmt.Errorf("read picture: it is no pixmap")
		}
		f[i], rest = string(rest[:end]), rest[end:]
	}
	w, err1 := strconv.Atoi(f[1])
	h, err2 := strconv.Atoi(f[2])
	if f[0] != "P6" || f[3] != "255" || err1 != nil || err2 != nil || w <= 0 || h <= 0 || w > maxPixels || h > maxPixels/w {
		return nil, fmt.Errorf("read picture: it is no pixmap of a display")
	}
	rest = rest[1:] // one white space
	if len(rest) < 3*w*h {
		return nil, fmt.Errorf("read picture: it is cut off")
	}
	img := image.NewNRGBA(image.Rect(0, 0, w, h))
	for i := range w * h {
		img.Pix[4*i], img.Pix[4*i+1], img.Pix[4*i+2], img.Pix[4*i+3] = rest[3*i], rest[3*i+1], rest[3*i+2], 0xff
	}
	return img, nil
}

// Input plays events one after the other. Pointer events need a usb-tablet or
// another absolute pointer. Everything is checked before anything is played.
func (p *Process) Input(ctx context.Context, events []dsec.InputEvent) error {
	if len(events) > dsec.MaxInputEvents {
		return dsec.Errorf(dsec.Invalid, "%d events are more than %d", len(events), dsec.MaxInputEvents)
	}
	var steps []step
	pointer := false
	for i, e := range events {
		s, err := plan(e)
		if err != nil {
			return dsec.Errorf(dsec.Invalid, "event %d: %w", i, err)
		}
		steps = append(steps, s...)
		pointer = pointer || e.Move != nil
	}
	var size image.Point
	if pointer {
		img, err := p.Picture(ctx)
		if err != nil {
			return err
		}
		size = img.Bounds().Size()
		for i, e := range events {
			if e.Move != nil && !(image.Point{X: e.Move.X, Y: e.Move.Y}).In(img.Bounds()) {
				return dsec.Errorf(dsec.Invalid, "event %d: %d,%d is not on the screen of %d×%d", i, e.Move.X, e.Move.Y, size.X, size.Y)
			}
		}
	}
	for _, s := range steps {
		if err := p.Execute(ctx, "input-send-event", map[string]any{"events": s.encode(size)}, nil); err != nil {
			return p.standing(ctx, err)
		}
		select {
		case <-time.After(keyTime):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// standing says why a machine that stands still has not taken an event: it has turned itself
// off, and its process ends in a moment, or it is being saved.
func (p *Process) standing(ctx context.Context, err error) error {
	if !strings.Contains(err.Error(), "VM not running") {
		return err
	}
	select {
	case <-p.done:
		return dsec.Errorf(dsec.Conflict, "QEMU is gone: %s", p.Exit())
	case <-time.After(dyingTime):
		return dsec.Errorf(dsec.Unavailable, "the machine stands still: %w", err)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// step is what is sent at once: keys or a button that go down or up, or a move.
type step struct {
	keys   []string
	button string
	move   *dsec.Point
	down   bool
}

// plan gives the steps of one event.
func plan(e dsec.InputEvent) ([]step, error) {
	set := 0
	for _, b := range []bool{e.Key != "", e.Text != "", e.Move != nil, e.Button != ""} {
		if b {
			set++
		}
	}
	if set != 1 {
		return nil, fmt.Errorf("exactly one of key, text, move and button is to be set")
	}
	switch {
	case e.Key != "":
		keys := strings.Split(e.Key, "-")
		for _, k := range keys {
			if !keyNames[k] {
				return nil, fmt.Errorf("there is no key %q", k)
			}
		}
		return press(keys), nil
	case e.Text != "":
		if n := len([]rune(e.Text)); n > dsec.MaxInputText {
			return nil, fmt.Errorf("%d characters are more than %d", n, dsec.MaxInputText)
		}
		var out []step
		for _, r := range e.Text {
			keys := typed(r)
			if keys == nil {
				return nil, fmt.Errorf("a US keyboard has no key for %q", r)
			}
			out = append(out, press(keys)...)
		}
		return out, nil
	case e.Move != nil:
		return []step{{move: e.Move}}, nil
	}
	if !buttonNames[e.Button] {
		return nil, fmt.Errorf("there is no button %q", e.Button)
	}
	return []step{{button: e.Button, down: true}, {button: e.Button}}, nil
}

func press(keys []string) []step { return []step{{keys: keys, down: true}, {keys: keys}} }

// encode gives the step as QEMU's events. Keys go up in the reverse order.
func (s step) encode(size image.Point) []any {
	var out []any
	for i := range s.keys {
		k := s.keys[i]
		if !s.down {
			k = s.keys[len(s.keys)-1-i]
		}
		out = append(out, event("key", map[string]any{"down": s.down, "key": map[string]any{"type": "qcode", "data": k}}))
	}
	if s.button != "" {
		out = append(out, event("btn", map[string]any{"down": s.down, "button": s.button}))
	}
	if s.move != nil {
		out = append(out,
			event("abs", map[string]any{"axis": "x", "value": axis(s.move.X, size.X)}),
			event("abs", map[string]any{"axis": "y", "value": axis(s.move.Y, size.Y)}))
	}
	return out
}

func event(kind string, data map[string]any) any { return map[string]any{"type": kind, "data": data} }

// axis scales a pixel, its middle, to QEMU's 0 to 32,767.
func axis(at, size int) int { return (2*at + 1) * 0x7fff / (2 * size) }
