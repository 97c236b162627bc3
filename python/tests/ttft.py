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
from test_vllm_smoke import prefill
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
            (got,) = self.d.generate([prompt], CHECKED_TOKENS)
            (want,) = self.r.generate([prompt], CHECKED_TOKENS)
            self.differing += got["tokens"] != want["tokens"]
        for engine in (self.p, self.d):
            engine.run("wait_stored")
            engine.run("run_out")
            engine.run("reset")
        self.r.run("reset")

    def recomputed(self, prompt: list[int]) -> float:
        began = time.monotonic()
        self.r.generate([prompt], 1)
        return time.monotonic() - began

    def _one_after_the_other(self, prompt: list[int], direct: bool) -> float:
        for engine in (self.p, self.d):
            engine.run("hand_over", direct=direct)
        before = self.d.run("load_seconds")
        began = time.monotonic()
        params = prefill(self.p, prompt)
        computed = time.monotonic()
        (answer,) = self.d.generate([prompt], 1, params=params)
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
        self.p.call("generate", prompts=[prompt], count=1, params=first)
        (answer,) = self.d.generate([prompt], 1, params=second)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--link-mbit", type=int, default=0, help="limit the link between the nodes (needs network namespaces and tc)")
    options = parser.parse_args()
    shape = {"block_size": BLOCK, "max_num_batched_tokens": options.chunk, "max_model_len": 8000}
    with tempfile.TemporaryDirectory(prefix="kvferry-ttft-") as folder:
        directory = pathlib.Path(folder)
        model = make_model(directory / "model")
        with (
            TwoNodes(directory, pool="768MiB", watchdog_s=10) as nodes,
            Engine(model, directory, nodes.a, **shape) as p,
            Engine(model, directory, nodes.b, **shape) as d,
            Engine(model, directory, connector=None, **shape) as r,
        ):
            if options.link_mbit and not nodes.limit(options.link_mbit):
                parser.error("--link-mbit: the link between the nodes cannot be limited here")
            p.run("wait_attached")
            d.run("wait_attached")
            bench = Bench(nodes, p, d, r)
            number = 0
            for turn in range(options.rounds + 1):
                for k in range(len(KINDS)):
                    number += 1
                    kind = KINDS[(k + turn) % len(KINDS)]
                    bench.measure(kind, prompts(1000 + number, count=1, length=options.tokens)[0])
                if turn == 0:  # the first of a kind takes longer
                    bench = Bench(nodes, p, d, r)
                print(f"round {turn} of {options.rounds}", file=sys.stderr, flush=True)
            out = bench.report(options.tokens, options.chunk)
            out["link_mbit"] = options.link_mbit or None
    print(json.dumps(out, indent=2))
    return 1 if out["answers_that_differ"] else 0


if __name__ == "__main__":
    sys.exit(main())
