package replay

import (
	"fmt"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/policy"
)

// Config is the node that a trace is run on.
type Config struct {
	DRAM, NVMe int    // blocks; NVMe may be 0
	Policy     string // one that policy.New knows
	Down       tiers.Down
}

// Result is what a run has found and moved, in blocks.
type Result struct {
	Requests, Asked int
	DRAM, NVMe      int // found, by prefix
	Stored          int
	NotStored       int // a prompt longer than what the node could make room for
	Evicted         int // left the node
	Demoted         int // written to NVMe
	Promoted        int // read from it
	Released        int // left DRAM and stayed on NVMe
}

// HitRatio is blocks found by prefix over blocks asked for.
func (r Result) HitRatio() float64 { return Ratio(r.DRAM+r.NVMe, r.Asked) }

// Ratio is a part of a whole, 0 of nothing.
func Ratio(part, whole int) float64 {
	if whole == 0 {
		return 0
	}
	return float64(part) / float64(whole)
}

const (
	slotBytes = 4096 // of a block; no byte of it exists
	// storeBlocks is how many blocks one Store brings, as in the daemon: room is made before each.
	storeBlocks = 64
	owner       = tiers.Owner(1)
	leaseKey    = "request"
	leaseTime   = time.Hour
	// idleEvery is how often the ledger is asked for what is idle.
	idleEvery = time.Second
)

// run is one replay.
type run struct {
	cfg    Config
	trace  *Trace
	ledger *tiers.Ledger
	space  tiers.SpaceRef
	now    time.Time
	idleAt time.Time
	out    Result
	hashes []byte
}

// Run replays a trace.
func Run(t *Trace, cfg Config) (Result, error) {
	if cfg.DRAM < 1 || cfg.NVMe < 0 {
		return Result{}, fmt.Errorf("dram %d, nvme %d blocks: must be at least 1 and 0", cfg.DRAM, cfg.NVMe)
	}
	most := 2*t.Unique() + 1024 // more room than that is as good as just so much
	cfg.DRAM, cfg.NVMe = min(cfg.DRAM, most), min(cfg.NVMe, most)
	p, err := policy.New(cfg.Policy, cfg.DRAM+cfg.NVMe)
	if err != nil {
		return Result{}, err
	}
	c := tiers.Config{Pool: newSlots(cfg.DRAM), Policy: p, Limits: tiers.DefaultLimits}
	if cfg.NVMe > 0 {
		c.Drives = []tiers.Slots{newSlots(cfg.NVMe)}
	}
	r := &run{cfg: cfg, trace: t, ledger: tiers.New(c)}
	if r.space, err = r.ledger.Space(tiers.SpaceShape{ID: kvferry.SpaceID{1}, Shards: 1, ShardBytes: slotBytes}); err != nil {
		return Result{}, fmt.Errorf("make space: %w", err)
	}
	for i := range t.Requests {
		r.request(&t.Requests[i])
	}
	n := r.ledger.Stats().Counts
	r.out.Requests, r.out.Asked = len(t.Requests), int(n.Asked)
	r.out.DRAM, r.out.NVMe = int(n.DRAM), int(n.NVMe)
	r.out.Stored, r.out.Demoted, r.out.Promoted, r.out.Released = int(n.Stored), int(n.Demoted), int(n.Promoted), int(n.Released)
	r.out.Evicted = r.out.Stored - r.ledger.Stats().Blocks
	return r.out, nil
}

// request looks a prompt up, brings up what is on NVMe, and stores what was missing.
func (r *run) request(q *Request) {
	r.now = time.Unix(1, 0).Add(q.At) // 0 means never used
	r.tick()
	r.hashes = r.hashes[:0]
	for _, n := range q.chain {
		r.hashes = append(r.hashes, r.trace.blocks[n].hash[:]...)
	}
	m := r.ledger.Match(r.now, owner, leaseKey, r.space, r.hashes, r.now.Add(leaseTime))
	if m.NVMe > 0 {
		r.promote(r.hashes[m.First*kvferry.HashSize : m.Blocks*kvferry.HashSize])
	}
	r.store(q, m.Blocks)
	r.ledger.ReleaseKey(owner, leaseKey)
}

// tick does what the daemon does from time to time.
func (r *run) tick() {
	if r.now.Before(r.idleAt) {
		return
	}
	r.idleAt = r.now.Add(idleEvery)
	r.down(r.cfg.Down)
}

// room has the ledger move down what must leave before more comes.
func (r *run) room() {
	d := r.cfg.Down
	d.Idle = 0
	r.down(d)
}

const planMax = 1024

func (r *run) down(d tiers.Down) {
	if r.cfg.NVMe == 0 {
		return
	}
	for {
		plan := r.ledger.PlanDown(r.now, d, planMax)
		r.commit(plan)
		if len(plan.List) == 0 && !plan.More {
			return
		}
	}
}

func (r *run) commit(plan tiers.Moves) {
	for i := range plan.List {
		r.ledger.EndMove(r.now, &plan.List[i], true)
	}
}

// batch is how many blocks may come at once: no more than the watermark leaves free, or what leaves for them has no time to go down.
func (r *run) batch() int {
	return min(storeBlocks, max(1, int(float64(r.cfg.DRAM)*(1-r.cfg.Down.High))))
}

// promote brings blocks up, from the chain's beginning on, a part at a time.
func (r *run) promote(hashes []byte) {
	for step := r.batch() * kvferry.HashSize; len(hashes) > 0; {
		n := min(step, len(hashes))
		r.room()
		r.commit(r.ledger.BeginPromote(r.now, r.space, 0, hashes[:n]))
		hashes = hashes[n:]
	}
}

// store brings what a prompt has beyond its first found blocks. Each part is leased, so that it does not leave for the next one.
func (r *run) store(q *Request, found int) {
	for from := found; from < len(q.chain); {
		to := min(from+r.batch(), len(q.chain))
		r.room()
		blocks := make([]tiers.Block, 0, storeBlocks)
		for i := from; i < to; i++ {
			b := r.trace.blocks[q.chain[i]]
			k := tiers.Block{Hash: b.hash, Partial: q.partial && i == len(q.chain)-1}
			if b.parent >= 0 {
				k.Parent = r.trace.blocks[b.parent].hash
			}
			blocks = append(blocks, k)
		}
		fills := r.ledger.BeginFill(r.now, r.space, 0, blocks)
		n := 0
		for n < len(fills) && fills[n].Status == tiers.FillNew {
			n++
		}
		r.ledger.Commit(r.now, fills[:n], make([]uint32, n))
		if n > 0 {
			_ = r.ledger.Lease(owner, leaseKey, r.space, blocks[n-1].Hash, r.now.Add(leaseTime)) // one lease at a time is below any limit
		}
		if n < len(fills) { // no room: what comes after cannot be found without it
			var rest []tiers.Fill
			for _, f := range fills[n:] {
				if f.Status == tiers.FillNew {
					rest = append(rest, f)
				}
			}
			r.ledger.Abort(r.now, rest)
			r.out.NotStored += len(q.chain) - from - n
			return
		}
		from = to
	}
}

// Policies are those that Config takes, and DefaultPolicy is the daemon's.
const (
	Policies      = policy.Names
	DefaultPolicy = policy.Default
)
