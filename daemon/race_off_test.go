//go:build !race

package daemon

const slower = 1
