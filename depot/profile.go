package depot

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/dsec-go/dsec/blob"
)

// MaxProfile bounds the bytes of a profile: many thousands of chunks.
const MaxProfile = 1 << 20

// profile is what was read first of a layer, in order. It is a hint from another node, and
// maybe of another version: what does not fit is passed over.
type profile struct {
	V     int           `json:"v"`
	Data  []blob.Digest `json:"data"`
	Order [][2]int      `json:"order"` // number in Data, chunk
}

func (n *note) encode() []byte {
	b, err := json.Marshal(profile{V: 1, Data: n.data, Order: n.order})
	if err != nil || len(b) > MaxProfile {
		return nil // plain data marshals, and maxNoted entries fit
	}
	return b
}

// decodeProfile reads a profile.
func decodeProfile(b []byte) (profile, error) {
	var p profile
	if len(b) > MaxProfile {
		return p, fmt.Errorf("a profile of %d bytes", len(b))
	}
	d := json.NewDecoder(bytes.NewReader(b))
	if err := d.Decode(&p); err != nil {
		return p, fmt.Errorf("read profile: %w", err)
	}
	if p.V != 1 {
		return p, fmt.Errorf("read profile: version %d", p.V)
	}
	for _, o := range p.Order {
		if o[0] < 0 || o[0] >= len(p.Data) || o[1] < 0 {
			return p, fmt.Errorf("read profile: chunk %d of blob %d", o[1], o[0])
		}
	}
	return p, nil
}

// each calls f for the rows of one blob in p, in order.
func (p profile) each(f func(d blob.Digest, chunks []int)) {
	for i := 0; i < len(p.Order); {
		j := i
		var chunks []int
		for ; j < len(p.Order) && p.Order[j][0] == p.Order[i][0]; j++ {
			chunks = append(chunks, p.Order[j][1])
		}
		f(p.Data[p.Order[i][0]], chunks)
		i = j
	}
}
