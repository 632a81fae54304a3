package edge

import (
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

// Events are called at what happens on a node, for logs and metrics. Each may
// be nil, is called from any goroutine, and must not block or call the Node.
type Events struct {
	Created      func(CreatedEvent)
	Saved        func(SavedEvent)
	Refused      func(RefusedEvent)
	Ending       func(EndingEvent) // before a guest goes; may block for a moment, and call it
	Ended        func(EndedEvent)
	Adopted      func(AdoptedEvent)
	StopFailed   func(id dsec.SandboxID, err error) // it is tried again
	JournalError func(err error)                    // a record could not be written; creates are refused until JournalHeal
	JournalHeal  func()
	Checkpoint   func(CheckpointEvent)
	DiskFull     func(id dsec.SandboxID, used, limit int64) // it is ended
	Paused       func(PausedEvent)
	Resumed      func(ResumedEvent)
	Reclaimed    func(ReclaimedEvent)
	Pressure     func(PressureEvent)
}

// CreatedEvent is a sandbox that runs.
type CreatedEvent struct {
	ID      dsec.SandboxID
	Kind    dsec.Kind
	Project dsec.ProjectID
	Job     dsec.JobID
	Key     string
	From    string // the snapshot or sandbox that it is a copy of; empty for none
	Took    time.Duration
	Stages  []dsec.Stage
}

// SavedEvent is a sandbox of which a snapshot was taken.
type SavedEvent struct {
	ID       dsec.SandboxID
	Snapshot dsec.SnapshotID
	Project  dsec.ProjectID
	Bytes    int64
	Took     time.Duration
}

// RefusedEvent is a create that did not lead to a sandbox.
type RefusedEvent struct {
	Kind  dsec.Kind
	Error error
	Took  time.Duration
}

// EndingEvent is a running sandbox that is about to be ended.
type EndingEvent struct {
	ID    dsec.SandboxID
	Guest driver.Guest
}

// EndedEvent is a sandbox that ended.
type EndedEvent struct {
	ID      dsec.SandboxID
	Kind    dsec.Kind
	Project dsec.ProjectID
	Job     dsec.JobID
	Key     string
	State   dsec.State
	Cause   dsec.Cause
	Detail  string
	Lived   time.Duration
	Took    time.Duration // from the decision to nothing left; 0 if it ended by itself
}

// AdoptedEvent sums up what Open found.
type AdoptedEvent struct {
	Records  int // in the journal, ended ones included
	Adopted  int // machines that run on
	Orphans  int // machines without a living record, stopped
	Gone     int // sandboxes whose machine was gone
	Ending   int // ends that were finished
	Rebooted bool
	Took     time.Duration
}

// CheckpointEvent is a compaction of the journal.
type CheckpointEvent struct {
	Records int
	Took    time.Duration
}

// PausedEvent is a sandbox that stands still.
type PausedEvent struct {
	ID     dsec.SandboxID
	Detail string // DetailPressure; empty when somebody asked for it
	Took   time.Duration
}

// ResumedEvent is a sandbox that goes on.
type ResumedEvent struct {
	ID        dsec.SandboxID
	Detail    string // DetailCall or DetailRestart; empty when somebody asked for it
	Reclaimed int64  // bytes that had come back
	Took      time.Duration
}

// ReclaimedEvent is memory of a paused sandbox that came back.
type ReclaimedEvent struct {
	ID    dsec.SandboxID
	Bytes int64
	Took  time.Duration
	Error error // why it was not more; nil if that is all there is
}

// PressureEvent is the node beginning, or ceasing, to be short of memory.
type PressureEvent struct {
	On        bool
	Pressure  float64 // share of time waited for memory
	Available int64   // bytes
}

// withDefaults makes every callback callable.
func (e Events) withDefaults() Events {
	if e.Created == nil {
		e.Created = func(CreatedEvent) {}
	}
	if e.Saved == nil {
		e.Saved = func(SavedEvent) {}
	}
	if e.Refused == nil {
		e.Refused = func(RefusedEvent) {}
	}
	if e.Ending == nil {
		e.Ending = func(EndingEvent) {}
	}
	if e.Ended == nil {
		e.Ended = func(EndedEvent) {}
	}
	if e.Adopted == nil {
		e.Adopted = func(AdoptedEvent) {}
	}
	if e.StopFailed == nil {
		e.StopFailed = func(dsec.SandboxID, error) {}
	}
	if e.JournalError == nil {
		e.JournalError = func(error) {}
	}
	if e.JournalHeal == nil {
		e.JournalHeal = func() {}
	}
	if e.Checkpoint == nil {
		e.Checkpoint = func(CheckpointEvent) {}
	}
	if e.DiskFull == nil {
		e.DiskFull = func(dsec.SandboxID, int64, int64) {}
	}
	if e.Paused == nil {
		e.Paused = func(PausedEvent) {}
	}
	if e.Resumed == nil {
		e.Resumed = func(ResumedEvent) {}
	}
	if e.Reclaimed == nil {
		e.Reclaimed = func(ReclaimedEvent) {}
	}
	if e.Pressure == nil {
		e.Pressure = func(PressureEvent) {}
	}
	return e
}
