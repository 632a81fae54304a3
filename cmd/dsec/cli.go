package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/alecthomas/kong"

	"github.com/dsec-go/dsec"
)

const description = `DSec runs sandboxes for language-model agents.

For example:

  dsec up --detach
  dsec image import ./rootfs --name debian
  dsec run --image debian -- uname -a

On the host of "dsec up" nothing needs to be set. Elsewhere DSEC_URL and
DSEC_TOKEN name the server. With DSEC_JOB_EPOCH, which "dsec job open"
prints, all is done as the owner of a job, and refused once it has another.`

// cli is the grammar of the command line. Each command is a struct with a Run
// method in the file named like it.
type cli struct {
	Create   createCmd   `cmd:"" help:"Create a sandbox and print its ID." group:"Sandboxes:"`
	Run      runCmd      `cmd:"" help:"Create a sandbox, run a command in it, stop it." group:"Sandboxes:"`
	Exec     execCmd     `cmd:"" help:"Run a command in a sandbox." group:"Sandboxes:"`
	Ps       psCmd       `cmd:"" help:"List the commands of a sandbox." group:"Sandboxes:"`
	Wait     waitCmd     `cmd:"" help:"Wait for the end of a sandbox or of one of its commands." group:"Sandboxes:"`
	Cp       cpCmd       `cmd:"" help:"Copy files into or out of a sandbox." group:"Sandboxes:"`
	Ls       lsCmd       `cmd:"" help:"List sandboxes." group:"Sandboxes:"`
	Inspect  inspectCmd  `cmd:"" help:"Show everything about a sandbox." group:"Sandboxes:"`
	Stop     stopCmd     `cmd:"" help:"End sandboxes and everything in them." group:"Sandboxes:"`
	Pause    pauseCmd    `cmd:"" help:"Make sandboxes stand still and give their memory back." group:"Sandboxes:"`
	Resume   resumeCmd   `cmd:"" help:"Let paused sandboxes go on, which any use of them does too." group:"Sandboxes:"`
	Commit   commitCmd   `cmd:"" help:"Keep what changed in a sandbox as a workspace image." group:"Sandboxes:"`
	Snapshot snapshotCmd `cmd:"" help:"Save sandboxes, to make others from them." group:"Sandboxes:"`
	Fork     forkCmd     `cmd:"" help:"Make copies of a sandbox as it is now." group:"Sandboxes:"`
	Screen   screenCmd   `cmd:"" help:"Look at the display of a sandbox, use its keyboard and pointer." group:"Sandboxes:"`
	Log      logCmd      `cmd:"" help:"Show, check or export what was recorded of a sandbox." group:"Sandboxes:"`
	Replay   replayCmd   `cmd:"" help:"Do what was recorded again in a fresh sandbox and compare." group:"Sandboxes:"`
	Fn       fnCmd       `cmd:"" help:"Functions: programs without state, judged and gone." group:"Sandboxes:"`
	Ports    portsCmd    `cmd:"" help:"Forward local TCP ports into a sandbox." group:"Sandboxes:"`

	Job    jobCmd    `cmd:"" help:"Jobs: the sandboxes of one trainer run, and who owns them." group:"Jobs:"`
	Events eventsCmd `cmd:"" help:"Show what happened to jobs and their sandboxes." group:"Jobs:"`

	Image   imageCmd   `cmd:"" help:"Images: what sandboxes are composed of." group:"Images, tokens, nodes:"`
	Project projectCmd `cmd:"" help:"Projects: tenants that see nothing of each other." group:"Images, tokens, nodes:"`
	Token   tokenCmd   `cmd:"" help:"Tokens: who may call." group:"Images, tokens, nodes:"`
	Node    nodeCmd    `cmd:"" help:"Nodes: where sandboxes run." group:"Images, tokens, nodes:"`

	Up      upCmd      `cmd:"" help:"Run a node with its front door until interrupted." group:"This host:"`
	Down    downCmd    `cmd:"" help:"End the node of this host and all its sandboxes." group:"This host:"`
	Mend    mendCmd    `cmd:"" name:"mend-journal" help:"Make a damaged journal readable again." group:"This host:"`
	Doctor  doctorCmd  `cmd:"" help:"Show what this host can do, and what is missing." group:"This host:"`
	Bench   benchCmd   `cmd:"" help:"Measure against the budgets." group:"This host:"`
	Version versionCmd `cmd:"" help:"Print the version." group:"This host:"`

	Hold holdCmd `cmd:"" hidden:""`
	Data dataCmd `cmd:"" hidden:""`
}

// benchPlugins are the benchmarks: each file bench_*.go appends a pointer to a
// struct of commands from its init function.
var benchPlugins kong.Plugins

// benchCmd is the group of benchmarks.
type benchCmd struct {
	kong.Plugins
}

// versionCmd prints which build this is.
type versionCmd struct {
	outputFlags
}

// version is what version prints.
type version struct {
	Version  string
	Revision string // of the source, where the build recorded it
	Go       string
	Platform string
}

// Run prints it.
func (c *versionCmd) Run(a *app) error {
	v := version{Version: dsec.Version, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				v.Revision = s.Value
			}
		}
	}
	if c.JSON {
		return a.json(v)
	}
	_, err := fmt.Fprintf(a.Stdout, "dsec %s %s %s\n", v.Version, v.Go, v.Platform)
	return err
}
