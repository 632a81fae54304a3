package edge

import (
	"crypto/sha256"
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"sync"
	"weak"

	"github.com/dsec-go/dsec"
)

// sharedSpec is a Spec that many sandboxes of a job have in common: 10,000 of
// them keep it once. It is immutable.
type sharedSpec struct {
	spec dsec.Spec
	json []byte
	sum  [sha256.Size]byte // of json; equal Specs have equal sums
}

// interner finds the shared copy of equal data. What nobody uses any more is
// dropped by the collector, its map entries by sweep.
type interner struct {
	mu     sync.Mutex
	specs  map[[sha256.Size]byte]weak.Pointer[sharedSpec]
	layers map[string]weak.Pointer[[]string] // by the digests joined
	stages map[string]string
}

// spec gives the shared copy of s, which has its defaults filled in.
func (i *interner) spec(s dsec.Spec) *sharedSpec {
	s = cloneSpec(s)
	b, err := json.Marshal(s)
	if err != nil {
		panic("edge: encode spec: " + err.Error()) // plain data; Check refuses NaN
	}
	sum := sha256.Sum256(b)
	i.mu.Lock()
	defer i.mu.Unlock()
	if old := i.specs[sum].Value(); old != nil {
		return old
	}
	if i.specs == nil {
		i.specs = map[[sha256.Size]byte]weak.Pointer[sharedSpec]{}
	}
	sp := &sharedSpec{spec: s, json: b, sum: sum}
	i.specs[sum] = weak.Make(sp)
	return sp
}

// digests gives the shared copy of a list of layers.
func (i *interner) digests(d []string) *[]string {
	key := strings.Join(d, " ")
	i.mu.Lock()
	defer i.mu.Unlock()
	if old := i.layers[key].Value(); old != nil {
		return old
	}
	if i.layers == nil {
		i.layers = map[string]weak.Pointer[[]string]{}
	}
	list := slices.Clone(d)
	i.layers[key] = weak.Make(&list)
	return &list
}

// name gives the shared copy of a stage's name, of which there are few.
func (i *interner) name(s string) string {
	i.mu.Lock()
	defer i.mu.Unlock()
	if old, ok := i.stages[s]; ok {
		return old
	}
	if i.stages == nil {
		i.stages = map[string]string{}
	}
	if len(i.stages) < 1000 {
		s = strings.Clone(s)
		i.stages[s] = s
	}
	return s
}

// sweep drops what the collector has taken.
func (i *interner) sweep() {
	i.mu.Lock()
	defer i.mu.Unlock()
	maps.DeleteFunc(i.specs, func(_ [sha256.Size]byte, p weak.Pointer[sharedSpec]) bool { return p.Value() == nil })
	maps.DeleteFunc(i.layers, func(_ string, p weak.Pointer[[]string]) bool { return p.Value() == nil })
}

// cloneSpec copies what s refers to, and makes empty lists and maps nil so that
// equal Specs encode equally.
func cloneSpec(s dsec.Spec) dsec.Spec {
	s.Env, s.Labels = maps.Clone(s.Env), maps.Clone(s.Labels)
	s.Environment.Toolkits = slices.Clone(s.Environment.Toolkits)
	if len(s.Env) == 0 {
		s.Env = nil
	}
	if len(s.Labels) == 0 {
		s.Labels = nil
	}
	if len(s.Environment.Toolkits) == 0 {
		s.Environment.Toolkits = nil
	}
	if s.API != nil {
		api := *s.API
		api.Rights = slices.Clone(api.Rights)
		s.API = &api
	}
	return s
}
