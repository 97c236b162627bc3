package process

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
)

var (
	soakFor  = flag.Duration("soak", 20*time.Second, "how long TestSoak goes on")
	soakSeed = flag.Uint64("soak-seed", 1, "of TestSoak")
)

// soak is two nodes with two prefill and two decode engines each, that hand prompts over in every way while somebody kills them.
type soak struct {
	*rig
	nodes   [2]*soakNode
	prefill []*engine
	decode  []*engine
	stop    context.Context // ends when no new request is to begin

	mu     sync.Mutex
	counts map[string]int
	served sync.WaitGroup // checks that every offer has ended, once
}

// soakNode is a daemon under its watchdog.
type soakNode struct {
	*Node
	engines []*engine
	samples []sample
}

// engine is a worker process that is killed now and then.
type engine struct {
	name  string
	node  *soakNode
	lives atomic.Int64 // raised before anything is done to it
	mu    sync.RWMutex
	w     *Worker // nil: it is being started again
}

// alive waits until the engine can be used, and answers in which life.
func (e *engine) alive(ctx context.Context) (*Worker, int64) {
	for t := time.NewTicker(5 * time.Millisecond); ; {
		e.mu.RLock()
		w, life := e.w, e.lives.Load()
		e.mu.RUnlock()
		if w != nil || ctx.Err() != nil {
			t.Stop()
			return w, life
		}
		select {
		case <-t.C:
		case <-ctx.Done():
		}
	}
}

func (e *engine) set(w *Worker) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.w = w
}

// disturb takes the engine out of use.
func (e *engine) disturb() *Worker {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.lives.Add(1)
	w := e.w
	e.w = nil
	return w
}

func (s *soak) count(what string, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts[what] += n
}

// Everything at once, for long: all bytes are right, every offer ends once, nothing stays held, and nothing grows.
func TestSoak(t *testing.T) {
	if testing.Short() {
		t.Skip("takes long")
	}
	t.Logf("-soak %v -soak-seed %d", *soakFor, *soakSeed)
	s := newSoak(t)
	ctx, stop := context.WithTimeout(t.Context(), *soakFor)
	defer stop()
	s.stop = ctx
	var wg sync.WaitGroup
	for k := range streams {
		wg.Go(func() { s.stream(k) })
	}
	wg.Go(s.killer)
	wg.Go(s.sampler)
	wg.Wait()
	s.served.Wait()
	s.a, s.b = s.nodes[0].Node, s.nodes[1].Node
	s.nothingHeld(claimLease + dataStall + offerLife + time.Second)
	s.report()
}

func newSoak(t *testing.T) *soak {
	s := &soak{rig: &rig{T: t}, counts: map[string]int{}}
	hosts, ports := [2]string{"127.0.0.1", "127.0.0.1"}, [2]int{}
	n, err := network(t)
	if err != nil {
		t.Logf("on the loopback: %v", err)
	} else {
		hosts = [2]string{n.There, n.Here}
	}
	for i, name := range []string{"a", "b"} {
		ports[i] = freePorts(t, hosts[i], n != nil)
		c := s.config(name, hosts[i], nil)
		if i == 0 {
			c.Network = n
		}
		// Blocks are idle after a second instead of five minutes, and pass through the drives all the time: what grows with each of them in weeks of use grows in minutes.
		c.Extra += driveYAML(c.Dir, "1s")
		c.Port, c.Metrics, c.Supervise = ports[i], fmt.Sprintf("%s:%d", hosts[i], ports[i]+2), watchdog
		s.nodes[i] = &soakNode{Node: s.node(c)}
	}
	for i := range 8 {
		n := s.nodes[i/2%2]
		e := &engine{name: fmt.Sprintf("%s%d", []string{"prefill", "decode"}[i/4], i%4), node: n}
		e.w = s.worker(e.name, n.Node)
		n.engines = append(n.engines, e)
		if i < 4 {
			s.prefill = append(s.prefill, e)
		} else {
			s.decode = append(s.decode, e)
		}
	}
	return s
}

// killer kills a worker about every second, and a daemon now and then: that of node b all the time, that of node a only in the first fifth, so that what it takes can be compared afterwards.
func (s *soak) killer() {
	random := rand.New(rand.NewPCG(*soakSeed, 1<<32))
	begun := time.Now()
	pause := min(65*time.Second, *soakFor/6) // of daemons: the watchdog is in no hurry with one that dies again and again
	next := begun.Add(pause)
	calm := time.After(*soakFor - min(*soakFor/3, claimLease)) // then what was left alone ends in peace
	for {
		select {
		case <-s.stop.Done():
			return
		case <-calm:
			return
		case <-time.After(time.Duration(300+random.IntN(1200)) * time.Millisecond):
		}
		if time.Now().Before(next) {
			all := append(slices.Clone(s.prefill), s.decode...)
			s.killWorker(all[random.IntN(len(all))])
			continue
		}
		n := s.nodes[1]
		if time.Since(begun) < *soakFor/5 {
			n = s.nodes[0]
		}
		s.killDaemon(n, random.IntN(2) == 0)
		next = time.Now().Add(pause)
	}
}

func (s *soak) killWorker(e *engine) {
	s.count("workers killed", 1)
	e.disturb().Kill()
	e.set(s.again(e.name, e.node.Node))
}

// killDaemon kills a daemon, or freezes it until its watchdog does, and has its engines attach again.
func (s *soak) killDaemon(n *soakNode, freeze bool) {
	pid, err := n.DaemonPid()
	s.must(err)
	var workers []*Worker
	for _, e := range n.engines {
		workers = append(workers, e.disturb())
	}
	if freeze {
		s.count("daemons frozen", 1)
		s.must(n.Freeze())
	} else {
		s.count("daemons killed", 1)
		s.must(syscall.Kill(pid, syscall.SIGKILL))
	}
	s.until("the daemon is dead", watchdog+5*time.Second, func() bool { return !running(pid) })
	s.must(n.Ready(s.Context()))
	for i, e := range n.engines {
		s.attach(workers[i], n.Node)
		e.set(workers[i])
	}
}

// report says what has happened, and fails where something has grown.
func (s *soak) report() {
	var offers []*kvferryv1.OfferInfo
	for _, n := range s.nodes {
		s.must(n.Admin(func(c kvferryv1.AdminClient) error {
			r, err := c.Offers(s.Context(), &kvferryv1.OffersRequest{})
			offers = append(offers, r.GetOffers()...)
			return err
		}))
	}
	for _, o := range offers {
		if o.State != "ended" {
			s.Errorf("an offer has not ended: %v", o)
		}
	}
	var line strings.Builder
	for _, n := range s.nodes {
		s.checkDrives(n.Node)
	}
	for _, k := range slices.Sorted(maps.Keys(s.counts)) {
		fmt.Fprintf(&line, "%s %d, ", k, s.counts[k])
	}
	for _, n := range s.nodes {
		early, late := fifth(n.samples, 1), fifth(n.samples, 4)
		fmt.Fprintf(&line, "%s: %v then %v; ", n.Name, early, late)
		// A short run is too uneven to tell much: what leaks with every request shows all the same.
		if late.anonymous > early.anonymous*5/4+16<<20 || late.descriptors > early.descriptors*5/4+24 || late.goroutines > early.goroutines*5/4+48 {
			s.Errorf("the daemon of node %s has grown", n.Name)
		}
	}
	s.Logf("soak, %v: %s", *soakFor, strings.TrimSuffix(line.String(), "; "))
	if done := s.counts["requests whole"]; done < s.counts["requests"]/3 {
		s.Errorf("only %d of %d requests came whole", done, s.counts["requests"])
	}
}
