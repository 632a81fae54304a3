package blob

// SetFault makes f ask fault before each step that can fail.
func (f *Folder) SetFault(fault func(op string) error) { f.fault = fault }
