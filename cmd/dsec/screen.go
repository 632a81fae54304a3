package main

import (
	"context"
	"fmt"
	"os"

	"github.com/dsec-go/dsec"
)

// screenCmd groups the commands on the display of a sandbox; without one of
// their names it takes a screenshot.
type screenCmd struct {
	Shot  screenShotCmd  `cmd:"" default:"withargs" help:"Save what the display shows as PNG and print the name of the file (the default: dsec screen SANDBOX)."`
	Type  screenTypeCmd  `cmd:"" help:"Type text, on a US keyboard."`
	Key   screenKeyCmd   `cmd:"" help:"Press keys one after the other; those joined by - together."`
	Move  screenMoveCmd  `cmd:"" help:"Move the pointer."`
	Click screenClickCmd `cmd:"" help:"Press a button of the pointer."`
}

// Help shows the forms.
func (c *screenCmd) Help() string {
	return `For kinds that have a screen: fullvm.

  dsec screen SANDBOX -o now.png
  dsec screen type SANDBOX 'hello'
  dsec screen key SANDBOX ctrl-alt-f2 ret
  dsec screen click SANDBOX 100,200`
}

func (a *app) screens() (dsec.Screens, error) {
	s, err := a.services()
	if err != nil {
		return nil, err
	}
	if s.Screens == nil {
		return nil, lacking("screens")
	}
	return s.Screens, nil
}

type screenShotCmd struct {
	Sandbox string `arg:"" help:"Sandbox ID."`
	Output  string `short:"o" help:"File to write, also over one that is there; - for standard output." default:"screen.png" placeholder:"FILE"`
}

// Run saves the picture.
func (c *screenShotCmd) Run(ctx context.Context, a *app) error {
	s, err := a.screens()
	if err != nil {
		return err
	}
	png, err := s.Screenshot(ctx, dsec.SandboxID(c.Sandbox))
	if err != nil {
		return err
	}
	if c.Output == "-" {
		_, err = a.Stdout.Write(png)
		return err
	}
	if err := os.WriteFile(a.local(c.Output), png, 0o666); err != nil {
		return fmt.Errorf("write screenshot: %w", err)
	}
	_, err = fmt.Fprintln(a.Stdout, c.Output)
	return err
}

// play sends events.
func (a *app) play(ctx context.Context, sandbox string, events ...dsec.InputEvent) error {
	s, err := a.screens()
	if err != nil {
		return err
	}
	return s.Input(ctx, dsec.SandboxID(sandbox), events)
}

type screenTypeCmd struct {
	Sandbox string `arg:"" help:"Sandbox ID."`
	Text    string `arg:"" help:"What to type."`
	Enter   bool   `help:"Press the enter key behind it."`
}

// Run types it.
func (c *screenTypeCmd) Run(ctx context.Context, a *app) error {
	events := []dsec.InputEvent{{Text: c.Text}}
	if c.Enter {
		events = append(events, dsec.InputEvent{Key: "ret"})
	}
	return a.play(ctx, c.Sandbox, events...)
}

type screenKeyCmd struct {
	Sandbox string   `arg:"" help:"Sandbox ID."`
	Keys    []string `arg:"" name:"key" help:"Names of keys as QEMU has them: a, ret, esc, f1, ctrl-alt-f2."`
}

// Run presses them.
func (c *screenKeyCmd) Run(ctx context.Context, a *app) error {
	var events []dsec.InputEvent
	for _, k := range c.Keys {
		events = append(events, dsec.InputEvent{Key: k})
	}
	return a.play(ctx, c.Sandbox, events...)
}

// pixel is a flag or an argument that names a point: X,Y.
type pixel dsec.Point

// UnmarshalText parses it.
func (p *pixel) UnmarshalText(text []byte) error {
	var rest string
	n, _ := fmt.Sscanf(string(text)+"\n", "%d,%d%s", &p.X, &p.Y, &rest)
	if n != 2 || p.X < 0 || p.Y < 0 {
		return dsec.Errorf(dsec.Invalid, "%q is not a point X,Y in pixels", text)
	}
	return nil
}

type screenMoveCmd struct {
	Sandbox string `arg:"" help:"Sandbox ID."`
	To      pixel  `arg:"" help:"X,Y in pixels of the screenshot, from the upper left."`
}

// Run moves it.
func (c *screenMoveCmd) Run(ctx context.Context, a *app) error {
	return a.play(ctx, c.Sandbox, dsec.InputEvent{Move: (*dsec.Point)(&c.To)})
}

type screenClickCmd struct {
	Sandbox string `arg:"" help:"Sandbox ID."`
	At      *pixel `arg:"" optional:"" help:"X,Y, where to move first (default where the pointer is)."`
	Button  string `help:"Which: left, middle, right, wheel-up, wheel-down." default:"left" placeholder:"NAME"`
	Double  bool   `help:"Twice."`
}

// Run clicks.
func (c *screenClickCmd) Run(ctx context.Context, a *app) error {
	var events []dsec.InputEvent
	if c.At != nil {
		events = append(events, dsec.InputEvent{Move: (*dsec.Point)(c.At)})
	}
	press := dsec.InputEvent{Button: c.Button}
	events = append(events, press)
	if c.Double {
		events = append(events, press)
	}
	return a.play(ctx, c.Sandbox, events...)
}
