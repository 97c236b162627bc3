//go:build !race

package nvme_test

const slower = 1
