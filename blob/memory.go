package blob

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"iter"
	"sync"
	"time"
)

// Memory is a Store in memory, for tests and simulations. Its zero value is empty and ready.
type Memory struct {
	mu    sync.RWMutex
	blobs map[Digest][]byte // slices are never written to once they are in
	times map[Digest]time.Time
}

var (
	_ Store  = (*Memory)(nil)
	_ Stager = (*Memory)(nil)
	_ Keeper = (*Memory)(nil)
)

// Stat implements Store.
func (m *Memory) Stat(ctx context.Context, d Digest) (Info, error) {
	b, err := m.get(ctx, d)
	if err != nil {
		return Info{}, err
	}
	return Info{Digest: d, Size: int64(len(b))}, nil
}

// Get implements Store.
func (m *Memory) Get(ctx context.Context, d Digest, off, n int64) (io.ReadCloser, error) {
	b, err := m.get(ctx, d)
	if err != nil {
		return nil, err
	}
	if n, err = span(d, int64(len(b)), off, n); err != nil {
		return nil, err
	}
	return io.NopCloser(ctxReader{ctx, bytes.NewReader(b[off : off+n])}), nil
}

// Put implements Store.
func (m *Memory) Put(ctx context.Context, d Digest, r io.Reader) error {
	if err := begin(ctx, d); err != nil {
		return err
	}
	if _, err := m.get(ctx, d); err == nil {
		return nil
	}
	b, err := io.ReadAll(ctxReader{ctx, r})
	if err != nil {
		return fmt.Errorf("put blob %s: %w", d, err)
	}
	if got := Of(b); got != d {
		return corrupt(d, got)
	}
	m.add(d, b)
	return nil
}

// Delete implements Store.
func (m *Memory) Delete(ctx context.Context, d Digest) error {
	if err := begin(ctx, d); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.blobs, d)
	delete(m.times, d)
	return nil
}

// Touch implements Keeper.
func (m *Memory) Touch(ctx context.Context, d Digest) error {
	if _, err := m.get(ctx, d); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.times[d] = time.Now()
	return nil
}

// DeleteIdle implements Keeper.
func (m *Memory) DeleteIdle(ctx context.Context, d Digest, age time.Duration) (bool, error) {
	if err := begin(ctx, d); err != nil {
		return false, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.blobs[d]; !ok || time.Since(m.times[d]) < age {
		return false, nil
	}
	delete(m.blobs, d)
	delete(m.times, d)
	return true, nil
}

// List implements Store.
func (m *Memory) List(ctx context.Context) iter.Seq2[Info, error] {
	return func(yield func(Info, error) bool) {
		m.mu.RLock()
		infos := make([]Info, 0, len(m.blobs))
		for d, b := range m.blobs {
			infos = append(infos, Info{Digest: d, Size: int64(len(b))})
		}
		m.mu.RUnlock()
		if ctx.Err() != nil {
			yield(Info{}, fmt.Errorf("list blobs: %w", context.Cause(ctx)))
			return
		}
		for _, info := range infos {
			if !yield(info, nil) {
				return
			}
		}
	}
}

// Stage implements Stager.
func (m *Memory) Stage(ctx context.Context) (Staged, error) {
	if ctx.Err() != nil {
		return nil, fmt.Errorf("stage blob: %w", context.Cause(ctx))
	}
	return &stagedMemory{m: m}, nil
}

func (m *Memory) get(ctx context.Context, d Digest) ([]byte, error) {
	if err := begin(ctx, d); err != nil {
		return nil, err
	}
	m.mu.RLock()
	defer m.mu.RUnlock()
	b, ok := m.blobs[d]
	if !ok {
		return nil, notFound(d)
	}
	return b, nil
}

func (m *Memory) add(d Digest, b []byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.blobs == nil {
		m.blobs, m.times = make(map[Digest][]byte), make(map[Digest]time.Time)
	}
	if _, ok := m.blobs[d]; !ok {
		m.blobs[d], m.times[d] = b, time.Now()
	}
}

type stagedMemory struct {
	m    *Memory // nil once used up
	data []byte
}

func (s *stagedMemory) Write(p []byte) (int, error) {
	if s.m == nil {
		return 0, errUsed
	}
	s.data = append(s.data, p...)
	return len(p), nil
}

func (s *stagedMemory) Commit(ctx context.Context) (Info, error) {
	if s.m == nil {
		return Info{}, errUsed
	}
	m := s.m
	s.m = nil
	d := Of(s.data)
	if err := begin(ctx, d); err != nil {
		return Info{}, err
	}
	m.add(d, s.data)
	return Info{Digest: d, Size: int64(len(s.data))}, nil
}

func (s *stagedMemory) Abort() error {
	s.m, s.data = nil, nil
	return nil
}
