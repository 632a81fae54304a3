package main

import (
	"context"
	"errors"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/depot"
)

// learnAfter is when a profile of a layer is complete: a little after the depot stops noting.
const learnAfter = depot.NoteFor + 5*time.Second

// learn has what others saw of a layer fetched ahead, or keeps what is seen here, once in the
// life of this process. All of it is a hint.
func (s *images) learn(digest string) {
	if s.profiles.store == nil {
		return
	}
	if _, known := s.learned.LoadOrStore(digest, true); known {
		return
	}
	s.lazy.work.Go(func() {
		ctx, cancel := context.WithTimeout(s.lazy.life, 4*learnAfter)
		defer cancel()
		b, err := s.profiles.get(ctx, digest)
		switch {
		case err == nil && b != nil:
			if err = s.lazy.Prefetch(ctx, digest, b); err == nil && s.lazy.pause(learnAfter) {
				_, err = s.lazy.Profile(ctx, digest)
			}
			if k := dsec.KindOf(err); err != nil && (k == dsec.Invalid || k == dsec.Lost) {
				err = errors.Join(err, s.profiles.forget(ctx, digest)) // so that another is recorded
			}
		case err == nil && s.lazy.pause(learnAfter):
			if b, err = s.profiles.get(ctx, digest); err != nil || b != nil {
				break // another node was faster
			}
			if b, err = s.lazy.Profile(ctx, digest); err == nil && b != nil {
				err = s.profiles.add(ctx, digest, b)
			}
		}
		if err != nil && s.lazy.life.Err() == nil {
			s.lazy.log.Debug("the profile of a layer", "layer", digest, logErr, err)
		}
	})
}
