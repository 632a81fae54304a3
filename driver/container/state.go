package container

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/dsec-go/dsec"
)

// state is what a slot's folder says about its box. It is one write of a fixed
// size, which the end of this process does not tear; a crash of the host ends
// every box, so it is never synced.
type state struct {
	ID    dsec.SandboxID `json:"id,omitempty"` // empty while it is a shell
	Pid   int            `json:"pid"`          // 0 while the slot is free
	Start uint64         `json:"start"`        // with Pid it names a process for the host's uptime
}

const (
	stateFile = "state"
	stateSize = 128
)

func writeState(dir string, s state) error {
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(dir, stateFile), os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("record box: %w", err)
	}
	defer f.Close()
	if _, err := f.Write(append(b, bytes.Repeat([]byte(" "), stateSize-len(b))...)); err != nil {
		return fmt.Errorf("record box: %w", err)
	}
	return nil
}

func readState(dir string) (state, error) {
	var s state
	b, err := os.ReadFile(filepath.Join(dir, stateFile))
	if err != nil {
		return s, err
	}
	return s, json.Unmarshal(b, &s)
}
