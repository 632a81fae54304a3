package main

import (
	"fmt"
	"reflect"
	"strings"

	"github.com/alecthomas/kong"
)

// Flags that mean nothing without another, or beside another, say so in tags,
// so that the grammar is the one table of what goes together and a flag that
// would be passed over is refused:
//
//	needs:"a,b"   means nothing unless one of these is given too
//	not:"a,b"     contradicts each of these
//	positive:""   0 would silently be taken as the default
const (
	tagNeeds    = "needs"
	tagNot      = "not"
	tagPositive = "positive"
)

// checkTogether refuses a command line whose flags do not go together.
func checkTogether(k *kong.Context) error {
	given := map[string]*kong.Flag{}
	var order []*kong.Flag
	for _, p := range k.Path {
		if f := p.Flag; f != nil && given[f.Name] == nil {
			given[f.Name] = f
			order = append(order, f)
		}
	}
	for _, f := range order {
		if off(f) {
			continue // as if it were not there
		}
		needs := tagNames(f.Tag.Get(tagNeeds))
		found := len(needs) == 0
		for _, name := range needs {
			found = found || given[name] != nil && !off(given[name])
		}
		if !found {
			return fmt.Errorf("--%s means nothing without --%s", f.Name, strings.Join(needs, " or --"))
		}
		for _, name := range tagNames(f.Tag.Get(tagNot)) {
			if other := given[name]; other != nil && !off(other) {
				return fmt.Errorf("--%s and --%s do not go together", f.Name, name)
			}
		}
		if f.Tag.Has(tagPositive) && f.Target.IsZero() {
			return fmt.Errorf("--%s is 0; it must be more, and without the flag the default counts", f.Name)
		}
	}
	return nil
}

// off reports whether a switch was given as --name=false.
func off(f *kong.Flag) bool { return f.Target.Kind() == reflect.Bool && !f.Target.Bool() }

// tagNames gives the names in a tag.
func tagNames(list string) []string {
	return strings.FieldsFunc(list, func(r rune) bool { return r == ',' })
}
