package daemon

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"go.yaml.in/yaml/v3"

	"github.com/kvferry/kvferry/tiers/nvme"
	"github.com/kvferry/kvferry/tiers/policy"
	"github.com/kvferry/kvferry/tiers/pool"
)

// Config is the daemon's configuration file. OPERATIONS in README.md describes the keys.
type Config struct {
	Node    string        `yaml:"node"`
	Sockets SocketsConfig `yaml:"sockets"`
	Pool    PoolConfig    `yaml:"pool"`
	DRAM    DRAMConfig    `yaml:"dram"`
	NVMe    NVMeConfig    `yaml:"nvme"`
	Policy  string        `yaml:"policy"` // of what leaves a tier
	Adopt   AdoptConfig   `yaml:"adopt"`
	Peer    PeerConfig    `yaml:"peer"`
	Data    ListenConfig  `yaml:"data"`
	Metrics MetricsConfig `yaml:"metrics"`
	Log     LogConfig     `yaml:"log"`
	Copy    CopyConfig    `yaml:"copy"`
	Offer   OfferConfig   `yaml:"offer"`
	Handoff HandoffConfig `yaml:"handoff"`
	Drain   DrainConfig   `yaml:"drain"`

	// Supervised: a watchdog kills this process when it is frozen or stuck. Set by cmd, which sees the environment.
	Supervised bool `yaml:"-"`
}

// SocketsConfig says where engines and people find the daemon.
type SocketsConfig struct {
	Dir       string   `yaml:"dir"`       // gets engine.sock, descriptors.sock, admin.sock
	AllowUIDs []uint32 `yaml:"allowUIDs"` // that may attach and look in
}

// PoolConfig is the DRAM tier.
type PoolConfig struct {
	Path string `yaml:"path"` // a file on tmpfs or hugetlbfs
	Size Bytes  `yaml:"size"` // no default
	Slab Bytes  `yaml:"slab"`
}

// DRAMConfig says what goes from DRAM to the drives, where there are some.
type DRAMConfig struct {
	Idle   Duration `yaml:"idle"`   // blocks that nobody used for so long go down; 0: none
	OnIdle string   `yaml:"onIdle"` // copy: they stay in DRAM too, until room is wanted; move: they leave it
	High   float64  `yaml:"high"`   // of the pool: when more is used, blocks leave
	Low    float64  `yaml:"low"`    // until this is
}

// NVMeConfig says which drives there are and how they are driven.
type NVMeConfig struct {
	Drives      []DriveConfig `yaml:"drives"` // none: there is no NVMe tier
	Slab        Bytes         `yaml:"slab"`
	Reserve     Bytes         `yaml:"reserve"`     // of each file system, that stays free
	Engine      string        `yaml:"engine"`      // auto, uring, threads
	Depth       int           `yaml:"depth"`       // I/Os in flight
	Transfers   int           `yaml:"transfers"`   // at a time, of each drive
	WriteBudget Bytes         `yaml:"writeBudget"` // bytes a day, all drives together; 0: no bound
}

// DriveConfig is one drive.
type DriveConfig struct {
	Path string `yaml:"path"` // a file on it
	Size Bytes  `yaml:"size"` // of the file
}

// AdoptConfig says how much of what an earlier daemon left is read before it is believed.
type AdoptConfig struct {
	Check string `yaml:"check"` // headers; sample: and one block in 64; all: and all blocks. Every read is checked in any case
}

// ListenConfig is an address to listen on, and the one by which others reach it.
type ListenConfig struct {
	Listen    string `yaml:"listen"`
	Advertise string `yaml:"advertise"`
}

// PeerConfig is about other nodes' daemons.
type PeerConfig struct {
	ListenConfig `yaml:",inline"`
	Allow        []string `yaml:"allow"` // networks that tickets may point into
}

// MetricsConfig is the HTTP endpoint for /metrics, /healthz and /readyz.
type MetricsConfig struct {
	Listen string `yaml:"listen"` // empty: none
}

// LogConfig says what is logged to standard error and how.
type LogConfig struct {
	Level  string `yaml:"level"`  // debug, info, warn, error
	Format string `yaml:"format"` // text, json
}

// CopyConfig tunes copies of this machine's memory.
type CopyConfig struct {
	Transfers int `yaml:"transfers"` // at a time
	Threads   int `yaml:"threads"`   // that one transfer may use
	Queue     int `yaml:"queue"`     // transfers of a class that may wait
}

// OfferConfig is about handoffs that this node's engines offer.
type OfferConfig struct {
	Lifetime Duration `yaml:"lifetime"`
}

// HandoffConfig is about what this node's engines receive.
type HandoffConfig struct {
	// Direct is whether blocks from other nodes are written straight into workers' memory: auto, on or off. It is safe only where something kills this process when it
	// freezes; auto is on under a watchdog that it sees.
	Direct string `yaml:"direct"`
	// LookupTimeout bounds how long a look-up waits for other nodes that may have more of a prompt.
	LookupTimeout Duration `yaml:"lookupTimeout"`
}

// direct tells whether blocks are written into workers' memory.
func (c *Config) direct() bool {
	return c.Handoff.Direct == "on" || (c.Handoff.Direct == "auto" && c.Supervised)
}

// DrainConfig is about stopping.
type DrainConfig struct {
	Timeout Duration `yaml:"timeout"`
}

// DefaultConfig has a value for every key but pool.size.
func DefaultConfig() Config {
	host, _ := os.Hostname()
	return Config{
		Node:    host,
		Sockets: SocketsConfig{Dir: "/run/kvferry", AllowUIDs: slices.Compact([]uint32{0, uint32(os.Geteuid())})},
		Pool:    PoolConfig{Path: "/dev/shm/kvferry.pool", Slab: 64 << 20},
		DRAM:    DRAMConfig{Idle: Duration(5 * time.Minute), OnIdle: "copy", High: 0.95, Low: 0.90},
		NVMe:    NVMeConfig{Slab: 64 << 20, Reserve: 1 << 30, Engine: nvme.EngineAuto, Depth: 32, Transfers: 2},
		Policy:  policy.Default,
		Adopt:   AdoptConfig{Check: "headers"},
		Peer:    PeerConfig{ListenConfig{Listen: "127.0.0.1:7400"}, privateNetworks},
		Data:    ListenConfig{Listen: "127.0.0.1:7401"},
		Metrics: MetricsConfig{Listen: "127.0.0.1:7402"},
		Log:     LogConfig{Level: "info", Format: "text"},
		Copy:    CopyConfig{Transfers: 2, Threads: 2, Queue: 1024},
		Offer:   OfferConfig{Lifetime: Duration(2 * time.Minute)},
		Handoff: HandoffConfig{Direct: "auto", LookupTimeout: Duration(50 * time.Millisecond)},
		Drain:   DrainConfig{Timeout: Duration(20 * time.Second)},
	}
}

// ParseConfig reads YAML over the defaults. A key that is not known is an error.
func ParseConfig(b []byte) (Config, error) {
	c := DefaultConfig()
	d := yaml.NewDecoder(bytes.NewReader(b))
	d.KnownFields(true)
	if err := d.Decode(&c); err != nil && !errors.Is(err, io.EOF) {
		return Config{}, fmt.Errorf("parse configuration: %s%w", keyOf(b, err), err)
	}
	if err := d.Decode(new(any)); !errors.Is(err, io.EOF) {
		return Config{}, errors.New("parse configuration: more than one document")
	}
	return c, nil
}

var errorLine = regexp.MustCompile(`line (\d+)`)

// keyOf finds the key that a YAML error is about: the library tells its line only. Empty where it cannot be told.
func keyOf(b []byte, err error) string {
	m := errorLine.FindStringSubmatch(err.Error())
	var doc yaml.Node
	if m == nil || yaml.Unmarshal(b, &doc) != nil || len(doc.Content) == 0 {
		return ""
	}
	line, _ := strconv.Atoi(m[1])
	var walk func(n *yaml.Node, path string) string
	walk = func(n *yaml.Node, path string) (found string) {
		for i := 0; n.Kind == yaml.MappingNode && i+1 < len(n.Content); i += 2 {
			key, value := n.Content[i], n.Content[i+1]
			at := strings.TrimPrefix(path+"."+key.Value, ".")
			// Of several keys in one line it is the one whose name or value the error quotes.
			if inner := walk(value, at); inner != "" {
				found = inner
			} else if key.Line == line && value.Kind != yaml.MappingNode && (found == "" || strings.Contains(err.Error(), value.Value) || strings.Contains(err.Error(), "field "+key.Value)) {
				found = at
			}
		}
		return found
	}
	if key := walk(doc.Content[0], ""); key != "" {
		return key + ": "
	}
	return ""
}

// Validate names the first key that is wrong.
func (c *Config) Validate() error {
	if c.Node == "" || len(c.Node) > 253 || strings.ContainsFunc(c.Node, unicode.IsControl) {
		return fmt.Errorf("node: %q: must have 1 to 253 bytes and no control character", c.Node)
	}
	if c.Sockets.Dir == "" || !filepath.IsAbs(c.Sockets.Dir) {
		return fmt.Errorf("sockets.dir: %q: must be an absolute path", c.Sockets.Dir)
	}
	if n := len(filepath.Join(c.Sockets.Dir, "descriptors.sock")); n > 107 {
		return fmt.Errorf("sockets.dir: too long: a socket's path may have 107 bytes, this would have %d", n)
	}
	if c.Pool.Size == 0 {
		return errors.New("pool.size: must be set: there is no default")
	}
	if !filepath.IsAbs(c.Pool.Path) {
		return fmt.Errorf("pool.path: %q: must be an absolute path", c.Pool.Path)
	}
	if err := (pool.Config{Path: c.Pool.Path, Bytes: uint64(c.Pool.Size), SlabBytes: uint64(c.Pool.Slab)}).Validate(); err != nil {
		return err
	}
	if err := c.validateTiers(); err != nil {
		return err
	}
	for _, a := range []struct {
		key string
		l   *ListenConfig
	}{{"peer", &c.Peer.ListenConfig}, {"data", &c.Data}} {
		if err := a.l.validate(a.key); err != nil {
			return err
		}
	}
	if _, err := parseAllow(c.Peer.Allow); err != nil {
		return err
	}
	if c.Metrics.Listen != "" {
		if _, err := splitAddress(c.Metrics.Listen); err != nil {
			return fmt.Errorf("metrics.listen: %v", err)
		}
	}
	return c.validateRest()
}

func (c *Config) validateRest() error {
	switch c.Log.Level {
	case "debug", "info", "warn", "error":
	default:
		return fmt.Errorf("log.level: %q: must be debug, info, warn or error", c.Log.Level)
	}
	if c.Log.Format != "text" && c.Log.Format != "json" {
		return fmt.Errorf("log.format: %q: must be text or json", c.Log.Format)
	}
	if d := c.Handoff.Direct; d != "auto" && d != "on" && d != "off" {
		return fmt.Errorf("handoff.direct: %q: must be auto, on or off", d)
	}
	for _, n := range []struct {
		key              string
		value, low, high int
	}{{"copy.transfers", c.Copy.Transfers, 1, 64}, {"copy.threads", c.Copy.Threads, 1, 16}, {"copy.queue", c.Copy.Queue, 1, 1 << 16}} {
		if n.value < n.low || n.value > n.high {
			return fmt.Errorf("%s: %d: must be %d to %d", n.key, n.value, n.low, n.high)
		}
	}
	for _, d := range []struct {
		key       string
		value     Duration
		low, high time.Duration
	}{{"offer.lifetime", c.Offer.Lifetime, time.Second, time.Hour}, {"drain.timeout", c.Drain.Timeout, 0, 10 * time.Minute},
		{"handoff.lookupTimeout", c.Handoff.LookupTimeout, time.Millisecond, 10 * time.Second}} {
		if time.Duration(d.value) < d.low || time.Duration(d.value) > d.high {
			return fmt.Errorf("%s: %v: must be %v to %v", d.key, time.Duration(d.value), d.low, d.high)
		}
	}
	return nil
}

func (l *ListenConfig) validate(key string) error {
	host, err := splitAddress(l.Listen)
	if err != nil {
		return fmt.Errorf("%s.listen: %v", key, err)
	}
	if l.Advertise == "" {
		if unspecified(host) {
			return fmt.Errorf("%s.advertise: must be set where %s.listen is on all addresses: peers have to be told one", key, key)
		}
		return nil
	}
	to, err := splitAddress(l.Advertise)
	if err != nil {
		return fmt.Errorf("%s.advertise: %v", key, err)
	}
	if unspecified(to) {
		return fmt.Errorf("%s.advertise: %q is no address that peers can reach", key, l.Advertise)
	}
	return nil
}

// splitAddress checks host:port and answers the host.
func splitAddress(address string) (string, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return "", err
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil {
		return "", fmt.Errorf("%q: port %q: must be 0 to 65535", address, port)
	} else if n == 0 && host == "" {
		return "", fmt.Errorf("%q: neither host nor port", address)
	}
	return host, nil
}

func unspecified(host string) bool {
	ip := net.ParseIP(host)
	return host == "" || (ip != nil && ip.IsUnspecified())
}

// advertised is the address that peers are told, with the port that was really bound.
func (l ListenConfig) advertised(bound net.Addr) string {
	if l.Advertise == "" {
		return bound.String()
	}
	host, port, _ := net.SplitHostPort(l.Advertise)
	if port == "0" {
		_, port, _ = net.SplitHostPort(bound.String())
	}
	return net.JoinHostPort(host, port)
}

// YAML is the effective configuration.
func (c Config) YAML() string {
	var b bytes.Buffer
	e := yaml.NewEncoder(&b)
	e.SetIndent(2)
	if err := e.Encode(c); err != nil {
		return "# " + err.Error()
	}
	return b.String()
}

// Bytes is a size; in YAML a number of bytes, or one with KiB, MiB, GiB or TiB.
type Bytes uint64

var byteUnits = []struct {
	suffix string
	factor uint64
}{{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}}

// ParseBytes reads a size.
func ParseBytes(s string) (Bytes, error) {
	factor := uint64(1)
	number := strings.TrimSpace(s)
	for _, u := range byteUnits {
		if v, ok := strings.CutSuffix(number, u.suffix); ok {
			number, factor = strings.TrimSpace(v), u.factor
			break
		}
	}
	n, err := strconv.ParseUint(number, 10, 64)
	if err != nil || n > (1<<63)/factor {
		return 0, fmt.Errorf("%q is not a size such as 64GiB (bytes, KiB, MiB, GiB, TiB)", s)
	}
	return Bytes(n * factor), nil
}

func (b Bytes) String() string {
	for _, u := range byteUnits {
		if b != 0 && uint64(b)%u.factor == 0 {
			return strconv.FormatUint(uint64(b)/u.factor, 10) + u.suffix
		}
	}
	return strconv.FormatUint(uint64(b), 10)
}

// UnmarshalYAML is yaml.Unmarshaler.
func (b *Bytes) UnmarshalYAML(n *yaml.Node) error {
	v, err := ParseBytes(n.Value)
	if err != nil {
		return fmt.Errorf("line %d: %w", n.Line, err)
	}
	*b = v
	return nil
}

// MarshalYAML is yaml.Marshaler.
func (b Bytes) MarshalYAML() (any, error) { return b.String(), nil }

// Duration is a time.Duration; in YAML as Go writes it: 20s, 2m.
type Duration time.Duration

func (d Duration) String() string { return time.Duration(d).String() }

// UnmarshalYAML is yaml.Unmarshaler.
func (d *Duration) UnmarshalYAML(n *yaml.Node) error {
	v, err := time.ParseDuration(n.Value)
	if err != nil {
		return fmt.Errorf("line %d: %q is not a duration such as 20s", n.Line, n.Value)
	}
	*d = Duration(v)
	return nil
}

// MarshalYAML is yaml.Marshaler.
func (d Duration) MarshalYAML() (any, error) { return time.Duration(d).String(), nil }
