package policy

import "fmt"

// Default is the daemon's.
const Default = "lru"

// New makes a policy by its name, for a node of so many blocks in all of its tiers.
func New(name string, _ int) (Policy, error) {
	if name == "lru" {
		return LRU{}, nil
	}
	return nil, fmt.Errorf("policy %q: must be lru", name)
}
