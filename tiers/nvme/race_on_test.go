//go:build race

package nvme_test

// slower is about how much longer the race detector lets things take: what needs no detector does so much less under it. make test runs the whole without it too.
const slower = 8
