package s3test

import (
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
)

// Cluster is a SeaweedFS of one master, one filer, an S3 door, and three volume servers
// that keep two copies of everything.
type Cluster struct {
	Server
	filer   string
	volumes []*exec.Cmd
}

// Seaweed starts a cluster with one bucket. It takes about 1 GB of memory.
func Seaweed(t testing.TB) *Cluster {
	t.Helper()
	bin := binary(t, "weed", "test-stores")
	dir := t.TempDir()
	sub := func(name string) string {
		path := filepath.Join(dir, name)
		if err := os.Mkdir(path, 0o700); err != nil {
			t.Fatal(err)
		}
		return path
	}
	identities := filepath.Join(dir, "s3.json")
	text := fmt.Sprintf(`{"identities":[{"name":"test","credentials":[{"accessKey":%q,"secretKey":%q}],"actions":["Admin","Read","List","Write","Tagging"]}]}`, AccessKey, SecretKey)
	if err := os.WriteFile(identities, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	master, filer, s3 := newPorts(t), newPorts(t), newPorts(t)
	start(t, master.addr(), bin, "master", "-ip=127.0.0.1", "-port="+master.http, "-port.grpc="+master.grpc,
		"-mdir="+sub("master"), "-defaultReplication=001", "-volumeSizeLimitMB=256", "-peers=none")
	c := &Cluster{Server: Server{Addr: s3.addr(), Bucket: "dsec", Keys: Keys(t, SecretKey)}, filer: filer.both()}
	for i := range 3 {
		v := newPorts(t)
		c.volumes = append(c.volumes, start(t, v.addr(), bin, "volume", "-ip=127.0.0.1", "-port="+v.http, "-port.grpc="+v.grpc,
			"-dir="+sub(fmt.Sprint("volume", i)), "-master="+master.both(), "-max=30"))
	}
	start(t, filer.addr(), bin, "filer", "-ip=127.0.0.1", "-port="+filer.http, "-port.grpc="+filer.grpc, "-master="+master.both(),
		"-defaultStoreDir="+sub("filer"))
	start(t, s3.addr(), bin, "s3", "-ip.bind=127.0.0.1", "-port="+s3.http, "-port.grpc="+s3.grpc, "-filer="+filer.both(),
		"-config="+identities, "-port.iceberg=0", "-port.lance=0")
	c.awaitBucket(t)
	return c
}

// awaitBucket makes the bucket as soon as the parts of the cluster have found each other.
func (c *Cluster) awaitBucket(t testing.TB) {
	t.Helper()
	client, err := minio.New(c.Addr, &minio.Options{Creds: credentials.NewStaticV4(AccessKey, SecretKey, ""), Region: "us-east-1", MaxRetries: 1})
	if err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(100 * time.Millisecond) {
		err := client.MakeBucket(t.Context(), c.Bucket, minio.MakeBucketOptions{})
		if err == nil || minio.ToErrorResponse(err).StatusCode == 409 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("make bucket: %v", err)
		}
	}
}

// Kill ends a volume server, as a power cut would.
func (c *Cluster) Kill(t testing.TB, i int) {
	t.Helper()
	if err := c.volumes[i].Process.Kill(); err != nil {
		t.Fatal(err)
	}
}

// Mount mounts the bucket with the cluster's own FUSE client.
func (c *Cluster) Mount(t testing.TB) string {
	t.Helper()
	bin := binary(t, "weed", "test-stores")
	dir := t.TempDir()
	var before syscall.Stat_t
	if err := syscall.Stat(dir, &before); err != nil {
		t.Fatal(err)
	}
	listen := freeAddr(t) // some place that is listening, to wait for
	l, err := net.Listen("tcp", listen)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	start(t, listen, bin, "mount", "-dir="+dir, "-filer="+c.filer, "-filer.path=/buckets/"+c.Bucket, "-cacheDir="+t.TempDir(),
		"-localSocket="+filepath.Join(t.TempDir(), "mount.sock"))
	t.Cleanup(func() { syscall.Unmount(dir, syscall.MNT_DETACH) }) //nolint:errcheck // not if it never came
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(20 * time.Millisecond) {
		var st syscall.Stat_t
		if syscall.Stat(dir, &st) == nil && st.Dev != before.Dev {
			return dir
		}
		if time.Now().After(deadline) {
			t.Fatal("SeaweedFS does not mount (fuse3 installed?)")
		}
	}
}

type ports struct{ http, grpc string }

func newPorts(t testing.TB) ports {
	t.Helper()
	_, a, err := net.SplitHostPort(freeAddr(t))
	if err != nil {
		t.Fatal(err)
	}
	_, b, err := net.SplitHostPort(freeAddr(t))
	if err != nil {
		t.Fatal(err)
	}
	return ports{a, b}
}

func (p ports) addr() string { return "127.0.0.1:" + p.http }
func (p ports) both() string { return "127.0.0.1:" + p.http + "." + p.grpc }
