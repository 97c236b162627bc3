package session

import (
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/handoff"
	"github.com/kvferry/kvferry/tiers/policy"
)

// Role is what a process is in its engine.
type Role uint8

// The roles.
const (
	Worker Role = iota + 1
	Scheduler
)

// Credentials are those that the kernel tells of the process at the other end of a unix socket.
type Credentials struct {
	PID int32
	UID uint32
}

// RegionKind is how lent memory came to be.
type RegionKind uint8

// The kinds.
const (
	SharedHost RegionKind = iota + 1
	Staging
)

// RegionSpec declares memory that a worker will lend.
type RegionSpec struct {
	ID     uint32
	Kind   RegionKind
	Bytes  uint64
	Blocks uint32
	Planes []kvferry.Plane
	// Writable: the daemon may write into blocks that an Accept lends.
	Writable bool
}

// Hello opens a session.
type Hello struct {
	WireVersion    uint32
	Role           Role
	Instance       string
	Rank, Ranks    uint32
	Space          kvferry.Space
	Regions        []RegionSpec
	Engine         string
	EngineVersion  string
	ServingAddress string
	Tenant         string
	EngineStart    string // the same in all processes of one start of the engine
	Generations    uint32 // of a scheduler: entries of its block generation table; 0: it has none
	ReadsLent      bool   // of a worker: it can copy from other workers' memory
}

// Store asks for blocks of a region to be copied into the pool. Hashes and Parents are packed.
type Store struct {
	Operation uint64
	Word      uint32
	Space     kvferry.SpaceID
	RequestID string
	Region    uint32
	BlockIDs  []uint32
	Hashes    []byte
	Parents   []byte
	Deadline  time.Duration
	Retention policy.Retention
}

// Load asks where blocks lie. With a Ticket, those that are not here are fetched from where it points.
type Load struct {
	Operation uint64
	Word      uint32
	Space     kvferry.SpaceID
	RequestID string
	Hashes    []byte
	Deadline  time.Duration
	Ticket    *handoff.Ticket
	Region    uint32   // of BlockIDs
	BlockIDs  []uint32 // that the daemon may write; with a Ticket only. Nil: none
}

// Offer registers a prompt's KV to be claimed.
type Offer struct {
	ID        [16]byte
	Secret    [16]byte
	Space     kvferry.SpaceID
	RequestID string
	Hashes    []byte
	Tokens    uint32
	Lifetime  time.Duration
	OpenEnded bool
	Blocks    handoff.LentBlocks
}

// Match asks for the longest resident prefix.
type Match struct {
	RequestID string
	Space     kvferry.SpaceID
	Hashes    []byte
	Lease     time.Duration
	Peers     []string      // Peer services of nodes that may have more, likeliest first
	Compute   time.Duration // of a block, as the engine measured it; 0: not known
}

// MatchResult answers a Match.
type MatchResult struct {
	Blocks  int
	Lease   time.Duration // 0: nothing was leased
	NVMe    int           // of the blocks, those that a Load brings up from a drive first
	Restore time.Duration // estimate for loading them; 0 while no copy has been measured
	Peer    int           // of the blocks, those that a Load fetches from a peer first: the last
	Fetch   time.Duration // estimate for that
	Reason  string        // why peers' blocks count or do not; empty: none was asked
}

// Source is where a block that is Ready is to be had. The numbers are those of the protocol.
type Source uint8

// The sources.
const (
	InPool Source = iota
	InLent
	Delivered
)

func (s Source) String() string {
	return [...]string{"pool", "lent", "delivered"}[min(int(s), 2)]
}

// BlockStatus is the answer to a block of a Load. The numbers are those of the protocol.
type BlockStatus uint8

// The statuses.
const (
	Ready   BlockStatus = iota + 1
	Miss                // not resident
	Busy                // no room or no queue place
	Broken              // peer, network or checksum failure
	Expired             // the deadline came first
)

func (s BlockStatus) String() string {
	return [...]string{"none", "ready", "miss", "busy", "failed", "expired"}[min(int(s), 5)]
}

// statusOf is what a fetch's result is to a Load.
func statusOf(s handoff.FetchStatus) BlockStatus {
	switch s {
	case handoff.Fetched, handoff.Delivered, handoff.Readable:
		return Ready
	case handoff.NotThere:
		return Miss
	case handoff.NoRoom:
		return Busy
	case handoff.TooLate:
		return Expired
	}
	return Broken
}

// Outcome is how an operation ended. The numbers are those of the protocol.
type Outcome uint32

// The outcomes.
const (
	OutcomeCommitted Outcome = iota + 1
	OutcomeRevoked
	OutcomeFailed
	OutcomeExpired
	OutcomeBusy
	OutcomeRejected
)

func (o Outcome) String() string {
	return [...]string{"none", "committed", "revoked", "failed", "expired", "busy", "rejected"}[min(int(o), 6)]
}

// Event is what a session tells its process: one of the types below.
type Event interface{ event() }

// Attached: operations may begin.
type Attached struct{}

// OperationEnd: ended and quiet; the word may be used again.
type OperationEnd struct {
	Operation       uint64
	Outcome         Outcome
	Reason          string
	Stored, Present uint32
}

// LoadResult answers the blocks of a Load from First on. The lists run beside each other.
type LoadResult struct {
	Operation     uint64
	First         uint32
	Status        []byte // BlockStatus
	Offsets       []uint64
	HeaderOffsets []uint64
	Generations   []uint64
	CRC32C        []uint32
	ShardBytes    uint64
	Last          bool
	Source        []byte    // nil: all InPool
	Lent          *LentView // where blocks are InLent
}

// LentView is what a process needs to map another worker's memory.
type LentView struct {
	Handle      uint64
	Token       [16]byte
	Bytes       uint64
	Blocks      uint32
	Planes      []kvferry.Plane
	Generations uint32
}

// OfferServed: nobody reads the worker's blocks for this offer any more.
type OfferServed struct {
	ID     [16]byte
	Reason string
}

// LentGone: whoever has mapped this memory unmaps it.
type LentGone struct{ Handle uint64 }

// SpaceReady answers UseSpace.
type SpaceReady struct {
	Sequence uint32
	Space    kvferry.SpaceID
}

// Refused answers a message that has no operation.
type Refused struct{ Err error }

// Draining: the daemon will stop.
type Draining struct{ Within time.Duration }

func (Attached) event()     {}
func (OperationEnd) event() {}
func (LoadResult) event()   {}
func (SpaceReady) event()   {}
func (Refused) event()      {}
func (Draining) event()     {}
func (OfferServed) event()  {}
func (LentGone) event()     {}
