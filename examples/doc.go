// Package examples holds programs that use DSec as its users do, and the tests
// that run them against a real node: a trainer that may be killed at any instant
// (trainer), and adapters for frameworks of reinforcement learning and evaluation
// (adapters). They are written in Python; there is nothing in it for Go.
//
// Read next: ../docs/integrations.md.
package examples
