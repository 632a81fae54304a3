package s3

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/dsec-go/dsec/blob"
)

// The values of a zero Config.
const (
	defaultRegion   = "us-east-1"
	defaultStall    = 30 * time.Second
	defaultPartSize = 16 << 20
	defaultParallel = 4
	defaultPage     = 1000

	connectTimeout = 10 * time.Second
)

// Style says where in an address the bucket stands.
type Style string

// The styles.
const (
	StyleAuto Style = ""     // StyleHost for the large clouds, StylePath for others
	StylePath Style = "path" // https://server/bucket/key
	StyleHost Style = "host" // https://bucket.server/key
)

// The sources of credentials that are not a file.
const (
	FromEnvironment = ""         // AWS_ACCESS_KEY_ID and so on; otherwise the file of the AWS tools
	FromInstance    = "instance" // what the machine's cloud hands out
	FromNowhere     = "none"     // requests are not signed
)

// Config is a place for blobs. It holds no secret, so it can be printed.
type Config struct {
	Endpoint string // https://host[:port], or http:// in a network that is trusted; "": Amazon's
	Region   string // us-east-1 if ""
	Bucket   string
	Prefix   string // keys begin with it and a slash
	Style    Style

	// Credentials is where the key comes from: FromEnvironment, FromInstance, FromNowhere
	// or the path of a file in the format of the AWS tools, which is read again when it
	// changes. Profile is the section of it.
	Credentials string
	Profile     string

	CA string // file of certificates to trust besides the system's

	Stall    time.Duration // how long to wait for a sign of life, 30 s if 0
	Retry    blob.Retry    // for the requests of Put and Stage
	PartSize int64         // 16 MiB if 0; 5 MiB is the least that servers take
	Parallel int           // parts of one Put on the way at once, 4 if 0
}

// ParseURL reads s3://bucket[/prefix]?endpoint=...&region=...&style=path|host&credentials=...&profile=...&ca=...
// Secrets have no place in it.
func ParseURL(raw string) (Config, error) {
	u, err := url.Parse(raw)
	if err != nil {
		// The error of url.Parse repeats its input.
		return Config{}, errors.New("store URL is malformed")
	}
	if u.User != nil {
		return Config{}, errors.New("store URL holds a user or password: keys are read from the environment or a file")
	}
	if u.Scheme != "s3" || u.Host == "" || u.Opaque != "" || u.Fragment != "" {
		return Config{}, fmt.Errorf("store URL %q is not s3://bucket/prefix", u.Redacted())
	}
	c := Config{Bucket: u.Host, Prefix: strings.Trim(u.Path, "/")}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return Config{}, errors.New("store URL has a malformed query")
	}
	fields := map[string]*string{
		"endpoint": &c.Endpoint, "region": &c.Region, "style": (*string)(&c.Style),
		"credentials": &c.Credentials, "profile": &c.Profile, "ca": &c.CA,
	}
	for name, values := range query {
		field, ok := fields[name]
		if !ok || len(values) != 1 {
			return Config{}, fmt.Errorf("store URL: %q is unknown or twice", name)
		}
		*field = values[0]
	}
	return c, c.Check()
}

// Check returns nil if c can be used.
func (c Config) Check() error {
	if c.Bucket == "" || strings.ContainsAny(c.Bucket, "/?#@ ") {
		return fmt.Errorf("bucket name %q is malformed", c.Bucket)
	}
	for part := range strings.SplitSeq(c.Prefix, "/") {
		if c.Prefix != "" && (part == "" || part == "." || part == "..") {
			return fmt.Errorf("prefix %q is malformed", c.Prefix)
		}
	}
	switch c.Style {
	case StyleAuto, StylePath, StyleHost:
	default:
		return fmt.Errorf("style %q is neither path nor host", c.Style)
	}
	if _, _, err := c.endpoint(); err != nil {
		return err
	}
	return nil
}

// endpoint returns host:port and whether it is spoken to in TLS.
func (c Config) endpoint() (host string, secure bool, err error) {
	if c.Endpoint == "" {
		region := c.Region
		if region == "" {
			region = defaultRegion
		}
		return "s3." + region + ".amazonaws.com", true, nil
	}
	u, err := url.Parse(c.Endpoint)
	if err != nil || u.Host == "" || u.User != nil || u.RawQuery != "" || strings.Trim(u.Path, "/") != "" ||
		u.Scheme != "https" && u.Scheme != "http" {
		return "", false, errors.New("endpoint is not https://host[:port] or http://host[:port]")
	}
	return u.Host, u.Scheme == "https", nil
}

// New returns the store at c. It reads files of c but asks no server: see Store.Check.
func New(c Config) (*Store, error) {
	if err := c.Check(); err != nil {
		return nil, err
	}
	host, secure, err := c.endpoint()
	if err != nil {
		return nil, err
	}
	if c.Region == "" {
		c.Region = defaultRegion // otherwise the client asks the server first
	}
	if c.Stall == 0 {
		c.Stall = defaultStall
	}
	if c.PartSize == 0 {
		c.PartSize = defaultPartSize
	}
	if c.Parallel == 0 {
		c.Parallel = defaultParallel
	}
	keys, err := c.credentials()
	if err != nil {
		return nil, err
	}
	transport, err := c.transport()
	if err != nil {
		return nil, err
	}
	core, err := minio.NewCore(host, &minio.Options{
		Creds: keys, Secure: secure, Region: c.Region, Transport: transport,
		BucketLookup: map[Style]minio.BucketLookupType{StylePath: minio.BucketLookupPath, StyleHost: minio.BucketLookupDNS}[c.Style],
		MaxRetries:   1, // who tries again, and for how long, is ours to say
	})
	if err != nil {
		return nil, fmt.Errorf("make S3 client: %w", err)
	}
	return &Store{core: *core, cfg: c, pageSize: defaultPage}, nil
}

// credentials chooses one source. There is no going on to the next one when it fails:
// whoever misspells a file must not end up as somebody else.
func (c Config) credentials() (*credentials.Credentials, error) {
	switch c.Credentials {
	case FromNowhere:
		return credentials.NewStatic("", "", "", credentials.SignatureAnonymous), nil
	case FromInstance:
		return credentials.NewIAM(""), nil
	case FromEnvironment:
		if os.Getenv("AWS_ACCESS_KEY_ID") != "" && os.Getenv("AWS_SECRET_ACCESS_KEY") != "" {
			return credentials.NewEnvAWS(), nil
		}
		c.Credentials = os.Getenv("AWS_SHARED_CREDENTIALS_FILE")
		if home, err := os.UserHomeDir(); c.Credentials == "" && err == nil {
			c.Credentials = filepath.Join(home, ".aws", "credentials")
		}
	}
	f := &keyFile{FileAWSCredentials: credentials.FileAWSCredentials{Filename: c.Credentials, Profile: c.Profile}}
	keys := credentials.New(f)
	if _, err := keys.GetWithContext(nil); err != nil {
		return nil, fmt.Errorf("no S3 keys in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY and none in the file %q: %w", c.Credentials, err)
	}
	return keys, nil
}

// keyFile is a credentials file that is read again when it has changed.
type keyFile struct {
	credentials.FileAWSCredentials
	stamp string
}

func (f *keyFile) look() string {
	st, err := os.Stat(f.Filename)
	if err != nil {
		return "" // what was read stays good while somebody replaces the file
	}
	return fmt.Sprint(st.Size(), st.ModTime().UnixNano())
}

// IsExpired implements credentials.Provider.
func (f *keyFile) IsExpired() bool {
	look := f.look()
	return look != "" && look != f.stamp || f.FileAWSCredentials.IsExpired()
}

// RetrieveWithCredContext implements credentials.Provider.
func (f *keyFile) RetrieveWithCredContext(cc *credentials.CredContext) (credentials.Value, error) {
	look := f.look()
	v, err := f.FileAWSCredentials.RetrieveWithCredContext(cc)
	if err == nil && (v.AccessKeyID == "" || v.SecretAccessKey == "") {
		err = errors.New("file holds no key for this profile")
	}
	if err == nil {
		f.stamp = look
	}
	return v, err
}

func (c Config) transport() (*http.Transport, error) {
	conf := &tls.Config{MinVersion: tls.VersionTLS12}
	if c.CA != "" {
		pem, err := os.ReadFile(c.CA)
		if err != nil {
			return nil, fmt.Errorf("read certificates: %w", err)
		}
		if conf.RootCAs, err = x509.SystemCertPool(); err != nil {
			conf.RootCAs = x509.NewCertPool()
		}
		if !conf.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("no certificate in %s", c.CA)
		}
	}
	return &http.Transport{
		Proxy:               http.ProxyFromEnvironment,
		DialContext:         (&net.Dialer{Timeout: connectTimeout, KeepAlive: 15 * time.Second}).DialContext,
		TLSClientConfig:     conf,
		TLSHandshakeTimeout: connectTimeout,
		MaxIdleConns:        256,
		MaxIdleConnsPerHost: 64, // ranges come in bursts
		IdleConnTimeout:     time.Minute,
		DisableCompression:  true, // a body is what it is
		WriteBufferSize:     64 << 10,
		ReadBufferSize:      64 << 10,
	}, nil
}
