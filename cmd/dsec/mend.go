package main

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/journal"
)

// mendCmd makes a damaged journal one that a node can be started with.
type mendCmd struct {
	Data string `help:"The node's data folder (default that of the context file, else /var/lib/dsec)." placeholder:"DIR"`
	outputFlags
}

// Help says what it costs.
func (c *mendCmd) Help() string {
	return `A node whose journal was damaged, by a disk or by hand, does not start: it says
which file is damaged and where. Here each such file is copied aside, to a name
that ends with ".damaged", and written anew with every record in it that can be
verified. What a power cut leaves behind is no damage and needs none of this.

The price: any lost record may have been of any sandbox that lived when it was
written. Those end as lost, with cause node-lost, when the node is started. Their
logs are kept up to what is missing. Sandboxes that had ended by then, their
logs, images and everything else stay.`
}

// mended is what is shown of one file.
type mended struct {
	File   string
	Aside  string `json:",omitempty"`
	Offset int64
	Lost   uint64
	Kept   uint64
}

// Run mends it.
func (c *mendCmd) Run(a *app) error {
	data, err := a.dataFolder(c.Data)
	if err != nil {
		return err
	}
	if !hasNode(data) {
		return dsec.Errorf(dsec.NotFound, "%s is not the data folder of a node", data)
	}
	folder, err := openData(data)
	if errors.Is(err, errInUse) {
		return dsec.Errorf(dsec.Conflict, "the node of %s is running: its journal is whole", data)
	}
	if err != nil {
		return err
	}
	defer folder.close()
	if _, err := os.Stat(folder.at(journalDir)); errors.Is(err, os.ErrNotExist) {
		return dsec.Errorf(dsec.NotFound, "the node of %s has no journal yet", data)
	}
	done, err := journal.Mend(folder.at(journalDir), journal.Options{})
	all := make([]mended, 0, len(done))
	rows := [][]string{{"DAMAGED FILE", "AT BYTE", "RECORDS KEPT", "LOST", "COPIED TO"}}
	for _, m := range done {
		all = append(all, mended(m))
		rows = append(rows, []string{m.File, strconv.FormatInt(m.Offset, 10), strconv.FormatUint(m.Kept, 10), strconv.FormatUint(m.Lost, 10), m.Aside})
	}
	switch {
	case err != nil && len(done) == 0:
		return err
	case c.JSON:
		return errors.Join(a.json(all), err)
	case len(done) == 0:
		_, err = fmt.Fprintln(a.Stdout, "The journal is whole: nothing was changed.")
		return err
	}
	return errors.Join(a.table(rows...), err)
}
