package daemon

import (
	"math"
	"strings"
	"testing"

	pb "github.com/kvferry/kvferry/proto/kvferry/v1"
	"github.com/kvferry/kvferry/standin"
)

// 2^31 blocks and other shapes that do not fit are refused by name.
func TestBadHellos(t *testing.T) {
	n := newNode(t)
	region := func(f func(*pb.Region)) func(*pb.Hello) {
		return func(h *pb.Hello) { f(h.Regions[0]) }
	}
	for name, c := range map[string]struct {
		change func(*pb.Hello)
		field  string
	}{
		"version":        {func(h *pb.Hello) { h.WireVersion = 99 }, "hello.wire_version"},
		"role":           {func(h *pb.Hello) { h.Role = 7 }, "hello.role"},
		"no instance":    {func(h *pb.Hello) { h.Instance = "" }, "hello.instance"},
		"long instance":  {func(h *pb.Hello) { h.Instance = strings.Repeat("x", 129) }, "hello.instance"},
		"control":        {func(h *pb.Hello) { h.Engine = "a\nb" }, "hello.engine"},
		"no ranks":       {func(h *pb.Hello) { h.Ranks = 0 }, "hello.ranks"},
		"rank":           {func(h *pb.Hello) { h.Rank = 1 }, "hello.rank"},
		"no space":       {func(h *pb.Hello) { h.Space = nil }, "hello.space.model"},
		"local path":     {func(h *pb.Hello) { h.Space.Model = "/models/x" }, "hello.space.revision"},
		"space newline":  {func(h *pb.Hello) { h.Space.Layout = "a\nb" }, "hello.space.layout"},
		"pp":             {func(h *pb.Hello) { h.Space.Pp = 2 }, "hello.space.pp"},
		"tp 0":           {func(h *pb.Hello) { h.Space.Tp = 0 }, "hello.space.tp"},
		"no regions":     {func(h *pb.Hello) { h.Regions = nil }, "hello.regions"},
		"two alike":      {func(h *pb.Hello) { h.Regions = append(h.Regions, h.Regions[0]) }, "hello.regions.id"},
		"kind":           {region(func(r *pb.Region) { r.Kind = 9 }), "hello.regions.kind"},
		"no bytes":       {region(func(r *pb.Region) { r.Bytes = 0 }), "hello.regions.bytes"},
		"2^31 blocks":    {region(func(r *pb.Region) { r.Blocks = 1 << 31 }), "hello.regions.blocks"},
		"too small":      {region(func(r *pb.Region) { r.Bytes-- }), "hello.regions.planes"},
		"no planes":      {region(func(r *pb.Region) { r.Planes = nil }), "hello.regions.planes"},
		"overlap stride": {region(func(r *pb.Region) { r.Planes[0].Stride-- }), "hello.regions.planes"},
		"overflow base":  {region(func(r *pb.Region) { r.Planes[0].Base = math.MaxUint64 }), "hello.regions.planes"},
		"overflow":       {region(func(r *pb.Region) { r.Planes[0].Stride = 1 << 62 }), "hello.regions.planes"},
		"shard too big": {region(func(r *pb.Region) {
			r.Bytes, r.Blocks = 1<<30, 1
			r.Planes = []*pb.Plane{{Bytes: 1 << 30, Stride: 1 << 30}}
		}), "hello.regions.planes"},
		"scheduler lends": {func(h *pb.Hello) { h.Role = scheduler }, "hello.regions"},
	} {
		h := helloOf(worker)
		c.change(h)
		err := n.helloError(h)
		if err == nil || !strings.Contains(err.Error(), c.field) {
			t.Errorf("%s: %v, want an error that names %s", name, err, c.field)
		}
	}
	n.nothingHeld()
}

// Messages that are wrong are answered by the name of the field and change nothing.
func TestBadOperations(t *testing.T) {
	n := newNode(t)
	raw := n.rawSession(helloOf(worker))
	hashes, parents := prompt(4, 1)
	space := raw.welcome.SpaceId
	good := func() *pb.Store {
		return &pb.Store{Word: 0, SpaceId: space, Region: 1, BlockIds: numbers(0, 4), Hashes: packed(hashes), Parents: packed(parents)}
	}
	number := uint64(0)
	for name, c := range map[string]struct {
		change func(*pb.Store)
		field  string
	}{
		"space length":  {func(s *pb.Store) { s.SpaceId = s.SpaceId[:31] }, "store.space_id"},
		"foreign space": {func(s *pb.Store) { s.SpaceId = make([]byte, 32) }, "store.space_id"},
		"hash length":   {func(s *pb.Store) { s.Hashes = s.Hashes[:127] }, "store.hashes"},
		"no hashes":     {func(s *pb.Store) { s.Hashes, s.Parents, s.BlockIds = nil, nil, nil }, "store.hashes"},
		"zero hash":     {func(s *pb.Store) { clear(s.Hashes[:32]) }, "store.hashes"},
		"twice":         {func(s *pb.Store) { copy(s.Hashes[:32], s.Hashes[32:64]) }, "store.hashes"},
		"parents":       {func(s *pb.Store) { s.Parents = s.Parents[:32] }, "store.parents"},
		"ids":           {func(s *pb.Store) { s.BlockIds = s.BlockIds[:3] }, "store.block_ids"},
		"id range":      {func(s *pb.Store) { s.BlockIds[3] = 1 << 31 }, "store.block_ids"},
		"region":        {func(s *pb.Store) { s.Region = 5 }, "store.region"},
		"word":          {func(s *pb.Store) { s.Word = 1 << 20 }, "store.word"},
		"free word":     {func(s *pb.Store) { s.Word = 7 }, "store.word"},
		"deadline":      {func(s *pb.Store) { s.DeadlineMs = 1 << 30 }, "store.deadline_ms"},
		"request":       {func(s *pb.Store) { s.RequestId = strings.Repeat("x", 300) }, "store.request_id"},
		"number":        {func(s *pb.Store) { s.Operation = 1 << 60 }, "store.operation"},
		"too many": {func(s *pb.Store) {
			h, p := prompt(65, 5)
			s.Hashes, s.Parents, s.BlockIds = packed(h), packed(p), numbers(0, 65)
		}, "store.hashes"},
	} {
		m := good()
		number++
		m.Operation = number
		c.change(m)
		raw.word(0, number)
		raw.send(&pb.SessionRequest{Message: &pb.SessionRequest_Store{Store: m}})
		end := raw.receive().GetOperationEnd()
		if end.GetOutcome() != pb.Outcome_OUTCOME_REJECTED || !strings.Contains(end.GetReason(), c.field) {
			t.Errorf("%s: %v, want a rejection that names %s", name, end, c.field)
		}
	}
	if st := n.ledger.Stats(); st.UsedBytes != 0 || st.Records != 0 {
		t.Errorf("something changed: %+v", st)
	}
	number++
	m := good()
	m.Operation = number
	raw.word(0, number)
	raw.send(&pb.SessionRequest{Message: &pb.SessionRequest_Store{Store: m}})
	if end := raw.receive().GetOperationEnd(); end.GetOutcome() != pb.Outcome_OUTCOME_COMMITTED {
		t.Errorf("a good store after all that ended %v", end)
	}
}

func TestBadOffersAndTickets(t *testing.T) {
	n := newNode(t)
	refused := make(chan *pb.Refused, 1)
	sched, _ := n.attach(scheduler, func(c *standin.Config) { c.Refused = func(r *pb.Refused) { refused <- r } })
	if _, err := sched.Offer(standin.OfferRequest{RequestID: "r", Hashes: nil, Tokens: 1, LifetimeMs: 0}); err != nil {
		t.Fatal(err)
	}
	if r := <-refused; !strings.Contains(r.Field, "offer.hashes") {
		t.Errorf("refused %v", r)
	}
	hashes, _ := prompt(3, 1)
	if _, err := sched.Offer(standin.OfferRequest{RequestID: "r", Hashes: hashes, Tokens: 0, LifetimeMs: 0}); err != nil {
		t.Fatal(err)
	}
	if r := <-refused; r.Field != "offer.tokens" {
		t.Errorf("refused %v", r)
	}
	s, _ := n.attach(worker)
	for name, ticket := range map[string][]byte{"garbage": []byte("garbage"), "empty": {}, "long": make([]byte, 70<<10)} {
		_, err := s.Load(ctx10(t), standin.LoadRequest{Blocks: numbers(0, 3), Hashes: hashes, Ticket: ticket})
		if err == nil || !strings.Contains(err.Error(), "accept.ticket") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestMatchErrors(t *testing.T) {
	n := newNode(t)
	sched, _ := n.attach(scheduler)
	c := n.engine()
	space := sched.Space
	for name, r := range map[string]*pb.MatchRequest{
		"session_id": {SessionId: 1 << 40, RequestId: "r", SpaceId: space[:]},
		"space_id":   {SessionId: sched.Welcome.SessionId, RequestId: "r", SpaceId: space[:5]},
		"request_id": {SessionId: sched.Welcome.SessionId, SpaceId: space[:]},
		"hashes":     {SessionId: sched.Welcome.SessionId, RequestId: "r", SpaceId: space[:], Hashes: make([]byte, 33)},
		"lease_ms":   {SessionId: sched.Welcome.SessionId, RequestId: "r", SpaceId: space[:], LeaseMs: 1 << 31},
	} {
		if _, err := c.Match(ctx10(t), r); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
