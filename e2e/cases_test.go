package e2e_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestCasesNameTests checks docs/cases.md: each test it names exists.
func TestCasesNameTests(t *testing.T) {
	page, err := os.ReadFile("../docs/cases.md")
	must(t, err)
	named := regexp.MustCompile("`([a-z0-9/]+)\\.((?:Test|Fuzz|test)[A-Z]\\w*)(/[^`]*)?`")
	rows := 0
	for line := range strings.Lines(string(page)) {
		if !regexp.MustCompile(`^\| [0-9]+ \|`).MatchString(line) {
			continue
		}
		rows++
		for _, m := range named.FindAllStringSubmatch(line, -1) {
			// A list that others run, as drivertest, is no test file itself.
			files, err := filepath.Glob(filepath.Join("..", m[1], "*.go"))
			must(t, err)
			found := false
			for _, file := range files {
				text, err := os.ReadFile(file)
				must(t, err)
				found = found || strings.Contains(string(text), "\nfunc "+m[2]+"(")
			}
			if !found {
				t.Errorf("%s has no %s: %s", m[1], m[2], strings.TrimSpace(line))
			}
		}
	}
	if rows < 40 {
		t.Errorf("only %d rows were found", rows)
	}
}
