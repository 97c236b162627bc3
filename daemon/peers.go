package daemon

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"time"
)

// peerAllow decides which addresses a ticket may make this daemon dial. Tickets travel through routers and clients, so what stands in them is not trusted: whoever may name the
// peer names the bytes that end up in the pool.
type peerAllow []netip.Prefix

// privateNetworks is where a cluster's nodes usually are.
var privateNetworks = []string{"127.0.0.0/8", "::1/128", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16", "fc00::/7", "fe80::/10"}

func parseAllow(list []string) (peerAllow, error) {
	var out peerAllow
	for _, s := range list {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			return nil, fmt.Errorf("peer.allow: %q is not a network such as 10.0.0.0/8", s)
		}
		out = append(out, p.Masked())
	}
	return out, nil
}

// resolveTimeout bounds the look-up of a peer's name.
const resolveTimeout = time.Second

// resolve is the address to dial for one that a ticket or a peer names: a number, so that it is the one that was checked.
func (a peerAllow) resolve(ctx context.Context, address string) (string, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return "", fmt.Errorf("peer address %q: %w", address, err)
	}
	ctx, cancel := context.WithTimeout(ctx, resolveTimeout)
	defer cancel()
	ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return "", fmt.Errorf("peer address %q: %w", address, err)
	}
	for _, ip := range ips {
		ip = ip.Unmap()
		for _, p := range a {
			if p.Contains(ip.WithZone("")) {
				return net.JoinHostPort(ip.String(), port), nil
			}
		}
	}
	return "", fmt.Errorf("peer address %q: not in a network of peer.allow", address)
}
