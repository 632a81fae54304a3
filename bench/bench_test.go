package bench_test

import (
	"encoding/json"
	"math"
	"strings"
	"testing"

	"github.com/dsec-go/dsec/bench"
)

func TestHold(t *testing.T) {
	for _, c := range []struct {
		value float64
		sense bench.Sense
		limit float64
		want  bool
	}{
		{2, bench.AtMost, 2, true},
		{2.01, bench.AtMost, 2, false},
		{0.5, bench.AtLeast, 0.5, true},
		{0.49, bench.AtLeast, 0.5, false},
		{math.NaN(), bench.AtMost, 2, false},
		{math.NaN(), bench.AtLeast, 2, false},
		{math.Inf(1), bench.AtMost, 2, false},
	} {
		r := bench.NewReport("x")
		r.Hold("b", c.value, c.sense, c.limit, "ratio")
		if got := r.Budgets[0].OK; got != c.want {
			t.Errorf("%v %s %v: ok = %v", c.value, c.sense, c.limit, got)
		}
		if got := r.Missed() == 0; got != c.want {
			t.Errorf("%v %s %v: missed %d", c.value, c.sense, c.limit, r.Missed())
		}
		if _, err := json.Marshal(r); err != nil {
			t.Errorf("encode a budget of %v: %v", c.value, err)
		}
	}
}

func TestReportJSON(t *testing.T) {
	r := bench.NewReport("create")
	s := sample(1, 2, 3)
	s.Stage("clone").Add(0.5)
	r.Add("floor", s)
	r.Add("nothing", bench.Millis())
	r.Value("rate", 120, "1/s")
	r.Hold("create", 1.5, bench.AtMost, 2, "ratio")
	r.Note("at %d", 1)
	b, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Bench   string
		Host    struct{ CPUs int }
		Budgets []map[string]any
		Figures []struct {
			Name     string
			N        int
			P50, P99 float64
			Stages   []struct{ Name string }
		}
		Notes []string
	}
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	if got.Bench != "create" || got.Host.CPUs < 1 || len(got.Notes) != 1 {
		t.Errorf("report is %s", b)
	}
	for k, want := range map[string]any{"name": "create", "value": 1.5, "limit": 2.0, "unit": "ratio", "ok": true} {
		if got.Budgets[0][k] != want {
			t.Errorf("budget's %s = %v, want %v", k, got.Budgets[0][k], want)
		}
	}
	f := got.Figures[0]
	if f.N != 3 || f.P50 != 2 || f.P99 != 3 || len(f.Stages) != 1 || f.Stages[0].Name != "clone" {
		t.Errorf("figure is %+v", f)
	}
}

func TestPrintNamesWhatWasMissed(t *testing.T) {
	r := bench.NewReport("create")
	r.Hold("fast", 1, bench.AtMost, 2, "ratio")
	r.Hold("slow", 3, bench.AtMost, 2, "ratio")
	r.Add("floor", sample(1.25, 2))
	r.Note("quiet host")
	var b strings.Builder
	if err := r.Print(&b); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(b.String()) {
		if strings.HasPrefix(line, "slow") != strings.Contains(line, "MISSED") {
			t.Errorf("line %q", line)
		}
	}
	for _, want := range []string{"kept", "1.25", "quiet host", "at most 2"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is not in\n%s", want, b.String())
		}
	}
}
