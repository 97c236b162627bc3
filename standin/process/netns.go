package process

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"

	"golang.org/x/sys/unix"
)

// Network is two network namespaces with a link between them: this process's own, and another one. It stands in for two machines.
type Network struct {
	Here, There string // addresses of the link's two ends
	path        string // of the other namespace
	name        string
}

// NewNetwork makes the other namespace and the link. It needs root and the ip command; where it fails, loopback addresses have to do.
func NewNetwork() (*Network, error) {
	id := os.Getpid() % 60000
	n := &Network{name: fmt.Sprintf("kvferry-%d", id)}
	third, fourth := id/64%256, id%64*4
	n.Here, n.There = fmt.Sprintf("10.199.%d.%d", third, fourth+1), fmt.Sprintf("10.199.%d.%d", third, fourth+2)
	n.path = "/run/netns/" + n.name
	near, far := fmt.Sprintf("kvf%da", id), fmt.Sprintf("kvf%db", id)
	for _, command := range []string{
		"netns add " + n.name,
		"link add " + near + " type veth peer name " + far + " netns " + n.name,
		"addr add " + n.Here + "/30 dev " + near,
		"link set " + near + " up",
		"-n " + n.name + " addr add " + n.There + "/30 dev " + far,
		"-n " + n.name + " link set " + far + " up",
		"-n " + n.name + " link set lo up",
	} {
		if out, err := exec.Command("ip", strings.Fields(command)...).CombinedOutput(); err != nil {
			_ = n.Close()
			return nil, fmt.Errorf("ip %s: %w: %s", command, err, strings.TrimSpace(string(out)))
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
