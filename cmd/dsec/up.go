package main

import "github.com/dsec-go/dsec"

const (
	defaultListen = "127.0.0.1:7070"
	defaultData   = "/var/lib/dsec"
)

type upCmd struct{}

func (c *upCmd) Run() error { return nil }

type downCmd struct{}

func (c *downCmd) Run() error { return nil }

func connect(url, token string) (dsec.Services, error) { return dsec.Services{}, nil }
