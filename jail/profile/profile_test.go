package profile_test

import (
	"testing"

	"github.com/dsec-go/dsec/jail/profile"
)

func TestDefaultCompiles(t *testing.T) {
	p, err := profile.Default()
	if err != nil {
		t.Fatal(err)
	}
	if n := len(p) / 8; n < 300 || n > 4096 {
		t.Errorf("program has %d instructions; a kernel takes 4096, the profile has some 370 calls", n)
	}
}
