package rpc_test

import (
	"bytes"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc"
)

// TestUnknownFields sends every call of the schema a field that it does not
// have: on the outside, and where its request has messages, within.
func TestUnknownFields(t *testing.T) {
	r := start(t)
	calls := 0
	protoregistry.GlobalFiles.RangeFilesByPackage("dsec.v1", func(f protoreflect.FileDescriptor) bool {
		for i := range f.Services().Len() {
			s := f.Services().Get(i)
			for j := range s.Methods().Len() {
				m := s.Methods().Get(j)
				bodies := []string{`{"unheard":1}`}
				for k := range m.Input().Fields().Len() {
					if fd := m.Input().Fields().Get(k); fd.Message() != nil && !fd.IsList() && !fd.IsMap() &&
						fd.Message().ParentFile().Package() == "dsec.v1" {
						bodies = append(bodies, `{"`+fd.JSONName()+`":{"unheard":[]}}`)
					}
				}
				for _, body := range bodies {
					calls++
					kind, b := "application/json", []byte(body)
					if m.IsStreamingClient() || m.IsStreamingServer() {
						kind, b = "application/connect+json", frame(body)
					}
					_, answer := r.post(t, string(s.Name())+"/"+string(m.Name()), kind, b)
					if !bytes.Contains(answer, []byte(`"invalid_argument"`)) || !bytes.Contains(answer, []byte(`unknown field \"unheard\"`)) {
						t.Errorf("%s %s: %q, want an invalid argument that names the field", m.FullName(), body, answer)
					}
				}
			}
		}
		return true
	})
	if calls < 45 {
		t.Errorf("only %d calls were made", calls)
	}
}

// TestUnknownFieldInAQuery makes a call that only reads as a GET.
func TestUnknownFieldInAQuery(t *testing.T) {
	r := start(t)
	for message, want := range map[string]int{`{}`: 200, `{"unheard":1}`: 400} {
		res, err := http.Get(r.url + "/dsec.v1.Images/List?connect=v1&encoding=json&message=" + url.QueryEscape(message))
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(res.Body)
		res.Body.Close()
		if res.StatusCode != want || want == 400 && !bytes.Contains(b, []byte("unheard")) {
			t.Errorf("%s: %s %s, want %d", message, res.Status, b, want)
		}
	}
}

// TestUnknownFieldWithinAStream has the fault in a later message; what came
// before must not be taken for the whole.
func TestUnknownFieldWithinAStream(t *testing.T) {
	r := start(t)
	body := append(frame(`{"file":{"path":"/x"},"data":"YQ=="}`), frame(`{"dat":"YQ=="}`)...)
	_, answer := r.post(t, "Files/Write", "application/connect+json", body)
	if !bytes.Contains(answer, []byte(`"invalid_argument"`)) || !bytes.Contains(answer, []byte(`unknown field \"dat\"`)) {
		t.Errorf("%q, want an invalid argument that names the field", answer)
	}
	if _, err := r.Services().Files.Stat(t.Context(), dsec.Call{Sandbox: r.id}, dsec.FileOp{Path: "/x"}); dsec.KindOf(err) != dsec.NotFound {
		t.Errorf("the file is there after a broken upload: %v", err)
	}
}

// TestBadJSON looks at the words: they say JSON, and are the same each time.
func TestBadJSON(t *testing.T) {
	r := start(t)
	for _, body := range []string{`{"max":"soon"}`, `{`, `[]`, `{"id":7}`, ``} {
		first := ""
		for range 2 {
			res, b := r.post(t, "Commands/Wait", "application/json", []byte(body))
			text := string(bytes.ReplaceAll(b, []byte(res.Header.Get(rpc.HeaderRequest)), nil))
			text, _, _ = strings.Cut(text, `"details"`)
			if res.StatusCode != 400 || !strings.Contains(text, "JSON") || first != "" && text != first {
				t.Errorf("%q: %s %s, before %s", body, res.Status, text, first)
			}
			first = text
		}
	}
}
