// Package erofs writes, merges and reads EROFS file systems, uncompressed, in
// the split form the rest of the program uses: one small metadata image, and
// one data blob per layer that the kernel is given as an extra device.
//
// It does: build a [Tree] from a tar stream ([FromTar]) or a folder
// ([FromDir]) while streaming file contents once into a [Blob]; join trees
// with overlay semantics ([Merge], [Fold]); turn a tree into a metadata image
// ([Tree.Encode]) and back ([Decode]), or into a folder ([Tree.WriteDir]). It
// does not mount anything, compress or store blobs.
//
// Invariants:
//
//   - Same input, same bytes. No clock, no random numbers; the UUID is a hash
//     of the image. Children are written in the order of their names.
//   - A blob is written sequentially and never read back. Contents start on
//     4 KiB boundaries, so that a blob can be mapped directly (DAX); equal
//     contents, in pieces of 1 MiB, are stored once.
//   - A metadata image is a whole number of blocks and its device table says
//     where each blob starts when the image and its blobs are laid end to end.
//     The one image therefore mounts with device= options and as a flat disk.
//   - [Decode] trusts nothing: whatever the bytes, it returns an error that
//     matches [ErrCorrupt] or [ErrUnsupported], in memory and time
//     proportional to the size of the image.
//
// The format, as far as this package uses it, is in format.go. Read tree.go
// next, then encode.go.
package erofs
