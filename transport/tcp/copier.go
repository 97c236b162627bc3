package tcp

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/transport"
)

const (
	partSize     = 1 << 20   // larger copies are cut, so that several lanes can have a share
	laneShare    = 1 << 20   // bytes that make a lane of its own worth while
	aheadMax     = 4 << 20   // payload that a lane asks for ahead: the server shall never wait for a request
	aheadMin     = 512 << 10 // the same at the end of a batch, so that all lanes end together
	togetherMost = 1 << 20   // payload that small copies make up one request to
)

// copier is a Link seen through one claim's key.
type copier struct {
	link   *Link
	key    [16]byte
	src    kvferry.Region
	dst    transport.Memory
	closed atomic.Bool
}

var _ transport.Copier = (*copier)(nil)

// errUntried marks a part that no lane has finished or failed yet; it never leaves the package.
var errUntried = errors.New("untried")

// Copy spreads the batch over lanes. A lane that breaks fails the copies that were on it, and the others take the rest.
func (c *copier) Copy(ctx context.Context, batch []transport.Copy) error {
	if err := c.ready(ctx); err != nil {
		for i := range batch {
			batch[i].Err = err
		}
		return err
	}
	parts, total := transport.Cut(batch, c.dst.Region(), c.src, partSize)
	jobs := make([]job, 0, len(parts))
	for i := range parts {
		if parts[i].Length > 0 {
			jobs = append(jobs, newJob(&parts[i]))
		}
	}
	if len(jobs) == 0 {
		return nil
	}
	good, err := c.spread(ctx, jobs, total)
	short := !good
	for i := range parts {
		if parts[i].Err == errUntried {
			parts[i].Err, short = err, true
		}
	}
	if transport.Join(parts) != nil && (short || ctx.Err() != nil) {
		return err
	}
	return nil
}

// Close ends the use of this claim's key. Copies that run are not touched: their context ends them.
func (c *copier) Close() error {
	c.closed.Store(true)
	return nil
}

func (c *copier) ready(ctx context.Context) error {
	if c.closed.Load() {
		return errClosed
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}

// queue gives each job to one lane. Each lane has its own, with the same jobs and shared state.
type queue struct {
	again []*job // of a lane that turned out to be dead; before the others
	jobs  []job
	lanes int
	*shared
}

type shared struct {
	next atomic.Int64  // index of the next job
	left atomic.Uint64 // bytes of jobs that no lane has taken
}

// ahead is how much payload a lane may ask for ahead: much, but of what is left at most its share of a half.
func (q *queue) ahead() uint64 {
	return min(aheadMax, max(aheadMin, q.left.Load()/uint64(2*q.lanes)))
}

func (q *queue) take() *job {
	if len(q.again) > 0 {
		j := q.again[0]
		q.again = q.again[1:]
		return j
	}
	if i := q.next.Add(1) - 1; i < int64(len(q.jobs)) {
		j := &q.jobs[i]
		q.left.Add(-j.remaining)
		return j
	}
	return nil
}

// spread works the jobs off on one or more lanes, the first of them in this goroutine. Its error is that of a lane; good tells whether any lane came to its end.
func (c *copier) spread(ctx context.Context, jobs []job, total uint64) (good bool, err error) {
	lanes := max(1, min(c.link.options.Lanes, len(jobs), int(total/laneShare)))
	q := queue{jobs: jobs, lanes: lanes, shared: new(shared)}
	q.left.Store(total)
	errs := make([]error, lanes)
	var wg sync.WaitGroup
	for i := 1; i < lanes; i++ {
		wg.Go(func() { errs[i] = c.work(ctx, q, false) })
	}
	errs[0] = c.work(ctx, q, true)
	wg.Wait()
	for _, e := range errs {
		if e == nil {
			good = true
		} else if err == nil && e != errNoLane {
			err = e
		}
	}
	return good, err
}

// work runs one lane. A lane that had been idle and that says nothing was dead before we came: its copies are tried once more on a new one.
func (c *copier) work(ctx context.Context, q queue, wait bool) error {
	if err := c.link.take(ctx, wait); err != nil {
		return err
	}
	defer func() { c.link.free <- struct{}{} }()
	for fresh := false; ; fresh = true {
		n, err := c.link.lane(ctx, fresh)
		if err != nil {
			if ctx.Err() != nil {
				err = context.Cause(ctx)
			}
			fail(q.again, err)
			return err
		}
		err = n.run(ctx, c.key, c.dst, &q)
		stale := err != nil && n.reused && !n.heard && ctx.Err() == nil && !fresh
		left := n.left()
		c.link.put(n, err != nil)
		if err == nil || !stale {
			fail(left, err)
			fail(q.again, err)
			return err
		}
		for _, j := range left {
			j.again()
		}
		q.again = left
	}
}

func fail(jobs []*job, err error) {
	for _, j := range jobs {
		if j.Err == errUntried {
			j.Err = err
		}
	}
}
