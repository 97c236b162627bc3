package process

import (
	"syscall"
	"testing"
	"time"

	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
)

var (
	everyWay  = []way{pooled, pulled, direct, lent}
	remoteWay = []way{pooled, pulled, direct}
)

// claimLease is the daemon's: what nobody renews ends after it.
const claimLease = 10 * time.Second

// dataStall is how long a connection of the data protocol may stand still, whose client has gone without a word. What it has asked for renews its claim until then.
const dataStall = 5 * time.Second

// The prefill worker is killed: what it has offered is read as long as that is safe, and what is not is missing.
func TestPrefillWorkerKilled(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for _, w := range everyWay { // first without any trouble: the rig proves itself
		h := r.offered(w).load()
		h.all()
		h.served(time.Second, "done")
		h.once()
	}
	r.nothingHeld(time.Second)

	for _, w := range everyWay {
		h := r.offered(w)
		r.prefill.Kill()
		r.until("the session is closed", time.Second, func() bool { s, err := r.a.Status(t.Context()); return err == nil && s.Schedulers == 1 })
		h.load().none()
		r.prefill = r.again("prefill", r.a)
	}
	r.nothingHeld(time.Second)

	fast := r.slow()
	for _, w := range remoteWay {
		h := r.offered(w).load().under()
		r.prefill.Kill()
		h.end()
		r.prefill = r.again("prefill", r.a)
		h.untouched()
	}
	fast()
	h := r.held(lent)
	r.prefill.Kill()
	r.must(r.near.Go(t.Context()))
	h.end()
	r.nothingHeld(time.Second)
}

// held is a handoff whose decode worker knows where its blocks are and has not begun to copy them.
func (r *rig) held(w way) *handoff {
	r.Helper()
	h := r.offered(w)
	r.must(h.to.Hold(r.Context()))
	h.load()
	r.must(h.to.Held(r.Context()))
	return h
}

// under is a handoff in mid-transfer, over a slow link or before the decode worker's copy.
func (r *rig) under(w way) *handoff {
	r.Helper()
	if w == lent {
		return r.held(w)
	}
	return r.offered(w).load().under()
}

// everyUnder are handoffs in mid-transfer, one of each way between nodes, over a slow link.
func (r *rig) everyUnder() (all []*handoff) {
	r.Helper()
	for _, w := range remoteWay {
		all = append(all, r.offered(w).load())
	}
	return append(all[:2:2], all[2].under())
}

// The decode worker is killed in mid-transfer: nobody else gets the prompt, the same instance does when it is back, and when it does not come back the prefill worker has its blocks after the
// claim's lease.
func TestDecodeWorkerKilled(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.lifetime = time.Minute
	other, beside := r.worker("other", r.b), r.worker("beside", r.a)
	fast := r.slow()
	kill := func(w way) *handoff {
		h := r.under(w)
		h.to.Kill()
		h.lost()
		if w == lent {
			r.near = r.again("near", r.a)
			h.to = r.near
		} else {
			r.far = r.again("far", r.b)
			h.to = r.far
		}
		return h
	}
	for _, w := range everyWay {
		h := kill(w)
		stranger := other
		if w == lent {
			stranger = beside
		}
		if got := h.again(stranger).load().end(); got.Report.Loaded == promptBlocks || (w >= direct && got.Report.Loaded > 0) { // what came by the pool is there for everybody
			t.Errorf("%v: another instance got %d blocks", w, got.Report.Loaded)
		}
		h.again(h.to).load().all()
		h.served(time.Second, "done")
		h.once()
	}
	var left []*handoff
	for _, w := range everyWay {
		left = append(left, kill(w))
	}
	fast()
	for _, h := range left {
		h.served(claimLease+time.Second, "not claimed again")
		h.once()
	}
	r.nothingHeld(claimLease + time.Second)
}

// The prefill daemon is killed in mid-transfer, or frozen: the decode side knows soon what is missing, and when the daemon is back it serves again, but no ticket from before.
func TestPrefillDaemonKilled(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	back := func() {
		r.a = r.node(r.a.NodeConfig)
		r.attach(r.prefill, r.a)
		r.attach(r.near, r.a)
	}
	before := r.offered(pooled)
	fast := r.slow()
	under := r.everyUnder()
	r.a.Kill()
	for _, h := range under {
		if got := h.answer(3 * time.Second); got.err != nil || got.Report.Loaded == promptBlocks {
			t.Errorf("%v: %+v %v", h.way, got.Report, got.err)
		}
	}
	fast()
	back()
	before.load().none()
	r.recovers(remoteWay...)
	for _, h := range under {
		h.untouched()
	}

	h := r.held(lent)
	r.a.Kill()
	r.must(r.near.Go(t.Context()))
	h.end()
	back()
	r.recovers(lent)
	h.untouched()
	r.nothingHeld(time.Second)

	fast = r.slow()
	under = r.everyUnder()
	r.must(r.a.Freeze())
	for _, h := range under {
		if got := h.end(); got.err != nil || got.Report.Loaded == promptBlocks {
			t.Errorf("frozen, %v: %+v %v", h.way, got.Report, got.err)
		}
	}
	r.must(r.a.Thaw())
	fast()
	r.recovers(remoteWay...)
	for _, h := range under {
		h.untouched()
	}
	r.nothingHeld(claimLease + dataStall + time.Second)
}

// recovers waits until handoffs succeed again, which takes as long as the peer's circuit is open.
func (r *rig) recovers(ways ...way) {
	r.Helper()
	for _, w := range ways {
		r.until("handoffs succeed again", 10*time.Second, func() bool { return r.offered(w).load().end().Report.Loaded == promptBlocks })
	}
	if s, err := r.b.Status(r.Context()); err != nil || len(s.Problems) > 0 {
		r.Errorf("the decode node has problems: %v %v", s.GetProblems(), err)
	}
}

// The decode daemon is killed in mid-transfer: its worker has its memory back at once, and the prefill worker after the claim's lease.
func TestDecodeDaemonKilled(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.lifetime = time.Minute
	fast := r.slow()
	under := r.everyUnder()
	pid, err := r.b.DaemonPid()
	r.must(err)
	r.must(syscall.Kill(pid, syscall.SIGKILL))
	for _, h := range under {
		if got := h.answer(3 * time.Second); got.err == nil {
			t.Errorf("%v: a Load of a dead daemon has succeeded: %+v", h.way, got.Report)
		}
		h.untouched()
	}
	r.must(r.b.Ready(t.Context()))
	r.attach(r.far, r.b)
	fast()
	r.recovers(remoteWay...)
	for _, h := range under {
		h.untouched()
		h.served(claimLease+dataStall+time.Second, "not claimed again")
		h.once()
	}
	r.nothingHeld(claimLease + time.Second)
}

// A daemon that is stopped in order in mid-transfer lets it finish, on either side.
func TestStoppedInOrder(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.deadline = 2 * deadline // all of it has to come, over a slow link
	for _, n := range []**Node{&r.a, &r.b} {
		fast := r.slow()
		under := r.everyUnder()
		stopped := make(chan struct{})
		go func() {
			(*n).Stop()
			close(stopped)
		}()
		for _, h := range under {
			h.all()
			if n == &r.b { // with its own daemon the prefill worker's session ends, which says the same
				h.served(time.Second, "done")
			}
		}
		<-stopped
		if got := (*n).Ended(); got != "ended (exit code 0)" {
			t.Error(got)
		}
		fast()
		*n = r.node((*n).NodeConfig)
		if *n == r.a {
			r.attach(r.prefill, r.a)
			r.attach(r.near, r.a)
		} else {
			r.attach(r.far, r.b)
		}
		r.recovers(everyWay...)
		for _, h := range under {
			h.untouched()
		}
	}
	r.nothingHeld(time.Second)
}

// The decode daemon is frozen while it writes into its worker's memory: the worker has it back when the watchdog has killed the daemon, and not before, although it gives the Load up earlier.
func TestDecodeDaemonFrozen(t *testing.T) {
	t.Parallel()
	const patient = 5 * time.Second
	r := newRig(t, func(_, b *NodeConfig) { b.Supervise = patient })
	r.deadline = 1500 * time.Millisecond
	fast := r.slow()
	under := r.everyUnder()
	pid, err := r.b.DaemonPid()
	r.must(err)
	r.must(r.b.Freeze())
	frozen := time.Now()
	got := under[2].answer(patient + 2*time.Second)
	if took := time.Since(frozen); running(pid) || took > patient+time.Second || got.took < r.deadline {
		t.Errorf("the worker had its memory back %v after the daemon was frozen, with it still there: %v", took, running(pid))
	}
	if got.err == nil {
		t.Errorf("a Load of a frozen daemon has succeeded: %+v", got.Report)
	}
	for _, h := range under[:2] { // those have lent nothing
		if got := h.answer(r.deadline + 3*time.Second); got.err == nil {
			t.Errorf("%v: a Load of a frozen daemon has succeeded: %+v", h.way, got.Report)
		}
	}
	r.must(r.b.Ready(t.Context()))
	r.attach(r.far, r.b)
	fast()
	r.deadline = deadline
	r.recovers(direct)
	for _, h := range under {
		h.untouched()
	}
	r.nothingHeld(claimLease + dataStall + time.Second)
}

// A daemon that no watchdog would kill writes into no worker's memory by itself. One that was told to does, and then its worker waits for it as long as it takes.
func TestFrozenWithoutAWatchdog(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(_, b *NodeConfig) { b.Supervise = 0 })
	h := r.offered(direct).load()
	if got := h.end(); got.Report.Loaded != promptBlocks || got.Report.Delivered > 0 {
		t.Fatalf("without a watchdog: %+v", got.Report)
	}
	r.b.Stop()
	r.b.Extra += "handoff: {direct: on}\n"
	r.b = r.node(r.b.NodeConfig)
	r.attach(r.far, r.b)
	fast := r.slow()
	h = r.under(direct)
	r.must(r.b.Freeze())
	select {
	case got := <-h.replies:
		t.Fatalf("the worker had its memory back while a frozen daemon could write there: %v after %v", got.err, got.took)
	case <-time.After(deadline + 3*time.Second): // nothing may come
	}
	r.must(r.b.Thaw())
	h.answer(deadline + 5*time.Second)
	fast()
	r.recovers(direct)
	h.untouched()
	r.nothingHeld(claimLease + time.Second)
}

// The link is cut in mid-transfer, or packets are lost without a reset: the decode side ends by its deadline, and when the link is back the peer's circuit closes by itself.
func TestLinkFails(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.slow()()
	for _, f := range []struct {
		name       string
		cut, heals func() error
	}{{"down", r.net.Down, r.net.Up}, {"dropped", r.net.Drop, r.net.Restore}} {
		fast := r.slow()
		under := r.everyUnder()
		r.must(f.cut())
		for _, h := range under {
			if got := h.answer(4 * time.Second); got.err != nil || got.Report.Loaded == promptBlocks {
				t.Errorf("%s, %v: %+v %v", f.name, h.way, got.Report, got.err)
			}
		}
		r.offered(pooled).load().none()
		r.must(f.heals())
		fast()
		r.recovers(remoteWay...)
		for _, h := range under {
			h.untouched()
		}
	}
	r.nothingHeld(claimLease + dataStall + time.Second)
}

// The prefill engine uses blocks again that it has offered: they are missing, and never wrong.
func TestReusedEarly(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	reuse := func(h *handoff, from, to int) {
		r.must(r.prefill.Bump(t.Context(), h.source[from:to]))
		r.must(r.prefill.Scribble(t.Context(), h.source[from:to]))
	}
	for _, w := range []way{pulled, direct, lent} {
		h := r.offered(w)
		reuse(h, 20, 30)
		if got := h.load().end(); got.Report.Loaded != promptBlocks-10 || got.Report.Status[25] == kvferryv1.BlockStatus_BLOCK_STATUS_READY {
			t.Errorf("%v, before it is claimed: %+v %v", w, got.Report, got.err)
		}
		h.served(time.Second, "done")
	}
	fast := r.slow()
	for _, w := range []way{pulled, direct, lent} {
		h := r.under(w)
		reuse(h, 0, promptBlocks)
		if w == lent {
			r.must(r.near.Go(t.Context()))
		}
		if got := h.end(); got.err != nil || got.Report.Loaded > promptBlocks*9/10 {
			t.Errorf("%v, in mid-transfer: %+v %v", w, got.Report, got.err)
		}
		h.served(time.Second, "done")
		h.once()
		h.untouched()
	}
	fast()
	r.nothingHeld(time.Second)
}
