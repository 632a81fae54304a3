package dsec

// Services is the whole surface of a cluster, a node or a node in this
// process. A field is nil where the server does not offer the service.
type Services struct {
	Sandboxes    Sandboxes
	Commands     Commands
	Files        Files
	Ports        Ports
	Images       Images
	Jobs         Jobs
	Functions    Functions
	Tokens       Tokens
	Trajectories Trajectories
	Snapshots    Snapshots
	Screens      Screens
	Projects     Projects
	Nodes        Nodes
}
