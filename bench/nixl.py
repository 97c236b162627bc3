"""Moves blocks between two processes with NIXL (UCX back end), as one moves KV on a node without kvferry, and prints how long each round took.

Arguments: bytes of a block, bytes of a round, rounds. The reader's memory is larger than the caches; what came is compared in every round.
"""

import json
import multiprocessing
import os
import random
import sys
import time

import numpy
from nixl_cu12._api import nixl_agent, nixl_agent_config

WINDOWS = 6


def agent(name: str) -> nixl_agent:
    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


def memory(size: int) -> numpy.ndarray:
    m = numpy.empty(size, dtype=numpy.uint8)
    m[:] = 0  # touched
    return m


def owner(pipe, size: int) -> None:
    """Holds the memory that is read, and answers what it holds."""
    a = agent("owner")
    m = memory(size)
    m.view(numpy.uint64)[:] = numpy.arange(size // 8, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15)
    a.register_memory([(m.ctypes.data, size, 0, "")], mem_type="DRAM")
    pipe.send((a.get_agent_metadata(), m.ctypes.data))
    pipe.recv()


def descriptors(a: nixl_agent, base: int, offsets: list[int], block: int):
    return a.get_xfer_descs([(base + o, block, 0) for o in offsets], mem_type="DRAM")


def main() -> None:
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # NIXL logs to standard output
    block, window, rounds = (int(x) for x in sys.argv[1:4])
    size = WINDOWS * window
    multiprocessing.set_start_method("spawn")
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=owner, args=(theirs, size), daemon=True)
    process.start()
    a = agent("reader")
    m = memory(size)
    a.register_memory([(m.ctypes.data, size, 0, "")], mem_type="DRAM")
    if not ours.poll(60):
        sys.exit("the other process does not answer")
    metadata, base = ours.recv()
    name = a.add_remote_agent(metadata)
    rnd = random.Random(1)
    took, wrong = [], 0
    for n in range(rounds + 2):
        at = (n % WINDOWS) * window
        offsets = [at + i * block for i in range(window // block)]
        source = offsets[:]
        rnd.shuffle(source)
        start = time.perf_counter_ns()
        handle = a.initialize_xfer("READ", descriptors(a, m.ctypes.data, offsets, block), descriptors(a, base, source, block), name, b"")
        state = a.transfer(handle)
        deadline = time.monotonic() + 30
        while state not in ("DONE", "ERR") and time.monotonic() < deadline:
            state = a.check_xfer_state(handle)
        if n >= 2:
            took.append(time.perf_counter_ns() - start)
        if state != "DONE":
            sys.exit(f"transfer is {state}")
        a.release_xfer_handle(handle)
        got = m[at : at + window].view(numpy.uint64).reshape(-1, block // 8)
        want = (numpy.array(source, dtype=numpy.uint64) // numpy.uint64(8))[:, None] + numpy.arange(block // 8, dtype=numpy.uint64)
        wrong += int((got != want * numpy.uint64(0x9E3779B97F4A7C15)).sum())
    ours.send("end")
    process.join(10)
    json.dump({"took_ns": took, "wrong": wrong}, answer)
    answer.close()


if __name__ == "__main__":
    main()
