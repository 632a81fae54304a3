package fuse

// Decode is decode for the fuzzer, with the replies that only follow from a request.
func Decode(b []byte) {
	r, err := decode(b)
	if err != nil {
		return
	}
	initReply(r)
	readdirReply([]File{{Name: "a"}}, r.off, r.size)
}
