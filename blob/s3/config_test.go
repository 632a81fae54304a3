package s3_test

import (
	"strings"
	"testing"

	"github.com/dsec-go/dsec/blob/s3"
)

func TestParseURL(t *testing.T) {
	got, err := s3.ParseURL("s3://bucket/a/b/?endpoint=https://host:9000&region=eu&style=path&credentials=/etc/keys&profile=p&ca=/etc/ca")
	want := s3.Config{Bucket: "bucket", Prefix: "a/b", Endpoint: "https://host:9000", Region: "eu", Style: s3.StylePath,
		Credentials: "/etc/keys", Profile: "p", CA: "/etc/ca"}
	if err != nil || got != want {
		t.Errorf("%+v, %v, want %+v", got, err, want)
	}
	for _, bad := range []string{
		"", "bucket", "s3:", "s3://", "s3:///x", "http://bucket", "s3:bucket", "s3://bucket#x", "s3://b/../c", "s3://b/a//c",
		"s3://b?style=round", "s3://b?endpoint=host", "s3://b?endpoint=https://u:p@host", "s3://b?endpoint=https://host/path",
		"s3://b?region=a&region=b", "s3://b?secret=x", "s3://b?%zz", "s3://key:hush@bucket", "s3://key:hush@bucket/%zz",
	} {
		c, err := s3.ParseURL(bad)
		if err == nil {
			t.Errorf("%q is read as %+v", bad, c)
		} else if strings.Contains(err.Error(), "hush") {
			t.Errorf("%q: the error repeats the secret: %v", bad, err)
		}
	}
}

func FuzzParseURL(f *testing.F) {
	f.Add("s3://bucket/a/b?endpoint=https://host:9000&region=eu&style=path")
	f.Add("s3://key:secret@bucket")
	f.Add("s3://b?endpoint=http://[::1]:9")
	f.Fuzz(func(t *testing.T, raw string) {
		c, err := s3.ParseURL(raw)
		if err != nil {
			return
		}
		if err := c.Check(); err != nil {
			t.Errorf("%q is read as what it refuses: %v", raw, err)
		}
		c.Credentials, c.CA = s3.FromNowhere, ""
		if _, err := s3.New(c); err != nil {
			t.Logf("%q: %v", raw, err) // the client is stricter about buckets
		}
	})
}
