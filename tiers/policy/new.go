package policy

import "fmt"

// Default is the daemon's, Names are all that there are.
const (
	Default = "reuse"
	Names   = "reuse, s3fifo or lru"
)

// New makes a policy by its name, for a node of so many blocks in all of its tiers.
func New(name string, blocks int) (Policy, error) {
	switch name {
	case "lru":
		return LRU{}, nil
	case "s3fifo":
		return NewS3FIFO(blocks), nil
	case "reuse":
		return NewReuse(blocks), nil
	}
	return nil, fmt.Errorf("policy %q: must be %s", name, Names)
}
