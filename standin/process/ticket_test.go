package process

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
	"github.com/kvferry/kvferry/standin"
)

// A ticket that comes twice, late, to somebody else, or where it does not fit.
func TestTickets(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for _, w := range everyWay { // one after the other: what is in the pool since is there, the rest is refused at once
		h := r.offered(w).load()
		h.all()
		begun := time.Now()
		if got := h.again(h.to).load().end(); got.err != nil || (got.Report.Loaded != promptBlocks) != (w >= direct) {
			t.Errorf("%v: the second time %+v %v", w, got.Report, got.err)
		}
		if took := time.Since(begun); took > time.Second {
			t.Errorf("%v: the second time took %v", w, took)
		}
		h.served(time.Second, "done")
		h.once()
	}

	fast := r.slow()
	for _, w := range []way{pulled, direct} { // while the first is on its way
		h := r.under1(w)
		twice := h.again(h.to)
		twice.target = numbers(int(h.target[0]+promptBlocks), promptBlocks)
		twice.load()
		h.all()
		if got := twice.end(); got.err != nil || got.Report.Loaded != promptBlocks {
			t.Errorf("%v: of two at a time %+v %v", w, got.Report, got.err)
		}
		h.served(time.Second, "done")
		h.once()
	}
	other := r.worker("other", r.b)
	h := r.under1(direct)
	h.again(other).load().none()
	h.all()
	h.served(time.Second, "done")
	fast()

	r.lifetime = 300 * time.Millisecond
	for _, w := range everyWay {
		h := r.offered(w)
		h.served(2*time.Second, "expired")
		r.until("the offer has expired", 2*time.Second, func() bool { s, err := r.a.Status(t.Context()); return err == nil && s.OffersOpen == 0 })
		h.load().none()
		h.once()
	}
	r.lifetime = 8 * time.Second
	r.nothingHeld(time.Second)
	t.Run("tp", r.tensorParallel)
}

// under1 is a handoff in mid-transfer whose second target is free.
func (r *rig) under1(w way) *handoff {
	r.prompts += r.prompts & 1
	return r.under(w)
}

// A claim of another tp is refused by name, and so is the Accept of an engine of another tp, whose space is another one.
func (r *rig) tensorParallel(t *testing.T) {
	h := r.offered(direct)
	var ticket kvferryv1.Ticket
	r.must(proto.Unmarshal(h.ticket, &ticket))
	conn, err := grpc.NewClient(ticket.Addresses[0], grpc.WithTransportCredentials(insecure.NewCredentials()))
	r.must(err)
	defer conn.Close()
	_, err = kvferryv1.NewPeerClient(conn).Claim(t.Context(), &kvferryv1.ClaimRequest{WireVersion: 1, Epoch: ticket.Epoch, OfferId: ticket.OfferId, Secret: ticket.Secret, Instance: "far", Tp: 2,
		SpaceId: ticket.SpaceId, Hashes: h.hashes[0][:]})
	if status.Code(err) != codes.FailedPrecondition && status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "claim.tp: offered by tp=1, claimed by tp=2") {
		t.Errorf("a claim of tp=2: %v", err)
	}
	two, err := StartWorker("two")
	r.must(err)
	defer two.Kill()
	r.must(two.Attach(t.Context(), AttachArgs{SocketsDir: r.b.SocketsDir(), Instance: "two", Shape: wide, TP: 2}))
	_, err = two.Load(t.Context(), standin.LoadRequest{RequestID: "d", Blocks: h.target, Hashes: h.hashes, Ticket: h.ticket, Direct: true, DeadlineMs: 2000})
	if err == nil || !strings.Contains(err.Error(), "accept.ticket.space_id") {
		t.Errorf("an Accept of tp=2: %v", err)
	}
	h.load().all() // neither has spoiled it
	h.served(time.Second, "done")
}

// open is an offer whose prompt is still being computed.
func (r *rig) open(w way) *handoff {
	r.Helper()
	h := r.prompt(w)
	return h.offer(func(q *standin.OfferRequest) { q.OpenEnded, q.Blocks = true, nil })
}

// The prompt of an open-ended offer stops being computed, in every way it may.
func TestOpenEndedFails(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	half := promptBlocks / 2
	begin := func(w way) *handoff { // half of it is there, and taken
		h := r.open(w)
		h.load()
		h.store(0, half)
		r.claimed(w)
		return h
	}
	for _, w := range []way{pulled, direct, lent} {
		h := begin(w)
		r.must(r.prefill.Complete(t.Context(), CompleteArgs{h.id, h.source}))
		h.all()
		h.served(time.Second, "done")
		h.once()

		h = begin(w) // aborted
		r.must(r.prefill.EndOffer(t.Context(), h.id))
		ended := time.Now()
		if got := h.end(); got.err != nil || got.Report.Loaded != half || time.Since(ended) > time.Second {
			t.Errorf("%v, aborted: %+v %v after %v", w, got.Report, got.err, time.Since(ended))
		}
		// Its engine completes it all the same: what it keeps for it, it need not keep.
		r.must(r.prefill.Complete(t.Context(), CompleteArgs{h.id, h.source}))
		h.served(time.Second, "withdrawn")
		h.once()

		h = begin(w) // killed
		r.prefill.Kill()
		ended = time.Now()
		if got := h.end(); got.err != nil || got.Report.Loaded != half || time.Since(ended) > 2*time.Second {
			t.Errorf("%v, prefill killed: %+v %v after %v", w, got.Report, got.err, time.Since(ended))
		}
		r.prefill = r.again("prefill", r.a)

		r.deadline = 2 * time.Second
		h = begin(w) // forgotten
		r.deadline = deadline
		if got := h.end(); got.Report.Loaded != half {
			t.Errorf("%v, never completed: %+v %v", w, got.Report, got.err)
		}
		h.untouched()
		r.must(r.prefill.EndOffer(t.Context(), h.id))
	}
	r.nothingHeld(time.Second)

	// Offers that never come, more in a row than make a circuit open: the peer has answered all the time.
	r.deadline = 2 * time.Second
	var ghosts []*handoff
	for range 4 {
		h := r.prompt(direct)
		h.offer(func(q *standin.OfferRequest) { q.OpenEnded, q.Blocks = true, nil })
		r.must(r.prefill.EndOffer(t.Context(), h.id))
		var ticket kvferryv1.Ticket
		r.must(proto.Unmarshal(h.ticket, &ticket))
		ticket.OfferId[0]++
		var err error
		h.ticket, err = proto.Marshal(&ticket)
		r.must(err)
		ghosts = append(ghosts, h.load())
	}
	for _, h := range ghosts {
		h.none()
	}
	r.recovers(direct)
	if got := r.counter(r.b, "peers", "degraded"); got != 0 {
		t.Errorf("offers that did not come have opened a circuit %d times", got)
	}
	r.nothingHeld(time.Second)
}

// claimed waits until a claim has what was stored so far, which it told its worker.
func (r *rig) claimed(w way) {
	r.Helper()
	r.until("the first half is taken", deadline, func() bool {
		s, err := r.a.Status(r.Context())
		return err == nil && s.Claims == 1
	})
}

func (r *rig) counter(n *Node, name, reason string) uint64 {
	r.Helper()
	s, err := n.Status(r.Context())
	r.must(err)
	for _, c := range s.Counters {
		if c.Name == name && c.Reason == reason {
			return c.Value
		}
	}
	return 0
}

// What a Match has found at a peer is gone, or the peer is, when it is loaded: misses, and no error.
func TestFetchFails(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for name, lose := range map[string]func(){
		"nothing": func() {},
		"restarted": func() {
			r.a.Kill()
			r.a = r.node(r.a.NodeConfig)
			r.attach(r.prefill, r.a)
		},
		"evicted": func() { // more than the pool holds, when the lease has ended
			r.until("the lease ends", 5*time.Second, func() bool { return held(t.Context(), r.a) == "" })
			for range 8 {
				r.prompt(pooled)
			}
		},
		"cut": func() { r.must(r.net.Drop()) },
	} {
		if name == "cut" && r.net == nil {
			continue
		}
		h := r.prompt(pooled)
		lease := uint32(1000)
		if name == "cut" || name == "restarted" {
			lease = 6000
		}
		var m MatchReply
		r.until("the peer is found", 10*time.Second, func() bool {
			var err error
			m, err = r.far.Match(t.Context(), MatchArgs{RequestID: name, Hashes: h.hashes, LeaseMs: lease, Peers: []string{fmt.Sprintf("%s:%d", r.a.Listen, r.a.Port)}, ComputeUs: 1_000_000})
			r.must(err)
			return m.PeerBlocks == promptBlocks
		})
		lose()
		h.to, h.ticket = r.far, nil
		h.request = name
		got := h.load().end()
		if want := map[string]int{"nothing": promptBlocks}[name]; got.err != nil || got.Report.Loaded != want {
			t.Errorf("%s: %+v %v", name, got.Report, got.err)
		}
		r.must(r.far.ReleaseLease(t.Context(), name))
		if name == "cut" {
			r.must(r.net.Restore())
			r.recovers(pooled)
		}
	}
	r.nothingHeld(30 * time.Second)
}
