package main

import "github.com/dsec-go/dsec/hold"

// holdCmd is the process that keeps a node's layer mounts and its connection to FUSE. It is
// started by package hold, which says what it begins with.
type holdCmd struct{}

// Run serves until dsec down ends it.
func (holdCmd) Run() error { return hold.Serve() }
