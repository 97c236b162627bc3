// Package kvferry holds the words that all parts of kvferry share: block hashes, space ids, tiers, regions, segments and
// traffic classes. It owns no state, imports nothing of this module and does no I/O. Values of its types are safe to copy.
//
// ARCHITECTURE.md tells how the parts fit together.
package kvferry
