// Package fncall runs function calls: programs without state, each in a room
// of its own that is pristine before and gone after it. It is a decorator of
// another driver, of which it knows nothing but that the guests of its machines
// can make such rooms (driver.Celler).
//
// What it adds to a machine is what a runtime is: how a source is compiled and
// run, which program stays warm with modules imported, and what the end of a
// command means as the outcome of a call. What a cell is and how a warm program
// gets into one is package jail's and guest's.
//
// Used as an ordinary sandbox, a machine of this kind runs each command in a
// cell of its own: nothing that a command leaves is there for the next. So it
// has no files to read or write beside commands, no ports, nothing to commit
// and no snapshot: those are Unsupported, with the reason.
//
// Invariants:
//   - The source of a call never runs in the warm program, but in a fork of it
//     that is in a cell and has no capability.
//   - A build is made in a cell and put read-only into others.
//   - A machine that lost its guest or its warm program under a call says
//     driver.ErrBroken and is to be stopped.
//
// Who keeps machines ready, for whom and how many is package edge's.
//
// Read next: call.go, warm.py; then jail.Cell.
package fncall
