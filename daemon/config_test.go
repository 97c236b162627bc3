package daemon

import (
	"os"
	"strings"
	"testing"
)

func TestConfig(t *testing.T) {
	for text, want := range map[string]string{
		"":                                                                      "pool.size",
		"pool: {size: 1GiB, typo: 1}":                                           "typo",
		"pool: {size: lots}":                                                    "pool.size: ",
		"pool: {size: 1GiB, slab: 3MiB}":                                        "pool.slab",
		"pool: {size: 1MiB}":                                                    "pool.size",
		"pool: {size: 1GiB, path: x}":                                           "pool.path",
		"pool: {size: 1GiB}\npeer: {listen: 'x'}":                               "peer.listen",
		"pool: {size: 1GiB}\npeer: {listen: ':7400'}":                           "peer.advertise",
		"pool: {size: 1GiB}\nlog: {level: loud}":                                "log.level",
		"pool: {size: 1GiB}\npeer: {allow: [everybody]}":                        "peer.allow",
		"pool: {size: 1GiB}\noffer: {lifetime: 1ms}":                            "offer.lifetime",
		"pool: {size: 1GiB}\noffer: {lifetime: soon}":                           "offer.lifetime: ",
		"pool: {size: 1GiB}\ncopy: {threads: 0}":                                "copy.threads",
		"pool: {size: 1GiB}\nsockets: {dir: relative}":                          "sockets.dir",
		"pool: {size: 1GiB}\n---\npool: {size: 2GiB}":                           "more than one document",
		"pool: {size: 1GiB}\nsockets: {dir: /" + strings.Repeat("x", 100) + "}": "sockets.dir",
	} {
		c, err := ParseConfig([]byte(text))
		if err == nil {
			err = c.Validate()
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want an error that names %s", text, err, want)
		}
	}
	c, err := ParseConfig([]byte("pool: {size: 3GiB}"))
	if err == nil {
		err = c.Validate()
	}
	if err != nil {
		t.Fatal(err)
	}
	again, err := ParseConfig([]byte(c.YAML()))
	if err != nil || again.YAML() != c.YAML() {
		t.Errorf("the effective configuration does not read back: %v", err)
	}
}

func FuzzParseConfig(f *testing.F) {
	f.Add([]byte("pool: {size: 1GiB}\noffer: {lifetime: 1m}"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if c, err := ParseConfig(b); err == nil {
			_ = c.Validate()
		}
	})
}

func TestPoolSizeOverTheLimitIsNamed(t *testing.T) {
	c := DefaultConfig()
	c.Sockets.Dir, c.Pool.Size, c.Pool.Path = t.TempDir(), 1<<43, "/dev/shm/kvferry-test-too-large"
	t.Cleanup(func() { _ = os.Remove(c.Pool.Path); _ = os.Remove(c.Pool.Path + ".lock") })
	c.Metrics.Listen = ""
	_, err := Start(c, discard())
	if err == nil || !strings.Contains(err.Error(), "pool.size") {
		t.Fatalf("start: %v", err)
	}
}
