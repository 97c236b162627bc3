package process

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Network is two network namespaces with a link between them: this process's own, and another one. It stands in for two machines.
type Network struct {
	Here, There string // addresses of the link's two ends
	path        string // of the other namespace
	name        string
	near, far   string // the link's ends; far is in the other namespace
}

// networks numbers those of this process.
var networks atomic.Uint32

// NewNetwork makes the other namespace and the link. It needs root and the ip command; where it fails, loopback addresses have to do.
func NewNetwork() (*Network, error) {
	// Names and addresses are those of a number that other processes do not take, most likely.
	id := (os.Getpid()*16 + int(networks.Add(1)-1)) % 60000
	n := &Network{name: fmt.Sprintf("kvferry-%d", id), near: fmt.Sprintf("kvf%da", id), far: fmt.Sprintf("kvf%db", id)}
	subnet := fmt.Sprintf("10.%d.%d.", 199+id/(64*256), id/64%256)
	n.Here, n.There = fmt.Sprint(subnet, id%64*4+1), fmt.Sprint(subnet, id%64*4+2)
	n.path = "/run/netns/" + n.name
	if err := system("ip netns add " + n.name); err != nil {
		return nil, err
	}
	for _, command := range []string{
		"link add " + n.near + " type veth peer name " + n.far + " netns " + n.name,
		"addr add " + n.Here + "/30 dev " + n.near,
		"link set " + n.near + " up",
		"-n " + n.name + " addr add " + n.There + "/30 dev " + n.far,
		"-n " + n.name + " link set " + n.far + " up",
		"-n " + n.name + " link set lo up",
	} {
		if err := system("ip " + command); err != nil {
			_ = n.Close()
			return nil, err
		}
	}
	return n, nil
}

// Close removes the namespace, and the link with it, once nobody lives in it any more.
func (n *Network) Close() error { return exec.Command("ip", "netns", "del", n.name).Run() }

// Listen listens in the other namespace. What it accepts is in that namespace too, whoever uses it.
func (n *Network) Listen() (l net.Listener, err error) {
	err = inNetns(n.path, func() error {
		l, err = net.Listen("tcp", n.There+":0")
		return err
	})
	return l, err
}

// inNetns runs f on a thread that is in the namespace at path; what f starts or opens belongs there. An empty path is our own.
func inNetns(path string, f func() error) error {
	return onThread(func() error {
		if path == "" {
			return f()
		}
		own, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			return err
		}
		defer own.Close()
		other, err := os.Open(path)
		if err != nil {
			return err
		}
		defer other.Close()
		if err := unix.Setns(int(other.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter %s: %w", path, err)
		}
		err = f()
		if e := unix.Setns(int(own.Fd()), unix.CLONE_NEWNET); e != nil {
			panic("cannot go back to our network namespace: " + e.Error()) // everything that follows would be in the wrong one
		}
		return err
	})
}

// system runs a command of the system.
func system(command string) error {
	words := strings.Fields(command)
	if out, err := exec.Command(words[0], words[1:]...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", command, err, strings.TrimSpace(string(out)))
	}
	return nil
}
