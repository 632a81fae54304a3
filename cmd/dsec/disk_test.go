package main

import (
	"encoding/binary"
	"testing"

	"github.com/dsec-go/dsec"
)

// qcow2 gives the head of an image, changed by f.
func qcow2(f func(b []byte)) []byte {
	b := make([]byte, 4096)
	copy(b, "QFI\xfb")
	binary.BigEndian.PutUint32(b[4:], 3)
	f(b)
	return b
}

func raw(at int, mark string) []byte {
	b := make([]byte, 64<<10)
	copy(b[at:], mark)
	return b
}

func TestDiskHead(t *testing.T) {
	for name, c := range map[string]struct {
		b  []byte
		ok bool
	}{
		"qcow2":                   {qcow2(func([]byte) {}), true},
		"qcow2 of version 2":      {qcow2(func(b []byte) { b[7] = 2 }), true},
		"qcow2 of version 4":      {qcow2(func(b []byte) { b[7] = 4 }), false},
		"a backing file":          {qcow2(func(b []byte) { b[15] = 200 }), false},
		"the name of one":         {qcow2(func(b []byte) { b[19] = 9 }), false},
		"data in another file":    {qcow2(func(b []byte) { b[79] = 4 }), false},
		"a dirty one":             {qcow2(func(b []byte) { b[79] = 1 }), true},
		"cut short":               {qcow2(func([]byte) {})[:100], false},
		"raw with a boot sector":  {raw(510, "\x55\xaa"), true},
		"raw with a GPT":          {raw(512, "EFI PART"), true},
		"a CD":                    {raw(32769, "CD001"), true},
		"a text":                  {[]byte("#!/bin/sh\n"), false},
		"zeros":                   {make([]byte, 64<<10), false},
		"nothing":                 {nil, false},
		"a VMDK, which names one": {[]byte("# Disk DescriptorFile\nversion=1\nRW 100 FLAT \"/etc/shadow\" 0\n"), false},
	} {
		err := checkDiskHead(c.b)
		if c.ok != (err == nil) || err != nil && dsec.KindOf(err) != dsec.Invalid {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestPixel(t *testing.T) {
	for text, ok := range map[string]bool{"1,2": true, "0,0": true, "": false, "1": false, "1,2,3": false, "-1,2": false, "1,x": false, "1, 2x": false} {
		var p pixel
		if err := p.UnmarshalText([]byte(text)); ok != (err == nil) {
			t.Errorf("%q: %+v, %v", text, p, err)
		}
	}
}

func FuzzDiskHead(f *testing.F) {
	f.Add(qcow2(func([]byte) {}))
	f.Add(raw(510, "\x55\xaa"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if err := checkDiskHead(b); err != nil && dsec.KindOf(err) != dsec.Invalid {
			t.Error(err)
		}
	})
}
