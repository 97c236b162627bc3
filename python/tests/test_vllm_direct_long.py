"""What can go wrong in the middle of a handoff out of or into the engines' own memory: scripts/test-vllm --long."""

import contextlib
import os
import random
import signal
import time
import urllib.request

import pytest
from api_server import ApiServer, complete, post
from daemon import Daemon, wait_for
from engine import Engine
from nodes import TwoNodes
from prompts import prompts, tokens
from proxy import Proxy
from test_vllm_direct import BLOCK, PATIENT_LOOKUPS, SMALL, Free, both, full, transfer
from test_vllm_smoke import prefill

pytestmark = [pytest.mark.vllm, pytest.mark.long]

STEP_S_MAX = 2.0


def finish(engine: Engine) -> list[list[int]]:
    """The tokens of the requests that were submitted; no step may have waited for anything."""
    out = engine.run("run_out", timeout_s=90)
    assert out["longest_step"] < STEP_S_MAX
    return list(out["tokens"].values())


def begin(engine: Engine, prompt: list[int], params: dict) -> None:
    engine.run("submit", request_id="r", prompt=prompt, count=12, params=params)
    engine.run("step_until_loading")


@pytest.mark.parametrize("spilled", ["to the pool", "to nowhere"])
def test_source_blocks_are_written_again_before_they_are_read(model, reference, daemon, tmp_path, spilled):
    (prompt,) = prompts(50, count=1, length=500)
    small = {**SMALL, "num_gpu_blocks_override": 40, "max_model_len": 1024}
    with (
        Engine(model, tmp_path, daemon, {"spill_ms": 300}, **small) as p,
        Engine(model, tmp_path, daemon, **SMALL) as d,
    ):
        p.run("wait_attached")
        d.run("wait_attached")
        free = Free(p, d)
        if spilled == "to nowhere":
            p.run("refuse_stores")
        params = prefill(p, prompt)
        d.run("hold_loads")
        begin(d, prompt, params)
        d.run("step_for", seconds=0.3)
        others = prompts(51, count=3, length=900)
        assert tokens(p.generate(others)) == reference(others)
        d.run("let_loads_go")
        assert finish(d) == reference([prompt])
        counted = d.run("metrics")
        assert counted["asked_again_blocks:generation"] == full(prompt) // BLOCK
        assert counted.get("source_blocks:lent", 0) == 0
        if spilled == "to nowhere":
            assert counted["unloaded_blocks:generation"] == full(prompt) // BLOCK
        else:
            assert counted["source_blocks:pool"] == full(prompt) // BLOCK
        free.check()


def test_holds_give_way_to_requests(model, daemon, tmp_path):
    """Prompts are handed over faster than anybody takes them, in memory that has room for three."""
    small = {**SMALL, "num_gpu_blocks_override": 60, "max_model_len": 1024, "max_num_seqs": 2}
    with Engine(model, tmp_path, daemon, {"spill_ms": 60000, "spill_percent": 90}, **small) as p:
        p.run("wait_attached")
        free = Free(p)
        began = time.monotonic()
        for n in range(8):
            prefill(p, prompts(52 + n, count=1, length=550)[0])
        assert time.monotonic() - began < 30
        counted = p.run("metrics")
        assert counted["lent_prompts:pressure"] + counted.get("lent_prompts:share", 0) >= 5
        p.run("let_holds_go")
        free.check()


@pytest.fixture
def pair(model, tmp_path):
    with (
        TwoNodes(tmp_path, watchdog_s=2) as nodes,
        Engine(model, tmp_path, nodes.a, **SMALL) as p,
        Engine(model, tmp_path, nodes.b, **SMALL) as d,
    ):
        p.run("wait_attached")
        d.run("wait_attached")
        yield nodes, p, d, Free(d)


def begin_slowly(nodes: TwoNodes, d: Engine, prompt: list[int], params: dict) -> None:
    """Half a second into a transfer of three."""
    if not nodes.limit(10):
        pytest.skip("the link between the nodes cannot be limited here")
    begin(d, prompt, params)
    d.run("step_for", seconds=0.5)
    assert d.run("unended")["loads"] == 1


def test_prefill_engine_killed_before_and_during_the_transfer(reference, pair):
    nodes, p, d, free = pair
    asked = prompts(60)
    during, before = prefill(p, asked[0]), prefill(p, asked[1])
    begin_slowly(nodes, d, asked[0], during)
    p.close()
    assert finish(d) == reference([asked[0]])
    assert tokens(d.generate([asked[1]], params=before)) == reference([asked[1]])
    free.check()
    wait_for(nodes.a.gone, 15, "nothing of the killed engine is left")


def test_decode_engine_killed_in_mid_transfer(reference, pair):
    nodes, p, d, _ = pair
    (prompt,) = prompts(61, count=1)
    held = Free(p)
    params = prefill(p, prompt)
    begin_slowly(nodes, d, prompt, params)
    d.close()
    wait_for(nodes.b.gone, 15, "nothing of the killed engine is left")
    held.check()
    assert tokens(p.generate([prompt])) == reference([prompt])


def test_decode_daemon_frozen_in_mid_transfer(reference, pair):
    """Its watchdog kills it; until then the engine's blocks are not its own, and it goes on with other requests."""
    nodes, p, d, free = pair
    asked = prompts(62)
    params = prefill(p, asked[0])
    begin_slowly(nodes, d, asked[0], params)
    nodes.b.freeze()
    frozen = time.monotonic()
    assert finish(d) == reference([asked[0]])
    assert 1 < time.monotonic() - frozen < 20
    nodes.limit(0)
    d.run("wait_attached")
    assert tokens(d.generate([asked[1]], params=prefill(p, asked[1]))) == reference([asked[1]])
    free.check()


def test_aborted_in_mid_transfer(reference, pair):
    nodes, p, d, free = pair
    asked = prompts(63)
    params = prefill(p, asked[0])
    begin_slowly(nodes, d, asked[0], params)
    d.run("abort", request_id="r")
    finish(d)
    nodes.limit(0)
    assert tokens(d.generate([asked[1]], params=prefill(p, asked[1]))) == reference([asked[1]])
    free.check()


def test_legs_of_a_transfer_that_end_early(reference, pair):
    nodes, p, d, free = pair
    asked = prompts(64, count=4, length=1500)
    held = Free(p)
    # The prompt is aborted after two of its chunks.
    first, second = transfer(nodes.a.address)
    p.run("submit", request_id="p", prompt=asked[0], count=1, params=first)
    p.run("step", times=2)
    begin(d, asked[0], second)
    p.run("abort", request_id="p")
    p.run("step", times=1)
    assert finish(d) == reference([asked[0]])
    # The decode leg comes alone, and the prompt when nobody wants it any more.
    first, second = transfer(nodes.a.address)
    begin(d, asked[1], second)
    d.run("abort", request_id="r")
    finish(d)
    assert len(tokens(p.generate([asked[1]], 1, params=first))) == 1
    # As it should be.
    assert [both(p, d, asked[2], nodes.a.address)["tokens"]] == reference([asked[2]])
    p.run("step_for", seconds=6)  # nobody takes the second one
    held.check()
    free.check()


def test_prefill_is_preempted(model, reference, tmp_path):
    """Two prompts at once in memory that has not room for both."""
    asked = prompts(65, count=2, length=700)
    small = {**SMALL, "num_gpu_blocks_override": 40, "max_model_len": 1024, "max_num_seqs": 2}
    with (
        TwoNodes(tmp_path, watchdog_s=2) as nodes,
        Engine(model, tmp_path, nodes.a, **small) as p,
        Engine(model, tmp_path, nodes.b, **SMALL) as d,
    ):
        p.run("wait_attached")
        d.run("wait_attached")
        free = Free(p, d)
        legs = [transfer(nodes.a.address) for _ in asked]
        for n, (prompt, (first, _)) in enumerate(zip(asked, legs)):
            p.run("submit", request_id=f"p{n}", prompt=prompt, count=1 if n else 200, params=first)
        p.call("run_out")
        for prompt, (_, second) in zip(asked, legs):
            assert tokens(d.generate([prompt], params=second)) == reference([prompt])
        p.answer()
        free.check()


def test_two_ranks_on_both_sides(model, tmp_path):
    asked = prompts(66)
    parallel = {
        **SMALL,
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    }
    with (
        TwoNodes(tmp_path, watchdog_s=10) as nodes,
        Engine(model, tmp_path, nodes.a, **parallel) as p,
        Engine(model, tmp_path, nodes.b, **parallel) as d,
    ):
        wait_for(lambda: nodes.a.attached(workers=2) and nodes.b.attached(workers=2), 30, "all ranks are attached")
        first = tokens(p.generate(asked[:1]))
        for prompt in asked[:1]:
            answer = d.generate([prompt], params=prefill(p, prompt))
            assert tokens(answer) == first
            assert answer[0]["cached"] == full(prompt)
        answer = both(p, d, asked[1], nodes.a.address)
        assert answer["cached"] == full(asked[1])
        assert [answer["tokens"]] == tokens(p.generate([asked[1]]))


def wait_stored(node: Daemon, tokens_so_far: list[int]) -> None:
    """Until a node that decoded so much has its blocks; the last token was never computed."""
    blocks = full(tokens_so_far[:-1]) // BLOCK
    wait_for(lambda: node.cli("status")["tiers"][0]["blocks"] >= blocks, 10, "the blocks are stored")


def free_share(server: ApiServer) -> float:
    with urllib.request.urlopen(server.url + "/metrics", timeout=10) as answer:
        (line,) = [x for x in answer.read().decode().splitlines() if x.startswith("vllm:kv_cache_usage_perc")]
    return 1 - float(line.rsplit(" ", 1)[1])


@pytest.mark.parametrize("arguments", [(), ("--overlap",)])
def test_conversation_through_the_proxy(model, reference, tmp_path, arguments):
    """Two turns with servers that step by themselves: what was kept for an offer comes back without another request."""
    engine = ("--max-model-len", "4096", "--block-size", str(BLOCK), "--max-num-batched-tokens", "192")
    with (
        TwoNodes(tmp_path, watchdog_s=10, **PATIENT_LOOKUPS) as nodes,
        ApiServer(model, tmp_path, nodes.a, *engine) as p,
        ApiServer(model, tmp_path, nodes.b, *engine) as d,
    ):
        p.wait()
        d.wait()
        wait_for(lambda: nodes.a.attached(workers=1) and nodes.b.attached(workers=1), 15, "both are attached")
        with Proxy(tmp_path, [f"{p.url},peer={nodes.a.address}"], [f"{d.url},peer={nodes.b.address}"], *arguments) as proxy:
            (prompt,) = prompts(68, count=1)
            first = complete(proxy.url, prompt, 100)
            assert [first["tokens"]] == reference([prompt], 100)
            wait_for(lambda: free_share(p) == free_share(d) == 1, 10, "all blocks are free")
            wait_stored(nodes.b, prompt + first["tokens"])
            post(p.url + "/reset_prefix_cache", {})
            turn = prompt + first["tokens"] + prompt[:50]
            assert [complete(proxy.url, turn, 12)["tokens"]] == reference([turn])
            wait_for(lambda: free_share(p) == free_share(d) == 1, 10, "all blocks are free")
        counted = p.metrics()
        assert counted["peer_hints_total"] >= 2 and counted["peer_blocks_total"] >= 2
        assert counted["lent_prompts_total"] >= 2
        assert d.metrics()["loaded_blocks_total"] >= full(prompt) // BLOCK


def test_engine_that_is_stopped_lends_nothing_that_changes(model, reference, daemon, tmp_path):
    """A prefill engine that stands still between two steps: what it lends is what it was."""
    (prompt,) = prompts(67, count=1)
    with Engine(model, tmp_path, daemon, **SMALL) as p, Engine(model, tmp_path, daemon, **SMALL) as d:
        p.run("wait_attached")
        d.run("wait_attached")
        params = prefill(p, prompt)
        os.kill(p.process.pid, signal.SIGSTOP)
        answer = d.generate([prompt], params=params)
        assert tokens(answer) == reference([prompt])
        assert answer[0]["cached"] == full(prompt)


@pytest.mark.parametrize("count", [1, 2])
def test_handoffs_at_random(model, tmp_path, count):
    """Prompts are handed over between engines with little memory; aborts, tickets that come twice or late, daemons that freeze and die.

    Whatever the decode engine gets must be what the prefill engine had in the block when it offered or stored it.
    """
    small = {**SMALL, "num_gpu_blocks_override": 60, "max_model_len": 1024, "max_num_seqs": 3}
    patience = {
        "match_wait_ms": 200,
        "match_timeout_ms": 500,
        "load_timeout_ms": 1500,
        "transfer_timeout_ms": 3000,
        "spill_ms": 500,
        "spill_percent": 70,
    }
    with contextlib.ExitStack() as stack:
        if count == 1:
            daemons = [stack.enter_context(Daemon(tmp_path / "node", pool="40MiB", slab="4MiB", watchdog_s=5))]
        else:
            nodes = stack.enter_context(TwoNodes(tmp_path, pool="40MiB", slab="4MiB", watchdog_s=5))
            daemons = [nodes.a, nodes.b]
        p = stack.enter_context(Engine(model, tmp_path, daemons[0], patience, **small))
        d = stack.enter_context(Engine(model, tmp_path, daemons[-1], patience, **small))
        for engine in (p, d):
            engine.run("wait_attached")
            engine.run("watch_handoffs")
        free = Free(p, d)
        handed = hand_over_at_random(p, d, daemons, random.Random(70 + count), seconds=60)
        for engine in (p, d):
            engine.run("run_out", timeout_s=60)
        noted = {(name, content) for e in (p, d) for name, content in e.run("noted_contents")}
        got = [tuple(entry) for entry in d.run("loaded_contents")]
        counted = d.run("metrics")
        print(handed, "handed over", len(got), "blocks loaded", counted, p.run("metrics"))
        assert not [entry for entry in got if entry not in noted]
        assert counted.get("source_blocks:lent" if count == 1 else "source_blocks:direct", 0) > 50
        assert not [k for k in {**counted, **p.run("metrics")} if k.startswith("errors")]
        for engine in (p, d):
            engine.run("wait_attached")
        free.check()


def hand_over_at_random(p: Engine, d: Engine, daemons: list[Daemon], rng: random.Random, seconds: float) -> int:
    """The number of prompts that the decode engine was told to take; the daemons run again at the end."""
    asked: dict[str, list[int]] = {}
    tickets: list[tuple[list[int], dict]] = []
    alive: list[tuple[Engine, str]] = []
    frozen: Daemon | None = None
    began, number, taken = time.monotonic(), 0, 0

    def submit(engine: Engine, prompt: list[int], count: int, params: dict) -> None:
        nonlocal number
        number += 1
        asked[f"q{number}"] = prompt
        alive.append((engine, f"q{number}"))
        engine.run("submit", request_id=f"q{number}", prompt=prompt, count=count, params=params)

    while time.monotonic() - began < seconds:
        action = rng.random()
        busy = [sum(e is engine for e, _ in alive) for engine in (p, d)]
        if action < 0.25 and busy[0] < 6:
            prompt = prompts(1000 + number, 1, rng.randint(60, 600))[0]
            if rng.random() < 0.4 and busy[1] < 6:
                first, second = transfer(daemons[0].address)
                submit(p, prompt, 1, first)
                submit(d, prompt, rng.randint(1, 40), second)
                taken += 1
            else:
                submit(p, prompt, 1, {"do_remote_decode": True})
        elif action < 0.5 and tickets and busy[1] < 6:
            at = rng.randrange(len(tickets))
            prompt, params = tickets[at] if rng.random() < 0.1 else tickets.pop(at)
            submit(d, prompt, rng.randint(1, 40), params)
            taken += 1
        elif action < 0.54 and alive:
            engine, request_id = alive.pop(rng.randrange(len(alive)))
            engine.run("abort", request_id=request_id)
        elif action < 0.56:
            rng.choice((p, d)).run("reset")
        elif action < (0.62 if frozen else 0.575):
            if frozen:
                frozen.thaw()
                frozen = None
            else:
                frozen = rng.choice(daemons)
                frozen.freeze()
        elif action < 0.58 and not frozen:
            victim = rng.choice(daemons)
            victim.kill()
            victim.start()
        else:
            engine = rng.choice((p, d))
            for ended in engine.run("step_handing", times=rng.randint(1, 15)):
                name = ended["id"].split("-")[0]
                alive = [(e, r) for e, r in alive if r != name]
                if engine is p and ended["params"]:
                    tickets.append((asked[name], ended["params"]))
    if frozen:
        frozen.thaw()
    return taken
