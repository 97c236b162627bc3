package process

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/kvferry/kvferry"
	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
	"github.com/kvferry/kvferry/standin"
)

// callTimeout bounds everything that a worker waits for.
const callTimeout = time.Minute

// Service is what a worker process does for its parent. Its methods have the form that net/rpc asks for.
type Service struct {
	mu        sync.Mutex
	memory    *standin.Memory
	worker    *standin.Session
	scheduler *standin.Session
	table     *standin.Table
	scratch   scratch
	gate      gate
}

// AttachArgs says where and as what to attach. A worker process has a worker session, and a scheduler session beside it, as engines with one rank do.
type AttachArgs struct {
	SocketsDir string
	Instance   string
	Shape      standin.Shape
	Staging    bool
	Pooled     bool   // neither reads lent memory nor lends
	TP         uint32 // of the space; 0 is 1. The worker is rank 0 of so many all the same
}

// Space is the space of all stand-ins of one shape.
func Space(s standin.Shape) *kvferryv1.Space {
	return &kvferryv1.Space{Model: "standin", KvDtype: "bfloat16", BlockTokens: 512, Attention: "full", Layers: uint32(s.Planes), Heads: 1, HeadSize: uint32(s.PlaneBytes / 2048),
		Layout: "standin/v1", Tp: 1, Pp: 1, Dcp: 1, ShardKind: kvferryv1.ShardKind_SHARD_KIND_SHARDED, HashAlgorithm: "sha256_cbor"}
}

// Attach makes the memory and opens both sessions. What is attached already keeps its memory, and opens new sessions, as after the daemon's death.
func (s *Service) Attach(a AttachArgs, _ *struct{}) (err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.worker != nil {
		_ = s.scheduler.Close()
		_ = s.worker.Close()
		s.scheduler, s.worker = nil, nil
	}
	if s.memory == nil {
		if s.memory, err = standin.NewMemory(a.Shape); err != nil {
			return err
		}
	}
	if s.table == nil {
		if s.table, err = standin.NewTable(a.Shape.Blocks); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	c := standin.Config{SocketsDir: a.SocketsDir, Role: kvferryv1.Role_ROLE_WORKER, Instance: a.Instance, Space: Space(a.Shape), Memory: s.memory, Pooled: a.Pooled, Copying: s.gate.pass}
	if a.TP > 0 {
		c.Space.Tp = a.TP
	}
	if a.Staging {
		c.Kind = kvferryv1.RegionKind_REGION_KIND_STAGING
	}
	w, err := standin.Attach(ctx, c)
	if err != nil {
		return err
	}
	c.Role, c.Memory, c.Kind, c.Table = kvferryv1.Role_ROLE_SCHEDULER, nil, 0, s.table
	sched, err := standin.Attach(ctx, c)
	if err != nil {
		_ = w.Close()
		return err
	}
	s.worker, s.scheduler = w, sched
	return nil
}

// parts is what Attach has made.
func (s *Service) parts() (m *standin.Memory, worker, scheduler *standin.Session, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.worker == nil {
		return nil, nil, nil, errors.New("not attached")
	}
	return s.memory, s.worker, s.scheduler, nil
}

func (s *Service) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gate.open()
	if s.worker != nil {
		_ = s.scheduler.Close()
		_ = s.worker.Close()
	}
	if s.table != nil {
		_ = s.table.Close()
	}
	for _, m := range []*standin.Memory{s.memory, s.scratch.memory} {
		if m != nil {
			_ = m.Close()
		}
	}
}

// BlocksArgs names blocks of the memory and what they hold or shall hold.
type BlocksArgs struct {
	Blocks []uint32
	Hashes []kvferry.Hash
}

// Write computes blocks: each gets the content that its hash stands for.
func (s *Service) Write(a BlocksArgs, _ *struct{}) error {
	m, _, _, err := s.parts()
	if err != nil {
		return err
	}
	for i, b := range a.Blocks {
		m.Write(b, a.Hashes[i])
	}
	return nil
}

// Scribble overwrites blocks with something else.
func (s *Service) Scribble(a BlocksArgs, _ *struct{}) error {
	m, _, _, err := s.parts()
	if err != nil {
		return err
	}
	for _, b := range a.Blocks {
		m.Scribble(b)
	}
	return nil
}

// Check counts bytes that are not what they should be.
func (s *Service) Check(a BlocksArgs, wrong *uint64) error {
	m, _, _, err := s.parts()
	if err != nil {
		return err
	}
	for i, b := range a.Blocks {
		*wrong += m.Wrong(b, a.Hashes[i])
	}
	return nil
}

// Written counts bytes that were written since the blocks were scribbled.
func (s *Service) Written(blocks []uint32, written *uint64) error {
	m, _, _, err := s.parts()
	if err != nil {
		return err
	}
	for _, b := range blocks {
		*written += m.Written(b)
	}
	return nil
}

// StoreArgs are Stores that are under way together.
type StoreArgs struct{ Batches []standin.StoreRequest }

// StoreReply sums them up.
type StoreReply struct {
	Stored, Present, Failed int // blocks
	Reason                  string
	Took                    time.Duration
}

// Store stores blocks and waits for all operations to end.
func (s *Service) Store(a StoreArgs, r *StoreReply) error {
	_, worker, _, err := s.parts()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	start := time.Now()
	operations := make([]*standin.Operation, len(a.Batches))
	for i, b := range a.Batches {
		if operations[i], err = worker.Store(b); err != nil {
			return err
		}
	}
	for i, o := range operations {
		end, err := o.Wait(ctx)
		if err != nil {
			return err
		}
		r.Stored += int(end.BlocksStored)
		r.Present += int(end.BlocksPresent)
		if end.Outcome != kvferryv1.Outcome_OUTCOME_COMMITTED {
			r.Failed += len(a.Batches[i].Hashes)
			r.Reason = end.Outcome.String() + ": " + end.Reason
		}
	}
	r.Took = time.Since(start)
	return nil
}

// LoadReply is a report, with the time from the request to the last byte in its place and checked.
type LoadReply struct {
	Report standin.LoadReport
	Took   time.Duration
	Error  string // why not all of it has an answer
}

// Load loads or accepts.
func (s *Service) Load(a standin.LoadRequest, r *LoadReply) error {
	_, worker, _, err := s.parts()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	start := time.Now()
	report, err := worker.Load(ctx, a)
	r.Took, r.Report = time.Since(start), *report
	if err != nil {
		r.Error = err.Error()
	}
	return nil
}

// MatchArgs asks for a prompt.
type MatchArgs struct {
	RequestID string
	Hashes    []kvferry.Hash
	LeaseMs   uint32
	Times     int // how often, one after the other; 0 is once
	Peers     []string
	ComputeUs uint32
}

// MatchReply has the blocks of the last answer, and how long each took.
type MatchReply struct {
	Blocks     uint32
	PeerBlocks uint32
	PeerReason string
	Took       []time.Duration
}

// Match matches on the scheduler session.
func (s *Service) Match(a MatchArgs, r *MatchReply) error {
	_, _, scheduler, err := s.parts()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	for range max(1, a.Times) {
		start := time.Now()
		m, err := scheduler.MatchPeers(ctx, a.RequestID, a.Hashes, a.LeaseMs, a.Peers, a.ComputeUs)
		if err != nil {
			return err
		}
		r.Took = append(r.Took, time.Since(start))
		r.Blocks, r.PeerBlocks, r.PeerReason = m.Blocks, m.PeerBlocks, m.PeerReason
	}
	return nil
}

// ReleaseLease gives leases back.
func (s *Service) ReleaseLease(requestID string, _ *struct{}) error {
	return s.scheduler.ReleaseLease(requestID)
}

// Offer offers on the scheduler session and answers the ticket.
func (s *Service) Offer(a standin.OfferRequest, ticket *[]byte) error {
	_, _, scheduler, err := s.parts()
	if err != nil {
		return err
	}
	*ticket, err = scheduler.Offer(a)
	return err
}

// CompleteArgs completes an open-ended offer.
type CompleteArgs struct {
	Offer  [16]byte
	Blocks []uint32
}

// Complete completes an open-ended offer.
func (s *Service) Complete(a CompleteArgs, _ *struct{}) error {
	_, _, scheduler, err := s.parts()
	if err != nil {
		return err
	}
	return scheduler.Complete(a.Offer, a.Blocks)
}

// EndOffer takes an offer back.
func (s *Service) EndOffer(offer [16]byte, _ *struct{}) error {
	_, _, scheduler, err := s.parts()
	if err != nil {
		return err
	}
	return scheduler.EndOffer(offer, "aborted")
}

// Served waits until the worker may use an offer's blocks again, and answers why.
func (s *Service) Served(offer [16]byte, reason *string) error {
	_, worker, _, err := s.parts()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	*reason, err = worker.Served(ctx, offer)
	return err
}

// Bump raises the generations of blocks that are about to be written.
func (s *Service) Bump(blocks []uint32, _ *struct{}) error {
	if _, _, _, err := s.parts(); err != nil {
		return err
	}
	s.table.Bump(blocks...)
	return nil
}
