package rootfs

import "os"

// Mapped clones layer mounts, lowest first, so that their ids are shown in a
// user namespace: for who mounts an overlay in that namespace itself. The
// caller closes them.
func Mapped(layers []*os.File, userns *os.File) ([]*os.File, error) {
	out := make([]*os.File, 0, len(layers))
	for _, l := range layers {
		m, err := mapped(l, userns)
		if err != nil {
			for _, m := range out {
				m.Close()
			}
			return nil, err
		}
		out = append(out, m)
	}
	return out, nil
}
