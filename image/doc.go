// Package image makes layers: from OCI images, tars, folders and the upper
// folders of sandboxes. A layer is a metadata image, data blobs and their chunk
// tables, all in a blob.Store, held together by a manifest whose digest is the
// layer's name (docs/formats/layer.md).
//
// It does: import ([Library.Pull], [Library.Upload], [Library.Import]), write a
// sandbox's changes as a layer ([Library.Commit]), hand out a layer's verified
// local files ([Library.Open]) and delete what nothing refers to
// ([Library.Collect]). It keeps no names, mounts nothing, and knows no users or
// groups of an image: that is for cluster, rootfs and the guest.
//
// Invariants:
//
//   - The same input gives the same layer digest, wherever it came from: an image
//     pulled from a registry and one loaded from a file are one layer.
//   - Every digest on the way is checked: manifest, config, layers and their
//     uncompressed form. What does not match is refused by name.
//   - A call that fails leaves no blob in the store that was not there before.
//   - A manifest is stored last: when it is there, all it names is.
//   - Open never hands out a file whose content was not checked on this node
//     since it last changed.
//
// Errors are of type *dsec.Error; one about bytes that are not what they should
// be also matches [ErrCorrupt]. Read layer.go next, then work.go.
package image
