"""Idle mode in real engines: blocks are stored when nobody used them for a while, and their HBM is given back."""

import contextlib
import os
import random
import subprocess
import time

import pytest
from daemon import wait_for
from engine import Engine
from prompts import cached, prompts, tokens
from tiny_model import TOKENS

pytestmark = pytest.mark.vllm

HITS = [896, 896, 1024]  # of the three prompts' tokens, in whole blocks
STORED = 23  # those 22 blocks, and one that an answer completes


def cpu_seconds(pid: int) -> float:
    """Of an engine's processes so far: the one that a test talks to, and those below it."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True).stdout
    parents = {int(p): int(parent) for p, parent in map(str.split, listed.splitlines())}
    ticks = 0
    for process in parents:
        ancestor = process
        while ancestor not in (0, pid):
            ancestor = parents.get(ancestor, 0)
        if ancestor == pid:
            with contextlib.suppress(FileNotFoundError), open(f"/proc/{process}/stat") as f:
                ticks += sum(map(int, f.read().rsplit(") ", 1)[1].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def cpu_share(engine: Engine, seconds: float) -> float:
    """Of one core, while nothing is asked of the engine."""
    used, since = cpu_seconds(engine.process.pid), time.monotonic()
    time.sleep(seconds)
    return (cpu_seconds(engine.process.pid) - used) / (time.monotonic() - since)


@pytest.mark.long
def test_an_engine_of_two_ranks_that_sleeps_has_its_idle_blocks_stored_and_gives_hbm_back(model, daemon, tmp_path):
    asked = prompts(41)
    # The engine's loop is in a process of its own, as with a server, and sleeps where it has nothing to do.
    idle = {"store": "idle", "hbm_idle_s": 5, "hbm_give_back": True}
    parallel = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    with Engine(model, tmp_path, daemon, idle, environment, **parallel) as engine:
        wait_for(lambda: daemon.attached(workers=2), 15, "both ranks are attached")
        began = time.monotonic()
        expected = tokens(engine.generate(asked))
        ended = time.monotonic()
        if ended - began < 4.5:
            assert daemon.blocks() == 0
        time.sleep(2)  # for so long vLLM's own processes look out for a next step
        waiting = cpu_share(engine, 2)
        wait_for(lambda: daemon.blocks() == STORED, 20, "stored, with no request or step in between")
        stored = time.monotonic() - ended
        assert 4 < stored
        resting = cpu_share(engine, 2)
        print(f"stored {stored:.1f} s after the last request; {waiting:.1%} of a core while waiting, {resting:.1%} afterwards")
        assert waiting < 0.1 and resting < 0.1
        # The next step, whatever it is for, gives the HBM back; the next one who asks has it from the pool.
        engine.generate([[5, 6, 7]], 1)
        again = engine.generate(asked)
        counted = engine.run("metrics")
        print(counted)
        assert tokens(again) == expected
        assert counted["given_back_blocks"] == STORED
        # Where two ranks and all else share two cores, a look-up may be too late, with eager stores as well.
        if not any(name.startswith("unasked_requests") for name in counted):
            assert cached(again) == HITS and counted["loaded_blocks"] == 2 * sum(HITS) // 128
            assert counted["idle_blocks:stored"] == STORED and counted["stored_blocks"] == 2 * STORED


def test_idle_blocks_are_stored_given_back_and_never_stored_under_an_old_hash(model, reference, daemon, tmp_path):
    rng = random.Random(42)
    shared = prompts(42, count=4, length=600)
    own = [[[rng.choice(TOKENS) for _ in range(300)] for _ in range(40)] for _ in shared]
    asked = [s + o[0] for s, o in zip(shared, own)]
    (one,) = prompts(43, count=1)
    # Requests need twenty times the memory; what is idle is read while it is written again, and before.
    idle = {"store": "idle", "hbm_idle_s": 600, "hbm_give_back": True}
    with Engine(
        model, tmp_path, daemon, idle, max_num_seqs=2, max_model_len=2048, num_gpu_blocks_override=24
    ) as engine:
        engine.run("wait_attached")
        engine.run("watch_idle")
        assert tokens(engine.generate([one])) == reference([one])
        engine.run("drain")
        assert engine.run("idle_blocks")["scheduler"] == 7 and daemon.blocks() == 0
        engine.run("pass_time", seconds=600)
        wait_for(lambda: daemon.blocks() == 7, 10, "stored, with no step in between")
        before = engine.run("pool_blocks")
        wait_for(lambda: engine.run("drain") or engine.run("idle_blocks")["scheduler"] == 0, 10, "the scheduler side knows")
        assert before == {"free": 23, "with_content": 7} and engine.run("pool_blocks") == {"free": 23, "with_content": 0}
        (again,) = engine.generate([one])
        assert [again["tokens"]] == reference([one]) and again["cached"] == 896
        assert engine.run("metrics")["loaded_blocks"] == engine.run("metrics")["given_back_blocks"] == 7

        engine.run("drain")
        engine.run("pass_time", seconds=1200)  # stores wait in the order in which they are due
        for seconds, gives_back in ((0, True), (0.3, False)):
            engine.run("set_idle", seconds=seconds, gives_back=gives_back)
            pressed = engine.run("press", seconds=3, seed=int(10 * seconds) + 1, shared=shared, own=own, at_once=2, count=4)
            assert set(pressed["reasons"]) == {"length"} and sum(pressed["reasons"].values()) == pressed["requests"]
        time.sleep(0.2)
        engine.run("drain")
        for prompt in asked:
            assert tokens(engine.generate([prompt])) == reference([prompt])
        counted, checks = engine.run("metrics"), engine.run("checks")
        print(checks, {k: v for k, v in counted.items() if k.startswith(("idle", "unstored", "stored", "present", "given"))})
        assert checks["loaded"] > 0 and checks["wrong"] == checks["unknown"] == 0
        assert counted["idle_blocks:reused"] > 0 and counted["idle_blocks:stored"] > 0
        assert "errors" not in " ".join(counted)
        engine.run("set_idle", seconds=0, gives_back=False)
        wait_for(lambda: engine.run("drain") or engine.run("idle_blocks")["scheduler"] == 0, 10, "nothing is left over")
        assert set(engine.run("idle_blocks").values()) == set(engine.run("leftovers").values()) == {0}
