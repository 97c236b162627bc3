// Package daemon wires the parts together and runs them: configuration, start, drain, stop. It owns the sockets, the pool and the order of shutting down.
package daemon

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/netutil"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/counters"
	"github.com/kvferry/kvferry/daemon/handoff"
	"github.com/kvferry/kvferry/daemon/mover"
	"github.com/kvferry/kvferry/daemon/rpc"
	"github.com/kvferry/kvferry/daemon/session"
	"github.com/kvferry/kvferry/daemon/tiering"
	pb "github.com/kvferry/kvferry/proto/kvferry/v1"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/nvme"
	"github.com/kvferry/kvferry/tiers/pool"
	"github.com/kvferry/kvferry/transport"
	"github.com/kvferry/kvferry/transport/tcp"
)

// Version is set by the linker (make build); "devel" else.
var Version = "devel"

// Names of the sockets in sockets.dir.
const (
	EngineSocket      = "engine.sock"
	DescriptorsSocket = "descriptors.sock"
	AdminSocket       = "admin.sock"
)

// connectionsMax bounds the connections of other daemons to the Peer service; more wait to be accepted.
const connectionsMax = 1024

// claimOwners is where the numbers of claims begin in the ledger: above all sessions.
const claimOwners = 1 << 40

// Daemon is one incarnation: everything between Start and Stop.
type Daemon struct {
	cfg     Config
	log     *slog.Logger
	epoch   kvferry.Epoch
	started time.Time

	serving    bool // set once, before Start returns
	lock       *os.File
	pool       *pool.Pool
	memory     *nvme.Memory // the pool's, for the drives
	retrying   sync.Mutex
	drivesMu   sync.Mutex // guards the next three, once Start has returned
	drives     []*nvme.Drive
	driveNames []string
	absent     []absentDrive
	opening    map[string]chan opened // by path: what is being opened
	adopted    int
	ledger     *tiers.Ledger
	counters   counters.Set
	local      *mover.Link
	tiering    *tiering.Tiering
	manual     *tiering.Manual
	registry   *handoff.Registry
	fetcher    *handoff.Fetcher
	peers      *rpc.Peers
	sessions   *session.Manager

	engineServer, adminServer, peerServer *grpc.Server
	listeners                             []net.Listener
	peerAddress, dataAddress              string
	owners                                atomic.Uint64
	draining                              atomic.Int64 // since when, unix ms; 0: not

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	failed chan error
}

// Start makes a daemon and serves. Nothing is left behind when it fails.
func Start(cfg Config, log *slog.Logger) (*Daemon, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	d := &Daemon{cfg: cfg, log: log, started: time.Now(), failed: make(chan error, 1)}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	if _, err := rand.Read(d.epoch[:]); err != nil {
		return nil, fmt.Errorf("make epoch: %w", err)
	}
	if err := d.start(); err != nil {
		d.Stop()
		return nil, err
	}
	d.serving = true
	log.Info("kvferryd serves", "node", cfg.Node, "epoch", d.epoch, "version", Version, "sockets", cfg.Sockets.Dir, "peer", d.peerAddress, "data", d.dataAddress,
		"pool", cfg.Pool.Size.String(), "adopted_blocks", d.adopted)
	return d, nil
}

func (d *Daemon) start() error {
	if err := d.lockSockets(); err != nil {
		return err
	}
	if err := d.openPool(); err != nil {
		return err
	}
	peerListener, err := net.Listen("tcp", d.cfg.Peer.Listen)
	if err != nil {
		return fmt.Errorf("peer.listen: %w", err)
	}
	d.listeners = append(d.listeners, peerListener)
	dataListener, err := net.Listen("tcp", d.cfg.Data.Listen)
	if err != nil {
		return fmt.Errorf("data.listen: %w", err)
	}
	d.listeners = append(d.listeners, dataListener)
	d.peerAddress, d.dataAddress = d.cfg.Peer.advertised(peerListener.Addr()), d.cfg.Data.advertised(dataListener.Addr())
	d.makeParts()
	return d.serve(peerListener, dataListener)
}

func (d *Daemon) openPool() error {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return fmt.Errorf("read boot id: %w", err)
	}
	p, found, err := pool.Open(pool.Config{
		Path: d.cfg.Pool.Path, Bytes: uint64(d.cfg.Pool.Size), SlabBytes: uint64(d.cfg.Pool.Slab), BootID: strings.TrimSpace(string(boot)),
	})
	if err != nil {
		return err
	}
	d.pool = p
	d.memory = nvme.NewMemory(p.Bytes(), p.Mapped())
	if p.Adopted() {
		d.wg.Go(d.awaitMapped)
	}
	if len(d.cfg.NVMe.Drives) > 0 {
		d.wg.Go(d.awaitRegistered)
	}
	return d.openTiers(found)
}

// awaitMapped tells of an adopted pool that could not be mapped beforehand: it works, and its first copies are slower.
func (d *Daemon) awaitMapped() {
	start := time.Now()
	select {
	case <-d.ctx.Done():
		return
	case <-d.pool.Mapped():
	}
	if err := d.pool.MapError(); err != nil {
		d.log.Warn("pool is not mapped beforehand", "error", err)
	} else {
		d.log.Info("pool is mapped", "took", time.Since(start))
	}
}

// awaitRegistered tells when io_uring has the pool registered, or that it works without.
func (d *Daemon) awaitRegistered() {
	start := time.Now()
	select {
	case <-d.ctx.Done():
		return
	case <-d.memory.Settled():
	}
	if err := d.memory.Err(); err != nil {
		d.log.Warn("drives work without registered memory", "error", err)
	} else {
		d.log.Info("pool is registered", "after", time.Since(start))
	}
}

func (d *Daemon) makeParts() {
	memory := transport.Memory{ID: 1, Bytes: d.pool.Bytes()}
	component := func(name string) *slog.Logger { return d.log.With("component", name) }
	d.owners.Store(claimOwners)
	d.local = mover.NewLink("local", d.cfg.Copy.Transfers, d.cfg.Copy.Queue)
	d.makeTiering(memory, component("tiering"))
	d.registry = handoff.NewRegistry(handoff.Config{
		Epoch: d.epoch, Ledger: d.ledger, Pool: memory, DataAddress: d.dataAddress, Limits: handoff.DefaultLimits, Counters: &d.counters, Log: component("offers"),
		Owners:  func() tiers.Owner { return tiers.Owner(d.owners.Add(1)) },
		Promote: d.promote(),
		Lend: func(scheduler tiers.Owner, instance string, rank, region uint32, offered time.Time) (*handoff.Lent, error) {
			return d.sessions.Lend(scheduler, instance, rank, region, offered)
		},
		Served: func(instance string, rank uint32, offer [16]byte, reason string) {
			d.sessions.Served(instance, rank, offer, reason)
		},
	})
	d.peers = rpc.NewPeers()
	allow, _ := parseAllow(d.cfg.Peer.Allow) // validated before
	d.fetcher = handoff.NewFetcher(handoff.FetcherConfig{
		Epoch: d.epoch, Address: d.peerAddress, Ledger: d.ledger, Pool: memory, Registry: d.registry, Control: d.peers, Resolve: allow.resolve, Counters: &d.counters, Log: component("fetch"), Peers: 1024,
		NewLink: func(address string, epoch kvferry.Epoch) handoff.PeerLink {
			return tcp.NewLink(address, epoch, tcp.Options{})
		},
	})
	limits := session.DefaultLimits
	limits.OfferLifetime, limits.FindTimeout = time.Duration(d.cfg.Offer.Lifetime), time.Duration(d.cfg.Handoff.LookupTimeout)
	d.sessions = session.New(session.Config{
		Ledger: d.ledger, Pool: memory, PoolFile: d.pool.ReadOnly(), Local: d.local, Offers: d.registry, Fetcher: d.fetcher, Tiering: d.tiering, Limits: limits,
		Counters: &d.counters, Log: component("session"), Allowed: d.allowed, Direct: d.cfg.direct(),
		NewCopier: func(dst, src transport.Memory) transport.Copier {
			return transport.NewLocal(dst, src, d.cfg.Copy.Threads)
		},
	})
}

func (d *Daemon) allowed(uid uint32) bool { return slices.Contains(d.cfg.Sockets.AllowUIDs, uid) }

// lockSockets makes sure that no other daemon serves in the same directory.
func (d *Daemon) lockSockets() error {
	dir := d.cfg.Sockets.Dir
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("sockets.dir: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return fmt.Errorf("sockets.dir: %w", err)
	}
	d.lock = f
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return fmt.Errorf("sockets.dir: %s is used by another daemon: %w", dir, err)
	}
	return nil
}

// listenUnix makes a socket, in place of one that a daemon before left behind: the lock proves that it is dead. Who may attach is
// decided by the peer's credentials, so the file lets everybody connect.
func (d *Daemon) listenUnix(name, network string) (*net.UnixListener, error) {
	path := filepath.Join(d.cfg.Sockets.Dir, name)
	if st, err := os.Lstat(path); err == nil && st.Mode()&os.ModeSocket == 0 {
		return nil, fmt.Errorf("sockets.dir: %s exists and is not a socket", path)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("sockets.dir: %w", err)
	}
	l, err := net.ListenUnix(network, &net.UnixAddr{Name: path, Net: network})
	if err != nil {
		return nil, fmt.Errorf("sockets.dir: %w", err)
	}
	d.listeners = append(d.listeners, l)
	if err := os.Chmod(path, 0o666); err != nil {
		return nil, fmt.Errorf("sockets.dir: %w", err)
	}
	return l, nil
}

func (d *Daemon) serve(peerListener, dataListener net.Listener) error {
	engine, err := d.listenUnix(EngineSocket, "unix")
	if err != nil {
		return err
	}
	descriptors, err := d.listenUnix(DescriptorsSocket, "unixpacket")
	if err != nil {
		return err
	}
	admin, err := d.listenUnix(AdminSocket, "unix")
	if err != nil {
		return err
	}
	d.engineServer, d.adminServer, d.peerServer = rpc.NewLocalServer(d.allowed), rpc.NewLocalServer(d.allowed), rpc.NewPeerServer()
	pb.RegisterEngineServer(d.engineServer, &rpc.Engine{
		Sessions: d.sessions, Epoch: d.epoch, PoolBytes: uint64(len(d.pool.Bytes())), PeerAddress: d.peerAddress, Version: Version, Direct: d.cfg.direct(), Limits: session.DefaultLimits,
	})
	pb.RegisterAdminServer(d.adminServer, &rpc.Admin{
		Node: d.cfg.Node, Epoch: d.epoch, Started: d.started, Build: Version, GoVersion: goVersion(), ConfigYAML: d.cfg.YAML(), Sessions: d.sessions, Ledger: d.ledger,
		Registry: d.registry, Fetcher: d.fetcher, Local: d.local, Tiering: d.tiering, Manual: d.manual, Absent: d.absentDrives, PoolPath: d.cfg.Pool.Path, Counters: &d.counters, Draining: d.drainingSince,
	})
	pb.RegisterPeerServer(d.peerServer, &rpc.Peer{Registry: d.registry, Epoch: d.epoch, HashesMax: session.DefaultLimits.LoadBlocks})
	d.run("engine socket", func() error { return d.engineServer.Serve(engine) })
	d.run("admin socket", func() error { return d.adminServer.Serve(admin) })
	d.run("peer service", func() error { return d.peerServer.Serve(netutil.LimitListener(peerListener, connectionsMax)) })
	d.run("descriptor socket", func() error {
		return d.sessions.ServeDescriptors(d.ctx, descriptors, func(err error) uint32 { return uint32(rpc.Code(err)) })
	})
	data := &tcp.Server{Grants: d.registry, Log: d.log.With("component", "data")}
	d.run("data service", func() error { return data.Serve(d.ctx, dataListener) })
	d.run("timers", d.timers)
	return d.serveMetrics()
}

// run keeps a part going; when one fails, the daemon stops.
func (d *Daemon) run(name string, f func() error) {
	d.wg.Go(func() {
		if err := f(); err != nil && d.ctx.Err() == nil {
			select {
			case d.failed <- fmt.Errorf("%s: %w", name, err):
			default:
			}
		}
	})
}

// Failed delivers the error of a part that could not go on.
func (d *Daemon) Failed() <-chan error { return d.failed }

// timers lets leases, pins, claims and offers end at their time. Holds are checked again by their users, so a tick late is only room that stays taken a little longer.
func (d *Daemon) timers() error {
	holds, offers, drives := time.NewTicker(50*time.Millisecond), time.NewTicker(250*time.Millisecond), time.NewTicker(driveRetry)
	defer holds.Stop()
	defer drives.Stop()
	defer offers.Stop()
	for {
		select {
		case now := <-holds.C:
			d.ledger.Expire(now)
		case now := <-offers.C: // goes over all of them
			d.registry.Expire(now)
			d.fetcher.Forget(now)
			if d.tiering != nil {
				d.tiering.Tick(now)
			}
		case <-drives.C:
			d.wg.Go(d.retryDrives)
		case <-d.ctx.Done():
			return nil
		}
	}
}

// driveRetry is how often drives are tried that could not be opened.
const driveRetry = 15 * time.Second

func (d *Daemon) drainingSince() time.Time {
	if ms := d.draining.Load(); ms > 0 {
		return time.UnixMilli(ms)
	}
	return time.Time{}
}

// Drain refuses new work and waits until what runs has ended, at most for drain.timeout.
func (d *Daemon) Drain(ctx context.Context) {
	d.draining.Store(time.Now().UnixMilli())
	timeout := time.Duration(d.cfg.Drain.Timeout)
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	d.sessions.Drain(timeout)
	t := time.NewTicker(10 * time.Millisecond)
	defer t.Stop()
	for d.sessions.Busy() > 0 || d.registry.ActiveClaims() > 0 {
		select {
		case <-t.C:
		case <-ctx.Done():
			d.log.Warn("drain: time is over", "operations", d.sessions.Busy(), "claims", d.registry.ActiveClaims())
			return
		}
	}
}

// Stop ends everything. What was stored stays in the pool's file for the next daemon.
func (d *Daemon) Stop() {
	d.cancel()
	if d.sessions != nil {
		d.sessions.CloseAll(context.Canceled)
	}
	for _, s := range []*grpc.Server{d.engineServer, d.adminServer, d.peerServer} {
		if s != nil {
			s.Stop()
		}
	}
	for _, l := range d.listeners {
		_ = l.Close()
	}
	d.wg.Wait()
	if d.fetcher != nil {
		d.fetcher.Close()
		d.peers.Close()
		d.local.Close()
	}
	d.closeTiers()
	if d.pool != nil {
		if err := d.pool.Close(); err != nil {
			d.log.Error("close pool", "error", err)
		}
	}
	if d.lock != nil {
		_ = d.lock.Close()
	}
	if d.serving {
		d.log.Info("kvferryd stopped", "epoch", d.epoch)
	}
}

// goVersion is that of the build.
func goVersion() string {
	if b, ok := debug.ReadBuildInfo(); ok {
		return b.GoVersion
	}
	return "unknown"
}
