// Package e2e tests DSec as a user has it: the built programs, a real "dsec up"
// in a process of its own, the command line and the Go SDK.
//
// It holds tests only. What one package promises is tested in that package;
// here is what shows only when all parts work together: what a hostile
// workload, a client that vanishes, a full disk or a killed node does to
// everybody else, and that in the end nothing is left on the host.
//
// Invariants:
//   - Most tests share one node. After the last of them it is taken down, and
//     the run fails if a process, control group, mount, file or descriptor of
//     it is left.
//   - A test that harms its node has one of its own.
//   - Nothing is found by sleeping: tests poll a condition up to a deadline.
//
// Read next: main_test.go, then docs/cases.md for which test holds what.
package e2e
