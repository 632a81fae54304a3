package image

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/erofs"
)

const (
	pieceSize = sha256.Size + 2 // of an entry of a list of pieces
	maxPiece  = 1 << 16         // blocks
)

// A pieceList says which contents a data blob has where: the SHA-256 of each
// piece, as erofs.Blob laid them, end to end, and its number of blocks less one.
// Other layers find by it what need not be stored again.
type pieceList struct {
	b      []byte
	starts []uint32 // the block at which each piece begins
}

// appendPiece adds one to the bytes of a list.
func appendPiece(b []byte, sum erofs.Sum, size int) []byte {
	b = append(b, sum[:]...)
	return binary.LittleEndian.AppendUint16(b, uint16(size/erofs.BlockSize-1))
}

// parsePieces reads the list of a blob of that size.
func parsePieces(b []byte, size int64) (*pieceList, error) {
	if len(b) == 0 || len(b)%pieceSize != 0 {
		return nil, fmt.Errorf("list of pieces of %d bytes: %w", len(b), ErrCorrupt)
	}
	l := &pieceList{b: b, starts: make([]uint32, 0, len(b)/pieceSize)}
	at := int64(0)
	for e := range slices.Chunk(b, pieceSize) {
		l.starts = append(l.starts, uint32(at))
		if at += int64(binary.LittleEndian.Uint16(e[sha256.Size:])) + 1; at > size/erofs.BlockSize {
			break
		}
	}
	if at*erofs.BlockSize != size {
		return nil, fmt.Errorf("list of pieces of other than %d bytes: %w", size, ErrCorrupt)
	}
	return l, nil
}

// readPieces fetches, checks and reads the list of d.
// Requires: d.Pieces != nil.
func readPieces(ctx context.Context, s blob.Store, d Data) (*pieceList, error) {
	b, err := readPart(ctx, s, *d.Pieces)
	if err != nil {
		return nil, fmt.Errorf("list of pieces: %w", err)
	}
	return parsePieces(b, d.Size)
}

func (l *pieceList) len() int { return len(l.starts) }

func (l *pieceList) sum(i int) erofs.Sum { return erofs.Sum(l.b[i*pieceSize:]) }

// has reports whether the blob has exactly that piece at that block.
func (l *pieceList) has(block uint32, sum erofs.Sum, size int) bool {
	i, ok := slices.BinarySearch(l.starts, block)
	if !ok || l.sum(i) != sum {
		return false
	}
	n := binary.LittleEndian.Uint16(l.b[i*pieceSize+sha256.Size:])
	return (int(n)+1)*erofs.BlockSize == size
}
