package trajectory

import "github.com/dsec-go/dsec"

// InlineBody gives the body that lies in a record itself; ok is false for a
// record without a body, and for one whose body is in a blob. The bytes are
// part of r.Raw.
func InlineBody(r dsec.Record) (body []byte, ok bool) {
	if r.Body == "" || r.Blob != "" {
		return nil, false
	}
	parts, err := split(r.Raw)
	if err != nil || int64(len(parts.body)) != r.Size {
		return nil, false
	}
	return parts.body, true
}
