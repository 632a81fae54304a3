package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/client"
	"github.com/dsec-go/dsec/rpc"
)

// defaultURL is where "dsec up" serves unless told otherwise.
const defaultURL = "http://" + defaultListen

// serverContext is the context file: what "dsec up" leaves so that commands on
// the same host need no settings.
type serverContext struct {
	URL   string `json:"url"`
	Token string `json:"token"`
	Data  string `json:"data"` // the node's data folder, for dsec down
}

// contextPath is where the context file lies.
func (a *app) contextPath() (string, error) {
	dir := a.Getenv("XDG_CONFIG_HOME")
	if !filepath.IsAbs(dir) {
		home := a.Getenv("HOME")
		if home == "" {
			return "", errors.New("neither HOME nor XDG_CONFIG_HOME is set")
		}
		dir = filepath.Join(home, ".config")
	}
	return filepath.Join(dir, "dsec", "context.json"), nil
}

// readContext returns the context file's content; the zero value when there is
// none.
func (a *app) readContext() (serverContext, error) {
	path, err := a.contextPath()
	if err != nil {
		return serverContext{}, nil
	}
	return readContextFile(path)
}

func readContextFile(path string) (serverContext, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return serverContext{}, nil
	}
	if err != nil {
		return serverContext{}, fmt.Errorf("read context: %w", err)
	}
	var c serverContext
	if err := json.Unmarshal(b, &c); err != nil {
		return serverContext{}, fmt.Errorf("read context %s: %w", path, err)
	}
	return c, nil
}

// writeContext replaces the context file as one. Its folder and the file are
// for this account alone.
func writeContext(path string, c serverContext) error {
	b, err := json.MarshalIndent(c, "", "  ")
	if err != nil {
		return fmt.Errorf("encode context: %w", err)
	}
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make context folder: %w", err)
	}
	f, err := os.CreateTemp(dir, ".context-*") // mode 0600
	if err != nil {
		return fmt.Errorf("write context: %w", err)
	}
	defer os.Remove(f.Name())
	_, err = f.Write(append(b, '\n'))
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("write context: %w", err)
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return fmt.Errorf("write context: %w", err)
	}
	return nil
}

// services connects to the server that the environment or the context file
// names. The context's token goes to the context's server only.
func (a *app) services() (dsec.Services, error) {
	c, err := a.readContext()
	if err != nil {
		return dsec.Services{}, err
	}
	url, token := a.Getenv("DSEC_URL"), a.Getenv("DSEC_TOKEN")
	if url == "" {
		url = c.URL
	}
	if url == "" {
		url = defaultURL
	}
	if token == "" && url == c.URL {
		token = c.Token
	}
	epoch, err := rpc.ParseEpoch(a.Getenv("DSEC_JOB_EPOCH"))
	if err != nil {
		return dsec.Services{}, fmt.Errorf("DSEC_JOB_EPOCH: %w", err)
	}
	return a.Connect(client.Config{URL: url, Token: token, Epoch: epoch})
}

// lacking is the error for a service that the server does not offer.
func lacking(what string) error {
	return dsec.Errorf(dsec.Unsupported, "this server offers no %s", what)
}
