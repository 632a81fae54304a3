package microvm

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

// Files of a slot's folder, beside those of package qemu.
const (
	stateFile  = "machine" // who it is
	upperFile  = "upper"   // the writable disk
	outputFile = "output"  // the disk of recorded output
	savedDir   = "saved"   // of a paused machine; there or not, see savedState
)

// state is what a slot's folder says about its machine. It appears whole or not
// at all; a crash of the host ends every machine, so it is never synced.
type state struct {
	ID        dsec.SandboxID      `json:"id"` // empty while nobody has it
	Shape     shape               `json:"shape"`
	Resources dsec.Resources      `json:"resources"`
	Layers    []driver.LayerFiles `json:"layers"`
	Pmem      []string            `json:"pmem,omitempty"` // flat layers in persistent memory
	Template  string              `json:"template,omitempty"`
	Paused    bool                `json:"paused,omitempty"`
	Exit      *driver.Exit        `json:"exit,omitempty"`
}

func writeState(dir string, s state) error {
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	return writeWhole(filepath.Join(dir, stateFile), b)
}

// writeWhole writes a file that appears whole or not at all.
func writeWhole(path string, b []byte) error {
	tmp := path + ".new"
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		os.Remove(tmp) //nolint:errcheck // the first error says more
		return noSpace(fmt.Errorf("record machine: %w", err))
	}
	return os.Rename(tmp, path)
}

func readState(dir string) (state, error) {
	var s state
	b, err := os.ReadFile(filepath.Join(dir, stateFile))
	if err != nil {
		return s, err
	}
	return s, json.Unmarshal(b, &s)
}

// exists reports whether there is a file of that name.
func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, os.ErrNotExist)
}
