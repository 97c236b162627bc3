// Package sim runs the real parts of two nodes (pools, ledgers, movers, sessions, offers, fetchers) under a seeded scheduler and a simulated clock, and checks the invariants of
// design.md section 9 after every step. Everything is real but four things: local copies wait in their middle until the simulation lets them go on, the network between the nodes
// is one that delays, loses, repeats and cuts, processes are goroutines that die when it says so, and time is that of testing/synctest.
//
// What a seed does depends on the seed alone, as far as Go lets it: whatever is drawn outside of the scheduler's own goroutine is drawn from what it is drawn for (world.roll), and no two things are
// begun at one instant of simulated time. TestReplay watches over that; a failure that does not come again with its seed is one of the few where two things ended at one instant.
//
//	go test ./daemon/sim -args -seed N -seeds M
package sim
