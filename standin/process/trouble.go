package process

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// nobody is the address of no machine: what is sent there is dropped by who receives it, and nobody is told.
const nobody = "02:00:00:00:00:01"

// Down takes the cable out: neither side has a link.
func (n *Network) Down() error { return system("ip -n " + n.name + " link set " + n.far + " down") }

// Up puts it back.
func (n *Network) Up() error { return system("ip -n " + n.name + " link set " + n.far + " up") }

// Drop loses every packet, in both directions, without a word to whoever sent it: both sides take the other to be at an address that nobody has. (It needs no netem, which many kernels lack.)
func (n *Network) Drop() error {
	return errors.Join(
		system("ip neigh replace "+n.There+" lladdr "+nobody+" nud permanent dev "+n.near),
		system("ip -n "+n.name+" neigh replace "+n.Here+" lladdr "+nobody+" nud permanent dev "+n.far))
}

// Restore ends Drop.
func (n *Network) Restore() error {
	return errors.Join(
		system("ip neigh del "+n.There+" dev "+n.near),
		system("ip -n "+n.name+" neigh del "+n.Here+" dev "+n.far))
}

// Slow lets no more bytes a second pass, each way.
func (n *Network) Slow(bytesPerSecond int) error {
	shape := fmt.Sprintf(" root tbf rate %dbps burst 64kb latency 50ms", bytesPerSecond)
	return errors.Join(system("tc qdisc replace dev "+n.near+shape), system("tc -n "+n.name+" qdisc replace dev "+n.far+shape))
}

// Fast ends Slow.
func (n *Network) Fast() error {
	return errors.Join(system("tc qdisc del dev "+n.near+" root"), system("tc -n "+n.name+" qdisc del dev "+n.far+" root"))
}

// Carried is how many bytes have come out of the other namespace.
func (n *Network) Carried() (int64, error) {
	b, err := os.ReadFile("/sys/class/net/" + n.near + "/statistics/rx_bytes")
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
}
