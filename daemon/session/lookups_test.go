package session

import (
	"fmt"
	"testing"

	"github.com/kvferry/kvferry"
)

func (l *lookups) addNumber(i int, hashes []byte) {
	l.add(Lookup{RequestID: fmt.Sprint("r", i%10), Asked: i}, func() uint32 { return 16 }, hashes)
}

func TestLookupsAreRemembered(t *testing.T) {
	m := &Manager{}
	for i := range 25 {
		m.lookups.addNumber(i, nil)
	}
	got := m.Lookups("r3", 2)
	if len(got) != 2 || got[0].Asked != 23 || got[1].Asked != 13 {
		t.Errorf("the last two of r3: %+v", got)
	}
	for i := 25; i < 3*lookupsKept; i++ {
		m.lookups.addNumber(i, nil)
	}
	if got = m.Lookups("r3", 1<<20); len(m.lookups.ring) != lookupsKept || got[0].Asked != 3*lookupsKept-5 || len(got) < lookupsKept/10 || len(got) > lookupsKept/10+1 {
		t.Errorf("%d of r3, the last %d, in a ring of %d", len(got), got[0].Asked, len(m.lookups.ring))
	}
}

func TestFollowers(t *testing.T) {
	m := &Manager{}
	hashes := make([]byte, 4*kvferry.HashSize)
	m.lookups.addNumber(1, hashes) // before anybody follows
	a, err := m.Follow()
	if err != nil {
		t.Fatal(err)
	}
	b, _ := m.Follow()
	for range followersMax - 2 {
		_, _ = m.Follow()
	}
	if _, err := m.Follow(); err == nil {
		t.Error("one more follower than there may be")
	}
	m.lookups.addNumber(2, hashes)
	hashes[0] = 1 // as a buffer that is used again
	<-a.Wake()
	if got := a.Take(); len(got) != 1 || got[0].Asked != 2 || got[0].BlockTokens != 16 || got[0].Hashes[0] != 0 || len(got[0].Hashes) != len(hashes) {
		t.Errorf("%+v", got)
	}
	for i := range followerLookups + 10 { // b does not read
		m.lookups.addNumber(i, hashes)
	}
	if got := b.Take(); len(got) != followerLookups || got[0].Asked != 2 {
		t.Errorf("%d look-ups were kept", len(got))
	}
	m.lookups.addNumber(7, make([]byte, followerHashesMax+32)) // alone it may be so large
	m.lookups.addNumber(8, hashes)
	if got := b.Take(); len(got) != 1 || got[0].Dropped != 11 {
		t.Errorf("after 11 that were dropped: %d, %d dropped", len(got), got[0].Dropped)
	}
	a.Close()
	b.Close()
	a.Close()
	if n := m.lookups.following.Load(); n != followersMax-2 {
		t.Errorf("%d follow", n)
	}
}

func BenchmarkLookups(b *testing.B) {
	m := &Manager{}
	hashes := make([]byte, 8192*kvferry.HashSize)
	k := Lookup{RequestID: "request", Instance: "engine"}
	b.ReportAllocs()
	for b.Loop() {
		m.lookups.add(k, nil, hashes)
	}
}
