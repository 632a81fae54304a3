package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
)

// TestFlagsThatDoNotGoTogether has a row for each flag that would otherwise be
// passed over in silence.
func TestFlagsThatDoNotGoTogether(t *testing.T) {
	for line, want := range map[string]string{
		"log sb1 --head 00":                             "--head means nothing without --verify",
		"log sb1 --verify=false --head 00":              "--head means nothing without --verify",
		"log sb1 --idle-limit 1s":                       "--idle-limit means nothing without --cast",
		"log sb1 --cast f --json":                       "--cast and --json do not go together",
		"log sb1 --cast f --follow":                     "--follow and --cast do not go together",
		"log sb1 --cast f --raw d":                      "--cast and --raw do not go together",
		"log sb1 --verify --raw d":                      "--verify and --raw do not go together",
		"log sb1 --verify --cast f":                     "--verify and --cast do not go together",
		"log sb1 --verify -f":                           "--follow and --verify do not go together",
		"log sb1 --raw d --full":                        "--full and --raw do not go together",
		"log --from d --follow":                         "--follow and --from do not go together",
		"events --follow":                               "--follow means nothing without --job",
		"events --after 3":                              "--after means nothing without --job",
		"create --image x --api-port 8000":              "--api-port means nothing without --api",
		"create --image x --api-cpu 1":                  "--api-cpu means nothing without --api",
		"create --image x --api --api-port 0":           "--api-port is 0",
		"run --api --api-sandboxes 0 x -- true":         "--api-sandboxes is 0",
		"create --image x --cpu 0":                      "--cpu is 0",
		"create --image x --memory 0":                   "--memory is 0",
		"create --image x --ttl 0":                      "--ttl is 0",
		"exec --output 0 sb1 -- true":                   "--output is 0",
		"fn run --image x --cpu-time 0s f.py":           "--cpu-time is 0",
		"project create p --sandboxes 0":                "--sandboxes is 0",
		"token create t --expires 0":                    "--expires is 0",
		"fork sb1 --ttl 0":                              "--ttl is 0",
		"ls -q --json":                                  "--quiet and --json do not go together",
		"snapshot ls --json --quiet":                    "--quiet and --json do not go together",
		"doctor --swap 1G":                              "--swap means nothing without --fix",
		"up --cache 1G":                                 "--cache means nothing without --store",
		"up --swap 0":                                   "--swap is 0",
		"bench create --url http://a --guest g":         "--guest and --url do not go together",
		"bench create --kind microvm --dax 1M --no-dax": "--no-dax and --dax do not go together",
		"bench create --forks 3":                        "--forks means nothing without --kind",
	} {
		f := newFake()
		s := newSession(f)
		status := statusUsage
		if first, _, _ := strings.Cut(line, " "); first == "exec" || first == "run" || first == "fn" {
			status = statusExec
		}
		if got := <-s.start(strings.Fields(line)...); got != status || !strings.HasPrefix(s.err.String(), "dsec: "+want) {
			t.Errorf("dsec %s: status %d, %q, want %d, %q", line, got, s.err, status, want)
		}
	}
}

// TestTagsNameFlags finds names in tags that no flag of the command has: they
// would never be found given.
func TestTagsNameFlags(t *testing.T) {
	c := cli{}
	c.Bench.Plugins = benchPlugins
	p, err := kong.New(&c, kong.Name("dsec"))
	if err != nil {
		t.Fatal(err)
	}
	tags := 0
	for _, leaf := range p.Model.Leaves(false) {
		var known []string
		for _, group := range leaf.AllFlags(false) {
			for _, f := range group {
				known = append(known, f.Name)
			}
		}
		for _, group := range leaf.AllFlags(false) {
			for _, f := range group {
				for _, name := range append(tagNames(f.Tag.Get(tagNeeds)), tagNames(f.Tag.Get(tagNot))...) {
					tags++
					if !slices.Contains(known, name) {
						t.Errorf("dsec %s: the tag of --%s names --%s, which it does not have", leaf.Path(), f.Name, name)
					}
				}
			}
		}
	}
	if tags == 0 {
		t.Error("there are no tags")
	}
}
