// Package nvme keeps slots on a drive: a preallocated file with a superblock, slabs of equally long slots, beside the slots of a slab the table of their
// headers, and a log through which headers come there. WIRE.md ("Drive file") gives the bytes. It is the only code that touches disks.
//
// A Drive owns its file, the lock on it, and what is written when. The ledger (package tiers) decides which slot holds what: under its mutex it calls
// the methods of geometry (FormatSlab, FreeSlab, Fill, Clear), which change memory alone and note what has to be changed on the drive. Movers call Write, Read
// and Flush, from any number of goroutines. Each slot has one user at a time: that is the caller's to see to.
//
// The order on the drive is what keeps wrong bytes away, at a crash at any moment:
//
//	(1) what was noted before the batch (tombstones, slab headers)   sync
//	(2) payloads                                                     sync
//	(3) headers                                                      sync, and only now a Write has succeeded
//
// So a slot's old header is dead before its payload is overwritten, and a header is there only after its payload. Concurrent batches share syncs: one that
// began after a batch's writes ended counts for it, and a sync carries what was noted meanwhile, so that (1) is mostly done before it is needed.
//
// After a failed sync nothing that was written since the one before is known to be there, and the kernel forgets it (what it could not write counts as
// clean). So every batch that has written since then fails, also one whose own sync succeeds; its headers are noted as to be killed, and that, with all other
// noted changes, must succeed before anything else is written. Flush is the probe: when it succeeds, the drive's state is known again.
//
// Headers and tombstones are written to the log (log.go), which is what makes them durable; in their tables they come later, many at a time.
//
// Memory: two bits a slot, and a few MiB of headers on their way from the log to their tables. Adopting a file brings in place what the log says, and reads
// the tables.
package nvme
