// Package sdk holds the clients of DSec in other languages, and the tests that
// run each against a real node. There is nothing in it for Go: that is package
// client.
//
// Read next: python/README.md.
package sdk
