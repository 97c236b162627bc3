package process

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/kvferry/kvferry"
	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
	"github.com/kvferry/kvferry/standin"
)

const (
	streams     = 8  // requests at a time; each has blocks of its own in every engine
	streamRoom  = 80 // blocks
	soakBlocks  = streamRoom / 2
	soakPrompts = 200 // that differ from their first block on
	loadFor     = 3 * time.Second
	offerLife   = 5 * time.Second
	servedFor   = claimLease + dataStall + offerLife + 10*time.Second
)

// request is one prompt on its way through two engines.
type request struct {
	s              *soak
	random         *rand.Rand
	p, d           *Worker
	disturbed      func() bool // something was done to one of them
	place          int
	hashes         []kvferry.Hash
	parents        []kvferry.Hash
	source, target []uint32
	ticket         []byte
	id             [16]byte
	kind, event    string
	replies        chan LoadReply
	errs           chan error
	loads          int
}

// left are blocks that the engine has back: nobody may write there.
type left struct {
	w         *Worker
	disturbed func() bool
	blocks    []uint32
}

func (s *soak) stream(k int) {
	random := rand.New(rand.NewPCG(*soakSeed, uint64(k)))
	var last *left
	for s.stop.Err() == nil && !s.Failed() {
		p, d := s.prefill[random.IntN(len(s.prefill))], s.decode[k%len(s.decode)]
		pw, pl := p.alive(s.stop)
		dw, dl := d.alive(s.stop)
		if pw == nil || dw == nil {
			return
		}
		if last != nil && last.w == dw {
			n, err := dw.Written(s.Context(), last.blocks)
			if err == nil && n > 0 {
				s.Errorf("%d bytes were written after the worker had its blocks back", n)
			}
		}
		n := 8 + random.IntN(soakBlocks-7)
		r := &request{s: s, random: random, p: pw, d: dw, place: k * streamRoom, source: numbers(k*streamRoom, n), target: numbers(k*streamRoom, n),
			disturbed: func() bool { return p.lives.Load() != pl || d.lives.Load() != dl },
			replies:   make(chan LoadReply, 2), errs: make(chan error, 2)}
		r.hashes, r.parents = promptOf(n, 1000+random.Uint64N(soakPrompts))
		r.kind = []string{"staged", "pulled", "direct", "direct", "open-ended"}[random.IntN(5)]
		r.event = []string{"", "", "", "aborted", "reused", "twice", "stolen"}[random.IntN(7)]
		s.count("requests", 1)
		s.count(r.kind, 1)
		if r.event != "" {
			s.count(r.event, 1)
		}
		served := func(blocks bool) {
			if blocks {
				s.served.Go(func() { s.endsOnce(pw, func() bool { return p.lives.Load() != pl }, r) })
			}
		}
		rest, err := r.run(served)
		last = nil
		switch {
		case err == nil:
			last = &left{dw, r.disturbed, rest}
		case r.disturbed():
			s.count("requests disturbed", 1)
		default:
			s.Errorf("%s %s request: %v", r.kind, r.event, err)
		}
	}
}

// run hands the prompt over, and answers the blocks that did not come.
func (r *request) run(served func(blocks bool)) (rest []uint32, err error) {
	ctx := r.s.Context()
	if err := r.p.Bump(ctx, r.source); err != nil {
		return nil, err
	}
	if err := r.p.Write(ctx, r.source, r.hashes); err != nil {
		return nil, err
	}
	q := standin.OfferRequest{RequestID: "p", Hashes: r.hashes, Tokens: uint32(len(r.hashes)) * 512, LifetimeMs: uint32(offerLife.Milliseconds())}
	switch r.kind {
	case "staged":
		if err := r.store(0, len(r.hashes)); err != nil {
			return nil, err
		}
	case "open-ended":
		q.OpenEnded = true
	default:
		q.Blocks = r.source
	}
	if r.ticket, err = r.p.Offer(ctx, q); err != nil {
		return nil, err
	}
	if r.id, err = standin.OfferID(r.ticket); err != nil {
		return nil, err
	}
	if q.OpenEnded {
		defer func() {
			if err != nil { // nobody will complete it
				_ = r.p.EndOffer(ctx, r.id)
			}
		}()
	}
	served(q.Blocks != nil)
	if err := r.d.Scribble(ctx, numbers(r.place, streamRoom)); err != nil {
		return nil, err
	}
	r.load(r.d, r.target)
	err = r.happen(ctx, served)
	return r.end(ctx, err)
}

func (r *request) store(from, to int) error {
	got, err := r.p.Store(r.s.Context(), standin.StoreRequest{RequestID: "p", Blocks: r.source[from:to], Hashes: r.hashes[from:to], Parents: r.parents[from:to]})
	r.s.count("blocks not stored", got.Failed)
	return err
}

func (r *request) load(w *Worker, target []uint32) {
	r.loads++
	direct := r.kind == "direct" || r.random.IntN(2) == 0
	go func() {
		begun := time.Now()
		got, err := w.Load(r.s.Context(), standin.LoadRequest{RequestID: "d", Blocks: target, Hashes: r.hashes, Ticket: r.ticket, Direct: direct, DeadlineMs: uint32(loadFor.Milliseconds())})
		if took := time.Since(begun); err == nil && took > loadFor+time.Second {
			err = fmt.Errorf("answered after %v", took)
		}
		for i, st := range got.Report.Status {
			if st != kvferryv1.BlockStatus_BLOCK_STATUS_READY {
				continue
			}
			if wrong, e := w.Check(r.s.Context(), target[i:i+1], r.hashes[i:i+1]); e == nil && wrong > 0 {
				r.s.Errorf("%s %s: block %d has %d wrong bytes", r.kind, r.event, i, wrong)
			}
		}
		r.errs <- err
		r.replies <- got
	}()
}

// happen lets something happen while the prompt is on its way.
func (r *request) happen(ctx context.Context, served func(blocks bool)) error {
	time.Sleep(time.Duration(r.random.IntN(4000)) * time.Microsecond)
	if r.kind == "open-ended" {
		if err := r.store(0, len(r.hashes)/2); err != nil {
			return err
		}
		if r.event != "aborted" {
			if err := r.p.Complete(ctx, CompleteArgs{r.id, r.source}); err != nil {
				return err
			}
			served(true)
		}
	}
	switch r.event {
	case "aborted":
		return r.p.EndOffer(ctx, r.id)
	case "reused":
		part := r.source[r.random.IntN(len(r.source)):]
		if err := r.p.Bump(ctx, part); err != nil {
			return err
		}
		return r.p.Scribble(ctx, part)
	case "twice":
		r.load(r.d, numbers(r.place+soakBlocks, len(r.hashes)))
	case "stolen": // the ticket comes to somebody else too: one of them is refused, but for what is in its pool
		w, _ := r.s.decode[r.random.IntN(len(r.s.decode))].alive(r.s.stop)
		if w != nil && w != r.d {
			r.steal(ctx, w)
		}
	}
	return nil
}

// steal loads with the ticket in another engine, which may die in the meantime.
func (r *request) steal(ctx context.Context, w *Worker) {
	if w.Scribble(ctx, r.target) != nil {
		return
	}
	got, err := w.Load(ctx, standin.LoadRequest{RequestID: "d", Blocks: r.target, Hashes: r.hashes, Ticket: r.ticket, Direct: true, DeadlineMs: uint32(loadFor.Milliseconds())})
	if err != nil {
		return
	}
	for i, st := range got.Report.Status {
		if wrong, e := w.Check(ctx, r.target[i:i+1], r.hashes[i:i+1]); st == kvferryv1.BlockStatus_BLOCK_STATUS_READY && e == nil && wrong > 0 {
			r.s.Errorf("stolen %s: block %d has %d wrong bytes", r.kind, i, wrong)
		}
	}
}

// end takes the answers. What did not come is scribbled: from now on nobody writes there.
func (r *request) end(ctx context.Context, err error) (rest []uint32, _ error) {
	best := 0
	for range r.loads {
		if e := <-r.errs; err == nil {
			err = e
		}
		got := (<-r.replies).Report
		best = max(best, got.Loaded)
		r.s.count("blocks from pools", got.Loaded-got.Lent-got.Delivered)
		r.s.count("blocks lent", got.Lent)
		r.s.count("blocks delivered", got.Delivered)
		r.s.count("blocks missing", len(got.Status)-got.Loaded)
	}
	if err != nil {
		return nil, err
	}
	if best == len(r.hashes) {
		r.s.count("requests whole", 1)
	}
	rest = slices.Clone(numbers(r.place, streamRoom))
	return rest, r.d.Scribble(ctx, rest)
}

// endsOnce waits until the prefill worker was told that its blocks are its own again, and looks whether it is told once more.
func (s *soak) endsOnce(w *Worker, disturbed func() bool, r *request) {
	ctx, cancel := context.WithTimeout(s.Context(), servedFor)
	defer cancel()
	reason, err := w.Served(ctx, r.id)
	if err == nil && s.stop.Err() == nil {
		select { // for a while it may be told again
		case <-s.stop.Done():
		case <-time.After(2 * time.Second):
		}
		ctx, cancel := context.WithTimeout(ctx, time.Second) // a session that was opened since knows nothing of it
		defer cancel()
		if again, e := w.Served(ctx, r.id); e == nil {
			reason = again
		}
	}
	switch {
	case err == nil && reason == "twice":
		s.Errorf("%s %s: the prefill worker was told twice", r.kind, r.event)
	case err == nil:
		s.count("offers ended: "+reason, 1)
	case disturbed():
		s.count("offers ended with their engine", 1)
	default:
		s.Errorf("%s %s: the prefill worker has not its blocks back: %v", r.kind, r.event, err)
	}
}
