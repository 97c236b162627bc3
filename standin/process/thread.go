package process

import (
	"runtime"
	"sync"
)

// A child with Pdeathsig dies when the thread that started it ends. So one thread that never ends starts them all.
var starter = sync.OnceValue(func() chan func() {
	work := make(chan func())
	go func() {
		runtime.LockOSThread()
		for f := range work {
			f()
		}
	}()
	return work
})

func onThread(f func() error) error {
	done := make(chan error, 1)
	starter() <- func() { done <- f() }
	return <-done
}
