// Package replay runs a trace of requests through the real ledger and a policy of leaving, with a clock of its own, and tells what was found where. Beside it, for the same room, it tells what LRU and
// what the offline optimum would have found.
//
// It copies no byte: what the ledger plans is committed at once, as if memory and drives were infinitely fast. A Trace is read once and never modified; runs of it may go on side by side.
package replay
