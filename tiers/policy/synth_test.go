package policy

import (
	"math"
	"math/rand/v2"
	"slices"
)

// Traces made by code, each of a kind of load of its own, so that a policy is not judged by the one that it was made with.

// chainOf continues a chain by n blocks that nobody else has.
func chainOf(rng *rand.Rand, prefix []uint64, n int) []uint64 {
	out := slices.Clone(prefix)
	h := uint64(1)
	if len(out) > 0 {
		h = out[len(out)-1]
	}
	for range n {
		h = mix(h, rng.Uint64())
		out = append(out, h)
	}
	return out
}

// zipfPrompts: system prompts of 4 to 40 blocks, used by Zipf's law, each request with a tail of its own.
func zipfPrompts(seed uint64, requests int) []request {
	rng := rand.New(rand.NewPCG(seed, 1))
	z := rand.NewZipf(rng, 1.1, 4, 1999)
	prompts := make([][]uint64, 2000)
	for i := range prompts {
		prompts[i] = chainOf(rng, nil, 4+rng.IntN(37))
	}
	var out []request
	at := int64(1e9)
	for range requests {
		at += int64(rng.ExpFloat64() * 1e8)
		out = append(out, request{at: at, chain: chainOf(rng, prompts[z.Uint64()], 1+rng.IntN(12)), partial: true})
	}
	return out
}

// scan: the same documents in a ring, over and over, with a few that are used often.
func scan(seed uint64, requests int) []request {
	rng := rand.New(rand.NewPCG(seed, 2))
	docs := make([][]uint64, 400)
	for i := range docs {
		docs[i] = chainOf(rng, nil, 20+rng.IntN(20))
	}
	var out []request
	at := int64(1e9)
	next := 0
	for range requests {
		at += 1e8
		d := docs[rng.IntN(10)]
		if rng.IntN(4) > 0 {
			d = docs[10+next%390]
			next++
		}
		out = append(out, request{at: at, chain: d})
	}
	return out
}

// ring: documents in a ring that no LRU keeps, and among so many requests one for a prompt that is always the same.
func ring(seed uint64, requests, hot int) []request {
	rng := rand.New(rand.NewPCG(seed, 7))
	docs := make([][]uint64, 401)
	for i := range docs {
		docs[i] = chainOf(rng, nil, 20+rng.IntN(20))
	}
	var out []request
	for i := range requests {
		d := docs[1+i%400]
		if hot > 0 && rng.IntN(hot) == 0 {
			d = docs[0]
		}
		out = append(out, request{at: int64(i+1) * 1e8, chain: d})
	}
	return out
}

// chat: conversations that grow, think times exponential, each turn the last with one probability.
func chat(seed uint64, requests int) []request { return chatFrom(seed, requests, 1e9, 0.6, 90) }

func chatFrom(seed uint64, requests int, start int64, again, thinkS float64) []request {
	rng := rand.New(rand.NewPCG(seed, 3))
	var out []request
	at := start
	for len(out) < requests {
		at += int64(rng.ExpFloat64() * 6e8)
		t, c := at, chainOf(rng, nil, 1+int(math.Exp(rng.NormFloat64()+2)))
		for {
			out = append(out, request{at: t, chain: c, partial: true})
			if rng.Float64() > again {
				break
			}
			t += int64((5 + rng.ExpFloat64()*thinkS) * 1e9)
			c = chainOf(rng, c[:len(c)-1], 1+rng.IntN(4))
		}
	}
	slices.SortStableFunc(out, func(a, b request) int { return int(a.at/1e3 - b.at/1e3) })
	return out[:requests]
}

// quickChat and slowChat: long conversations of fast talkers, short ones of slow ones.
func quickChat(seed uint64, requests int) []request { return chatFrom(seed+77, requests, 1e9, 0.8, 20) }
func slowChat(seed uint64, requests int) []request {
	return chatFrom(seed+177, requests, 1e9, 0.5, 300)
}

// agents: a task asks again after seconds, many times, sometimes from an earlier step on, then never; all share tools' descriptions.
func agents(seed uint64, requests int) []request {
	rng := rand.New(rand.NewPCG(seed, 4))
	tools := make([][]uint64, 8)
	for i := range tools {
		tools[i] = chainOf(rng, nil, 10+rng.IntN(20))
	}
	var out []request
	at := int64(1e9)
	for len(out) < requests {
		at += int64(rng.ExpFloat64() * 8e9)
		t, c := at, chainOf(rng, tools[rng.IntN(8)], 2+rng.IntN(10))
		for range 3 + rng.IntN(30) {
			out = append(out, request{at: t, chain: c, partial: true})
			t += int64((1 + rng.ExpFloat64()*6) * 1e9)
			keep := len(c) - 1
			if rng.IntN(8) == 0 {
				keep = 10 + rng.IntN(keep-9)
			}
			c = chainOf(rng, c[:keep], 1+rng.IntN(5))
		}
	}
	slices.SortStableFunc(out, func(a, b request) int { return int(a.at/1e3 - b.at/1e3) })
	return out[:requests]
}

// phases: a chat, then prompts by Zipf's law, then agents, then a chat of another kind.
func phases(seed uint64, requests int) []request {
	n := requests / 4
	out := chat(seed, n)
	for i, part := range [][]request{zipfPrompts(seed, n), agents(seed, n), chatFrom(seed+1, n, 1e9, 0.8, 20)} {
		end := out[len(out)-1].at
		for _, r := range part {
			r.at += end
			for k := range r.chain {
				r.chain[k] = mix(r.chain[k], uint64(i+100))
			}
			out = append(out, r)
		}
	}
	return out
}

var synthetic = []struct {
	name string
	make func(seed uint64, requests int) []request
}{{"zipf", zipfPrompts}, {"scan", scan}, {"chat", chat}, {"quickChat", quickChat}, {"slowChat", slowChat}, {"agents", agents}, {"phases", phases}}
