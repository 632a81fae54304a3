package drivertest_test

import (
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver/drivertest"
)

// Marks in docs/backends.md around the table.
const (
	begin = "<!-- table -->\n"
	end   = "<!-- end -->"
)

// TestTable compares the table in docs/backends.md with the results of the
// drivers' tests, or writes it with -update.
func TestTable(t *testing.T) {
	const path = "../../docs/backends.md"
	table, err := drivertest.Table("../../docs/backends", dsec.Kinds)
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(b), begin)
	old, after, closed := strings.Cut(rest, end)
	if !ok || !closed {
		t.Fatalf("%s has no marks for the table", path)
	}
	if old == table {
		return
	}
	if flag.Lookup("update").Value.String() != "true" {
		t.Fatalf("the table in %s is stale: run the tests of driver/drivertest with -update", path)
	}
	if err := os.WriteFile(path, []byte(before+begin+table+end+after), 0o644); err != nil {
		t.Fatal(err)
	}
}
