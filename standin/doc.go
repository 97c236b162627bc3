// Package standin stands in for an inference engine: it attaches to the daemon with real shared memory, stores blocks of it, loads and accepts blocks into
// it, matches and offers prompts. It does what the Python connector does, in Go, for the demo, the benchmarks and the tests that kill things.
//
// A Session is one process's attachment and safe for concurrent use. Every wait ends with the context, the operation's deadline, or the session.
// What the package does not do: decide anything. When to store, what to load and where to put it is its user's.
package standin
