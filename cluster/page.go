package cluster

import (
	"cmp"
	"encoding/base64"
	"encoding/json"
	"strings"

	"github.com/dsec-go/dsec"
)

// A Query selects images of a Page. Empty fields select all.
type Query struct {
	Prefix string // of the name
	Digest string // of the layer
	Limit  int    // at most this many
	After  string // next of the page before
}

// cursor is where a page ended. It stays good when images come and go.
type cursor struct {
	Name    string
	Project dsec.ProjectID
	Created int64 // versions of the name that are older follow; 0 before all
	Version string
}

// Page returns images of n's view by name, the newest version first, everybody's before a
// project's; next continues the list and is empty at its end. A bad After is Invalid.
func (n Names) Page(q Query) (page []Entry, next string, err error) {
	var after cursor
	if q.After != "" {
		b, err := base64.RawURLEncoding.DecodeString(q.After)
		if err == nil {
			err = json.Unmarshal(b, &after)
		}
		if err != nil {
			return nil, "", failf("cluster.Page", dsec.Invalid, "%.80q is not where a page of images ended", q.After)
		}
	}
	if after.Name < q.Prefix {
		after = cursor{Name: q.Prefix}
	}
	n.c.mirror.read(func(s *state) {
		var last cursor
		s.sorted.AscendGreaterOrEqual(imageKey{after.Project, after.Name}, func(k imageKey) bool {
			if !strings.HasPrefix(k.name, q.Prefix) {
				return false
			}
			if !n.sees(k) {
				return true
			}
			for _, r := range s.images[k] {
				if k.name == after.Name && k.project == after.Project && !older(r, after) || q.Digest != "" && r.Digest != q.Digest {
					continue
				}
				if q.Limit > 0 && len(page) == q.Limit {
					next = base64.RawURLEncoding.EncodeToString([]byte(encode(last)))
					return false
				}
				page = append(page, s.tagged(k, r))
				last = cursor{k.name, k.project, r.created, r.Version}
			}
			return true
		})
	})
	return page, next, nil
}

// older reports whether a version comes after a cursor of its name.
func older(r imageRecord, c cursor) bool {
	return c.Created == 0 || cmp.Or(-cmp.Compare(r.created, c.Created), cmp.Compare(r.Version, c.Version)) > 0
}
