// Package s3test runs real S3 servers for tests, on loopback, from binaries that "make
// stores" and "make test-stores" have built. It is imported by tests only.
package s3test

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/dsec-go/dsec/blob/s3"
)

// Access is the key that all servers here take, which is no secret.
const (
	AccessKey = "dsec-test"
	SecretKey = "dsec-test-secret"
)

// Server is a running server with one bucket.
type Server struct {
	Addr   string // host:port
	Bucket string
	Keys   string // a credentials file
}

// Config is where to find the store under prefix, through the server at addr, which may be
// a blobtest.Wire.
func (s *Server) Config(addr, prefix string) s3.Config {
	return s3.Config{Endpoint: "http://" + addr, Bucket: s.Bucket, Prefix: prefix, Credentials: s.Keys}
}

// URL is the same as a store URL.
func (s *Server) URL(prefix string) string {
	return fmt.Sprintf("s3://%s/%s?endpoint=http://%s&credentials=%s", s.Bucket, prefix, s.Addr, s.Keys)
}

// Gateway starts a versitygw over a folder: buckets are folders in it.
func Gateway(t testing.TB, dir string) *Server {
	t.Helper()
	bin := binary(t, "versitygw", "stores")
	addr := freeAddr(t)
	start(t, addr, bin, "--port", addr, "--quiet", "--keep-alive", "posix", dir)
	s := &Server{Addr: addr, Bucket: "dsec", Keys: Keys(t, SecretKey)}
	s.makeBucket(t)
	return s
}

// Keys writes a credentials file.
func Keys(t testing.TB, secret string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "credentials")
	text := fmt.Sprintf("[default]\naws_access_key_id = %s\naws_secret_access_key = %s\n", AccessKey, secret)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func (s *Server) makeBucket(t testing.TB) {
	t.Helper()
	c, err := minio.New(s.Addr, &minio.Options{Creds: credentials.NewStaticV4(AccessKey, SecretKey, ""), Region: "us-east-1"})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.MakeBucket(t.Context(), s.Bucket, minio.MakeBucketOptions{}); err != nil {
		t.Fatalf("make bucket: %v", err)
	}
}

// binary finds a server that was built before.
func binary(t testing.TB, name, target string) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for ; dir != "/"; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			break
		}
	}
	path := filepath.Join(dir, "bin", "stores", name)
	if _, err := os.Stat(path); err != nil {
		t.Skipf("feature %s (make %s builds it): %v", name, target, err)
	}
	return path
}

func freeAddr(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// start runs a server until the test ends and waits until it accepts connections at addr.
func start(t testing.TB, addr, bin string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(bin, args...)
	cmd.Env = append(os.Environ(), "ROOT_ACCESS_KEY="+AccessKey, "ROOT_SECRET_KEY="+SecretKey,
		"AWS_ACCESS_KEY_ID="+AccessKey, "AWS_SECRET_ACCESS_KEY="+SecretKey)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	dead := make(chan struct{})
	go func() {
		cmd.Wait() //nolint:errcheck // it is killed
		close(dead)
	}()
	t.Cleanup(func() {
		cmd.Process.Kill() //nolint:errcheck // it may be dead
		<-dead
		if t.Failed() {
			t.Logf("%s:\n%.4000s", filepath.Base(bin), out.Bytes())
		}
	})
	for deadline := time.Now().Add(2 * time.Minute); ; {
		if c, err := net.Dial("tcp", addr); err == nil {
			c.Close()
			return cmd
		}
		select {
		case <-dead:
			t.Fatalf("%s ended: %s", filepath.Base(bin), out.Bytes())
		case <-time.After(20 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s does not listen at %s", filepath.Base(bin), addr)
		}
	}
}
