package rpc

import (
	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

// FileToWire gives f for the wire.
func FileToWire(f dsec.FileOp) *dsecv1.File {
	w := &dsecv1.File{User: f.User}
	w.Path, w.PathBytes = name(f.Path)
	return w
}

// FileFromWire is the inverse of FileToWire.
func FileFromWire(w *dsecv1.File) dsec.FileOp {
	return dsec.FileOp{Path: unname(w.GetPath(), w.GetPathBytes()), User: w.GetUser()}
}

// InfoToWire gives i for the wire.
func InfoToWire(i dsec.FileInfo) *dsecv1.FileInfo {
	w := &dsecv1.FileInfo{
		Type: string(i.Type), Mode: i.Mode, Uid: i.UID, Gid: i.GID, Size: i.Size, ModTime: stamp(i.ModTime), Nlink: i.Nlink,
	}
	w.Path, w.PathBytes = name(i.Path)
	w.Target, w.TargetBytes = name(i.Target)
	return w
}

// InfoFromWire is the inverse of InfoToWire.
func InfoFromWire(w *dsecv1.FileInfo) dsec.FileInfo {
	return dsec.FileInfo{
		Path:    unname(w.GetPath(), w.GetPathBytes()),
		Type:    dsec.FileType(w.GetType()),
		Mode:    w.GetMode(),
		UID:     w.GetUid(),
		GID:     w.GetGid(),
		Size:    w.GetSize(),
		ModTime: unstamp(w.GetModTime()),
		Target:  unname(w.GetTarget(), w.GetTargetBytes()),
		Nlink:   w.GetNlink(),
	}
}

// EventToWire gives e for the wire.
func EventToWire(e dsec.WatchEvent) *dsecv1.WatchEvent {
	w := &dsecv1.WatchEvent{Op: string(e.Op)}
	w.Path, w.PathBytes = name(e.Path)
	w.To, w.ToBytes = name(e.To)
	return w
}

// EventFromWire is the inverse of EventToWire.
func EventFromWire(w *dsecv1.WatchEvent) dsec.WatchEvent {
	return dsec.WatchEvent{
		Op: dsec.WatchOp(w.GetOp()), Path: unname(w.GetPath(), w.GetPathBytes()), To: unname(w.GetTo(), w.GetToBytes()),
	}
}

// MoveToWire gives a rename for the wire.
func MoveToWire(f dsec.FileOp, to string) *dsecv1.FilesMoveRequest {
	w := &dsecv1.FilesMoveRequest{File: FileToWire(f)}
	w.To, w.ToBytes = name(to)
	return w
}

// SymlinkToWire gives the making of a link for the wire.
func SymlinkToWire(f dsec.FileOp, target string) *dsecv1.FilesSymlinkRequest {
	w := &dsecv1.FilesSymlinkRequest{File: FileToWire(f)}
	w.Target, w.TargetBytes = name(target)
	return w
}

// ListToWire gives a listing for the wire.
func ListToWire(f dsec.FileOp, depth int) *dsecv1.FilesListRequest {
	return &dsecv1.FilesListRequest{File: FileToWire(f), Depth: count(depth)}
}

// DialToWire gives a Dial for the wire.
func DialToWire(port int) *dsecv1.PortsDialRequest {
	return &dsecv1.PortsDialRequest{Port: count(port)}
}
