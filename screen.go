package dsec

// InputEvent is one thing done at the keyboard or with the pointer of a sandbox
// that has a screen. Exactly one of Key, Button, Text and Move is set.
type InputEvent struct {
	// Key is pressed and let go: the name of a key as QEMU's QKeyCode has it,
	// such as a, ret, esc, f1, shift, left. Several joined by "-" are held
	// together: ctrl-alt-f2.
	Key string

	// Text is typed, on a US keyboard; characters that it has no key for are
	// Invalid.
	Text string

	// Move moves the pointer there.
	Move *Point

	// Button is pressed and let go where the pointer is: left, middle, right,
	// wheel-up or wheel-down.
	Button string
}

// Point is a place on a screen, in pixels of its screenshot from the upper left.
type Point struct{ X, Y int }

// Limits of input.
const (
	MaxInputEvents = 1024 // in one call
	MaxInputText   = 4096 // characters of one event
)
