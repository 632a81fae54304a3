package dsec

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"encoding/binary"
	"strings"
)

// SandboxID names one sandbox for ever. It is "sb" and 32 lower-case base32
// characters: node number (16 bits), node epoch (32), random (64) and a keyed
// tag (48). It is a valid DNS label, has no separators, and routes without a
// look-up: whoever holds the key reads the node from it and knows at once that
// an altered ID was never given out.
type SandboxID string

// JobID names one job: the sandboxes of one trainer run.
type JobID string

// CommandID names one command of one sandbox. It is unique in that sandbox.
type CommandID string

// ProjectID names a project, the unit of quota and rights.
type ProjectID string

const (
	idPrefix = "sb"
	idBody   = 14 // bytes before the tag
	idTag    = 6
)

var idEncoding = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// IDKey is the secret that tags sandbox IDs; all nodes of a cluster share it.
type IDKey [32]byte

// Place is where a sandbox was born: a node and one life of its sandbox table.
type Place struct {
	Node  uint16 // number of the node in the cluster
	Epoch uint32 // changes only when the node's sandboxes were declared lost
}

// New gives a fresh ID at place p.
func (k *IDKey) New(p Place) SandboxID {
	var b [idBody + idTag]byte
	binary.BigEndian.PutUint16(b[0:], p.Node)
	binary.BigEndian.PutUint32(b[2:], p.Epoch)
	rand.Read(b[6:idBody]) // never fails: the runtime ends the program instead
	copy(b[idBody:], k.tag(b[:idBody]))
	return SandboxID(idPrefix + idEncoding.EncodeToString(b[:]))
}

// Place decodes id. A malformed ID or a wrong tag is NotFound, since no
// sandbox can have it.
func (k *IDKey) Place(id SandboxID) (Place, error) {
	b, err := id.decode()
	if err != nil || !hmac.Equal(b[idBody:], k.tag(b[:idBody])) {
		return Place{}, &Error{Kind: NotFound, Err: Errorf(NotFound, "no sandbox has the id %q", clip(string(id))).Err}
	}
	return Place{Node: binary.BigEndian.Uint16(b), Epoch: binary.BigEndian.Uint32(b[2:])}, nil
}

// Check reports whether id has the form of a sandbox ID. It cannot know
// whether the tag is right.
func (id SandboxID) Check() error {
	_, err := id.decode()
	return err
}

func (id SandboxID) decode() ([]byte, error) {
	s, ok := strings.CutPrefix(string(id), idPrefix)
	if !ok || len(s) != idEncoding.EncodedLen(idBody+idTag) {
		return nil, Errorf(NotFound, "no sandbox has the id %q", clip(string(id)))
	}
	b, err := idEncoding.DecodeString(s)
	if err != nil {
		return nil, Errorf(NotFound, "no sandbox has the id %q", clip(string(id)))
	}
	return b, nil
}

func (k *IDKey) tag(body []byte) []byte {
	m := hmac.New(sha256.New, k[:])
	m.Write(body)
	return m.Sum(nil)[:idTag]
}

// clip shortens caller's text for an error message.
func clip(s string) string {
	if len(s) > 64 {
		return s[:64] + "..."
	}
	return s
}
