package rootfs

import "testing"

// NewTiny is a Source of one tiny layer under any name.
func NewTiny(t *testing.T) Source { return newCounted(t) }

// Usable is usable.
var Usable = usable
