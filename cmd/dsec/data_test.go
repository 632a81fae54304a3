package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestDataFolder(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	d, err := openData(dir)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("folder: %v, %v", info, err)
	}
	if _, err := openData(dir); !errors.Is(err, errInUse) {
		t.Errorf("opened twice: %v", err)
	}
	instance := d.instance
	d.close()
	if d, err = openData(dir); err != nil || d.instance != instance {
		t.Fatalf("opened again: %+v, %v, want instance %s", d, err, instance)
	}
	if err := d.write(formatFile, "999"); err != nil {
		t.Fatal(err)
	}
	d.close()
	if _, err := openData(dir); err == nil || !strings.Contains(err.Error(), `its format is "999"`) {
		t.Errorf("a folder of another format: %v", err)
	}
}

func TestDataFolderOfSomethingElse(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "thesis.tex"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := openData(dir); err == nil || !strings.Contains(err.Error(), "thesis.tex") {
		t.Errorf("a folder of something else: %v", err)
	}
	// It is refused as it was: opening makes a folder private, and dsec up may
	// be pointed at a system's by mistake.
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 {
		t.Errorf("a refused folder holds %v, %v", entries, err)
	}
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("a refused folder: %v, %v", info.Mode(), err)
	}
}

func TestControl(t *testing.T) {
	ctx := context.Background()
	// Deeper than a socket's address is long.
	dir := filepath.Join(t.TempDir(), strings.Repeat("d", 100), strings.Repeat("e", 100))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := askForDown(ctx, dir); !errors.Is(err, errNoNode) {
		t.Errorf("without a node: %v", err)
	}
	for _, want := range []error{nil, errors.New("two sandboxes\nremain")} {
		c, err := listenControl(dir)
		if err != nil {
			t.Fatal(err)
		}
		got := make(chan error)
		go func() { got <- askForDown(ctx, dir) }()
		(<-c.asked).answer(want)
		if err := <-got; (err == nil) != (want == nil) || err != nil && err.Error() != "two sandboxes; remain" {
			t.Errorf("answered %v, got %v", want, err)
		}
		c.close()
		if err := askForDown(ctx, dir); !errors.Is(err, errNoNode) {
			t.Errorf("after close: %v", err)
		}
	}
	// A node that ends without an answer is no success.
	c, err := listenControl(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	got := make(chan error)
	go func() { got <- askForDown(ctx, dir) }()
	(<-c.asked).conn.Close()
	if err := <-got; !errors.Is(err, errNoNode) {
		t.Errorf("broken off: %v", err)
	}
}

func TestContextFile(t *testing.T) {
	home := t.TempDir()
	a := &app{Getenv: func(k string) string { return map[string]string{"HOME": home}[k] }}
	path, err := a.contextPath()
	if err != nil {
		t.Fatal(err)
	}
	if c, err := a.readContext(); err != nil || c != (serverContext{}) {
		t.Errorf("without a file: %+v, %v", c, err)
	}
	want := serverContext{URL: "http://127.0.0.1:1", Token: "secret", Data: "/d"}
	for range 2 {
		if err := writeContext(path, want); err != nil {
			t.Fatal(err)
		}
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("file: %v, %v", info, err)
	}
	if c, err := a.readContext(); err != nil || c != want {
		t.Errorf("read %+v, %v", c, err)
	}
	if list, err := os.ReadDir(filepath.Dir(path)); err != nil || len(list) != 1 {
		t.Errorf("the folder holds %v, %v", list, err)
	}
}
