// Package lazy reads the data blobs of layers before they are on this host. A [Cache] fetches
// what is asked for in chunks, checks each against the blob's chunk table, and keeps them in
// sparse files of a folder with a bound.
//
// It does not mount, know layers or names, or read metadata images, which are always here
// whole: that is for depot. How a chunk is stored, plain or packed, is package image's.
//
// Invariants:
//
//   - No byte reaches a reader or a file that was not checked against its table, or by who
//     brought it, see Cache.Bring.
//   - A chunk is fetched once for all who want it at the time.
//   - A chunk that a file is said to have is there. The word of an earlier boot of the host
//     is not believed: such a chunk is checked again when it is first read, since what was
//     written last may not have reached the disk.
//   - What is being read, or was handed out as a plain file, is not dropped.
//   - The bound holds. What has no room, or meets a full disk, is served and not kept.
//   - Each read ends within its limit, and a failure is that read's alone.
//
// Read next: cache.go, then fetch.go.
package lazy
