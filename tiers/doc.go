// Package tiers is the ledger: which block lies in which slot of which tier, who leases it, which slots are pinned by transfers, and what leaves when room is needed.
//
// It plans and moves no byte: a caller begins fills, has the bytes copied, and commits or aborts. It owns the index, the lease table and the slots' state machine; the
// slots themselves belong to a Slots (package tiers/pool). Time is passed in. A Ledger is safe for concurrent use; every method holds its one mutex and none of them blocks on anything else.
package tiers
