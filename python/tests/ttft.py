"""scripts/bench-ttft: the time to the first token of a long prompt, recomputed, by way of the pools, direct, and overlapped with its computation.

Two engines of a tiny model on two nodes, chunked prefill; a third one without kvferry recomputes every prompt, and its tokens are compared. Every
measurement has a prompt of its own; a round has one of each kind, in changing order. Prints JSON; ends with 1 if a token differs.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

from engine import Engine
from nodes import TwoNodes
from prompts import prompts
from test_vllm_direct import transfer
from tiny_model import make_model

BLOCK = 32
KINDS = ("recomputed", "staged", "direct", "overlapped")
CHECKED_TOKENS = 8


class Bench:
    def __init__(self, nodes: TwoNodes, prefill_engine: Engine, decode: Engine, recompute: Engine):
        self.nodes, self.p, self.d, self.r = nodes, prefill_engine, decode, recompute
        self.seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.compute: list[float] = []  # of a prompt, on the prefill engine alone
        self.transfer: list[float] = []  # of a direct load
        self.differing = 0

    def measure(self, kind: str, prompt: list[int]) -> None:
        seconds = getattr(self, kind)(prompt)
        self.seconds[kind].append(seconds)
        if kind != "recomputed":
            # Of the decode engine with what it has got, which stays in its own cache.
            got, want = (e.run("complete", prompt=prompt, count=CHECKED_TOKENS) for e in (self.d, self.r))
            self.differing += got["tokens"] != want["tokens"]
        for engine in (self.p, self.d):
            engine.run("wait_stored")
            engine.run("run_out")
            engine.run("reset")
        self.r.run("reset")

    def recomputed(self, prompt: list[int]) -> float:
        began = time.monotonic()
        self.r.run("complete", prompt=prompt, count=1)
        return time.monotonic() - began

    def _one_after_the_other(self, prompt: list[int], direct: bool) -> float:
        for engine in (self.p, self.d):
            engine.run("hand_over", direct=direct)
        before = self.d.run("load_seconds")
        began = time.monotonic()
        params = self.p.run("complete", prompt=prompt, count=1, params={"do_remote_decode": True})["params"]
        computed = time.monotonic()
        del params["remote_prefill_cached_tokens"]  # vLLM would show this number as the decode engine's
        answer = self.d.run("complete", prompt=prompt, count=1, params=params)
        seconds = time.monotonic() - began
        assert answer["cached"] == len(prompt) // BLOCK * BLOCK, "the prompt was not handed over"
        if direct:
            self.compute.append(computed - began)
            self.transfer.append(self.d.run("load_seconds") - before)
        return seconds

    def staged(self, prompt: list[int]) -> float:
        return self._one_after_the_other(prompt, direct=False)

    def direct(self, prompt: list[int]) -> float:
        return self._one_after_the_other(prompt, direct=True)

    def overlapped(self, prompt: list[int]) -> float:
        for engine in (self.p, self.d):
            engine.run("hand_over", direct=True)
        first, second = transfer(self.nodes.a.address)
        began = time.monotonic()
        self.p.call("complete", prompt=prompt, count=1, params=first)
        answer = self.d.run("complete", prompt=prompt, count=1, params=second)
        seconds = time.monotonic() - began
        self.p.answer()
        assert answer["cached"] == len(prompt) // BLOCK * BLOCK, "the prompt was not handed over"
        return seconds

    def report(self, length: int, chunk: int) -> dict:
        median = {kind: statistics.median(values) for kind, values in self.seconds.items()}
        compute, moved = statistics.median(self.compute), statistics.median(self.transfer)
        bound = max(compute, moved) + compute * chunk / length
        return {
            "prompt_tokens": length,
            "chunk_tokens": chunk,
            "rounds": len(self.seconds["direct"]),
            "nodes": self.nodes.how,
            "load_average": os.getloadavg()[0],
            "seconds": {kind: round(s, 4) for kind, s in median.items()},
            "spread": {kind: [round(min(v), 4), round(max(v), 4)] for kind, v in self.seconds.items()},
            "compute_seconds": round(compute, 4),
            "transfer_seconds": round(moved, 4),
            "ratios": {
                "direct/staged": round(median["direct"] / median["staged"], 3),
                "overlapped/direct": round(median["overlapped"] / median["direct"], 3),
                "overlapped/staged": round(median["overlapped"] / median["staged"], 3),
                "overlapped/recomputed": round(median["overlapped"] / median["recomputed"], 3),
            },
            # max(compute, transfer) + one chunk
            "overlap_bound_seconds": round(bound, 4),
            "overlapped/bound": round(median["overlapped"] / bound, 3),
            "answers_that_differ": self.differing,
        }


def measure(nodes: TwoNodes, engines: tuple[Engine, Engine, Engine], options: argparse.Namespace, first_prompt: int) -> dict:
    bench = Bench(nodes, *engines)
    number = first_prompt
    for turn in range(options.rounds + 1):
        for k in range(len(KINDS)):
            number += 1
            bench.measure(KINDS[(k + turn) % len(KINDS)], prompts(number, count=1, length=options.tokens)[0])
        if turn == 0:  # the first of a kind takes longer
            bench = Bench(nodes, *engines)
        print(f"round {turn} of {options.rounds}", file=sys.stderr, flush=True)
    return bench.report(options.tokens, options.chunk)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    # A tiny model's KV is small. At 200 Mbit/s it takes about as long as computing it.
    parser.add_argument("--link-mbit", type=int, nargs="*", default=[0, 200], help="limits of the link between the nodes, 0 for none")
    options = parser.parse_args()
    shape = {"block_size": BLOCK, "max_num_batched_tokens": options.chunk, "max_model_len": 8000}
    out = {}
    with tempfile.TemporaryDirectory(prefix="kvferry-ttft-") as folder:
        directory = pathlib.Path(folder)
        model = make_model(directory / "model")
        with (
            TwoNodes(directory, pool="1GiB", watchdog_s=10) as nodes,
            Engine(model, directory, nodes.a, **shape) as p,
            Engine(model, directory, nodes.b, **shape) as d,
            Engine(model, directory, connector=None, **shape) as r,
        ):
            p.run("wait_attached")
            d.run("wait_attached")
            d.run("watch_loads")
            for mbit in options.link_mbit:
                if mbit and not nodes.limit(mbit):
                    print("the link between the nodes cannot be limited here", file=sys.stderr)
                    continue
                out[f"link of {mbit} Mbit/s" if mbit else "link as it is"] = measure(nodes, (p, d, r), options, 1000 + 1000 * mbit)
                if mbit:
                    nodes.limit(0)
    print(json.dumps(out, indent=2))
    return 1 if any(o["answers_that_differ"] for o in out.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
