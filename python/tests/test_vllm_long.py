"""The connector in real engines, what takes long or needs a rare event: scripts/test-vllm --long."""

import base64
import json
import mmap
import pathlib
import random
import time

import pytest
from daemon import Daemon, wait_for
from engine import Engine
from nodes import TwoNodes
from prompts import cached, prompts, tokens
from test_vllm_smoke import prefill

from kvferry.v1 import engine_pb2 as pb

pytestmark = [pytest.mark.vllm, pytest.mark.long]

# A step of the tiny model takes a tenth of a second; one that waited for a daemon would take much longer.
STEP_S_MAX = 2.0


def submit_all(engine: Engine, asked: list[list[int]], count: int = 12, prefix: str = "r") -> None:
    for i, prompt in enumerate(asked):
        engine.run("submit", request_id=f"{prefix}{i}", prompt=prompt, count=count)


def finished(engine: Engine, number: int, prefix: str = "r") -> tuple[list[list[int]], float]:
    out = engine.run("run_out")
    # vLLM may append to the request id that it was given.
    by_id = {name.split("-")[0]: t for name, t in out["tokens"].items()}
    return [by_id[f"{prefix}{i}"] for i in range(number)], out["longest_step"]


def test_daemon_frozen_for_20_s(model, reference, daemon, tmp_path):
    first, second = prompts(20), prompts(21)
    with Engine(model, tmp_path, daemon, {"match_timeout_ms": 1000}) as engine:
        engine.run("wait_attached")
        engine.generate(first)
        engine.run("wait_stored")
        daemon.freeze()
        began = time.monotonic()
        round_number = 0
        while time.monotonic() - began < 20:
            submit_all(engine, second, prefix=f"f{round_number}x")
            out, longest = finished(engine, len(second), prefix=f"f{round_number}x")
            assert out == reference(second)
            assert longest < STEP_S_MAX
            engine.run("reset")
            round_number += 1
        daemon.thaw()
        engine.run("wait_stored")
        # Nobody waits for the answer of a daemon that was silent, so the first look-up only shows that it is back.
        engine.generate(second[:1])
        engine.run("wait_heard")
        assert engine.run("reset")
        again = engine.generate(first)
        assert tokens(again) == reference(first)
        assert cached(again) == [896, 896, 1024]
        assert set(engine.run("leftovers").values()) == {0}


def test_preempted_while_it_is_stored(model, daemon, tmp_path):
    """Blocks that a frozen daemon still has to read are written by other requests: nothing of that may be published."""
    asked = prompts(22, count=6, length=700)
    small = {"num_gpu_blocks_override": 16, "max_model_len": 1024, "max_num_seqs": 3}
    with Engine(model, tmp_path, daemon, {"store_timeout_ms": 30000}, **small) as engine:
        engine.run("wait_attached")
        engine.run("watch_bytes")
        daemon.freeze()
        engine.generate(asked, 200)
        daemon.thaw()
        engine.run("wait_stored")
        counted = engine.run("metrics")
        assert counted["unstored_blocks:revoked"] > 0
        # What was stored all the same is right.
        for _ in range(2):
            engine.run("reset")
            engine.generate(asked, 200)
            engine.run("wait_stored")
        checks = engine.run("checks")
        assert checks["loaded"] > 0 and checks["wrong"] == 0
        assert engine.run("metrics")["preemptions"] > 0
        assert set(engine.run("leftovers").values()) == {0}


def test_aborted_while_it_is_loaded(model, reference, daemon, tmp_path):
    asked = prompts(23)
    with Engine(model, tmp_path, daemon) as engine:
        engine.run("wait_attached")
        engine.generate(asked)
        engine.run("wait_stored")
        engine.run("reset")
        free = engine.run("free_blocks")
        engine.run("hold_loads")
        engine.run("submit", request_id="gone", prompt=asked[0], count=12)
        engine.run("step_until_loading")
        engine.run("abort", request_id="gone")
        # A copy may be under way: the blocks stay taken until the worker says that it is not.
        assert engine.run("free_blocks") < free
        engine.run("let_loads_go")
        engine.run("run_out")
        assert engine.run("free_blocks") == free
        again = engine.generate(asked)
        assert tokens(again) == reference(asked)
        assert cached(again) == [896, 896, 1024]
        assert set(engine.run("leftovers").values()) == {0}


def test_full_pool(model, reference, tmp_path):
    asked = prompts(24, count=8)
    with Daemon(tmp_path / "node", pool="18MiB", slab="4MiB") as daemon, Engine(model, tmp_path, daemon) as engine:
        engine.run("wait_attached")
        for _ in range(3):
            assert tokens(engine.generate(asked)) == reference(asked)
            engine.run("wait_stored")
            engine.run("reset")
        (tier,) = daemon.cli("status")["tiers"]
        assert tier["blocks"] * 524288 <= tier["capacity_bytes"]
        assert set(engine.run("leftovers").values()) == {0}


def test_prefill_daemon_killed_before_and_during_the_fetch(model, reference, tmp_path):
    asked = prompts(25)
    with TwoNodes(tmp_path) as nodes, Engine(model, tmp_path, nodes.a) as p, Engine(model, tmp_path, nodes.b) as d:
        p.run("wait_attached")
        d.run("wait_attached")
        during, before = prefill(p, asked[0]), prefill(p, asked[1])
        nodes.a.freeze()
        d.run("submit", request_id="r0", prompt=asked[0], count=12, params=during)
        d.run("step_until_loading")
        nodes.a.kill()
        began = time.monotonic()
        out, longest = finished(d, 1)
        # The load's own deadline is 30 s: the failure was known before.
        assert time.monotonic() - began < 5
        assert out == reference(asked[:1])
        assert longest < STEP_S_MAX
        answer = d.generate([asked[1]], params=before)
        assert tokens(answer) == reference([asked[1]])
        # The prefill engine goes on alone, and a ticket of the old epoch is worth nothing at the new one.
        nodes.a.start()
        p.run("wait_attached")
        time.sleep(1.5)  # a peer that could not be reached is dialled again after a second at most
        answer = d.generate([asked[2]], params=prefill(p, asked[2]))
        assert tokens(answer) == reference([asked[2]])
        assert answer[0]["cached"] == 1024
        d.run("reset")
        nodes.b.kill()
        nodes.b.start()
        d.run("wait_attached")
        assert set(d.run("leftovers").values()) == {0}


def test_ticket_used_by_two_instances(model, reference, tmp_path):
    (prompt,) = prompts(26, count=1)
    with TwoNodes(tmp_path) as nodes, Engine(model, tmp_path, nodes.a) as p:
        p.run("wait_attached")
        params = prefill(p, prompt)
        with Engine(model, tmp_path, nodes.b) as first:
            first.run("wait_attached")
            answer = first.generate([prompt], params=params)
            assert answer[0]["cached"] == 896 and tokens(answer) == reference([prompt])
        nodes.b.kill()
        (nodes.b.directory / "pool").unlink()  # else it would be found there
        nodes.b.start()
        with Engine(model, tmp_path, nodes.b) as second:
            second.run("wait_attached")
            answer = second.generate([prompt], params=params)
            assert tokens(answer) == reference([prompt])
            assert second.run("metrics").get("loaded_blocks", 0) == 0


def test_lora_names_do_not_share(model, daemon, tmp_path):
    asked = prompts(27)
    adapters = [make_adapter(tmp_path / name, model) for name in ("one", "two")]
    with Engine(model, tmp_path, daemon, enable_lora=True, max_lora_rank=8) as engine:
        engine.run("wait_attached")
        answers = {}
        for n, path in enumerate(adapters):
            first = engine.generate(asked, lora=[f"lora{n}", n + 1, path])
            assert cached(first) == [0, 0, 0]
            answers[n] = tokens(first)
            engine.run("wait_stored")
        assert cached(engine.generate(asked)) == [0, 0, 0]
        engine.run("wait_stored")
        for n, path in enumerate(adapters):
            engine.run("reset")
            again = engine.generate(asked, lora=[f"lora{n}", n + 1, path])
            assert cached(again) == [896, 896, 1024]
            assert tokens(again) == answers[n]


def make_adapter(folder: pathlib.Path, model: str) -> str:
    """A LoRA adapter that changes the query projection of every layer."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    torch.manual_seed(len(folder.name))
    weights = {}
    for layer in range(4):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(8, 256) * 0.1
        weights[f"{name}.lora_B.weight"] = torch.randn(256, 8) * 0.1
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"base_model_name_or_path": model, "peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def test_ticket_of_an_earlier_epoch(model, reference, tmp_path):
    (prompt,) = prompts(28, count=1)
    with TwoNodes(tmp_path) as nodes, Engine(model, tmp_path, nodes.a) as p, Engine(model, tmp_path, nodes.b) as d:
        p.run("wait_attached")
        d.run("wait_attached")
        params = prefill(p, prompt)
        p.run("wait_stored")
        assert len(pb.Ticket.FromString(base64.b64decode(params["kvferry_ticket"])).epoch) == 16
        nodes.a.kill()
        nodes.a.start()
        answer = d.generate([prompt], params=params)
        assert tokens(answer) == reference([prompt])
        assert d.run("metrics").get("loaded_blocks", 0) == 0
        wait_for(lambda: nodes.b.cli("status")["transfers_running"] == 0, 5, "nothing is under way")


def flip_payloads(pool: pathlib.Path, slab_bytes: int) -> None:
    """Flips a bit in every block, and in none of the header tables at the beginning of slabs."""
    with open(pool, "r+b") as f:
        memory = mmap.mmap(f.fileno(), 0)
    for offset in range(2 << 20, len(memory), 100_000):
        if (offset - (2 << 20)) % slab_bytes > 64 << 10:
            memory[offset] ^= 1
    memory.close()


def test_flipped_bytes_in_the_pool(model, reference, daemon, tmp_path):
    asked = prompts(29)
    with Engine(model, tmp_path, daemon) as engine:
        engine.run("wait_attached")
        engine.generate(asked)
        engine.run("wait_stored")
        flip_payloads(daemon.directory / "pool", slab_bytes=16 << 20)
        engine.run("reset")
        assert tokens(engine.generate(asked)) == reference(asked)
        counted = engine.run("metrics")
        assert counted["unloaded_blocks:checksum"] == 22 and counted.get("loaded_blocks", 0) == 0
        engine.run("wait_stored")
        # The broken ones were thrown out, so that these are stored anew.
        engine.run("reset")
        assert tokens(engine.generate(asked)) == reference(asked)
        engine.run("wait_stored")
        engine.run("reset")
        again = engine.generate(asked)
        assert tokens(again) == reference(asked)
        assert cached(again) == [896, 896, 1024]


@pytest.mark.parametrize("mode", ["lent", "staging"])
def test_everything_at_once(model, tmp_path, mode):
    """Requests that share prefixes or come again, more than fit; aborts, resets, a small pool, a daemon that freezes and dies.

    Whatever is loaded must be what was in the block when it was handed to a store. (Without revokes this finds wrong blocks.)
    """
    small = {"num_gpu_blocks_override": 60, "block_size": 32, "max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 256}
    patience = {"match_wait_ms": 200, "match_timeout_ms": 500, "load_timeout_ms": 1000, "store_timeout_ms": 30000, "mode": mode}
    with (
        Daemon(tmp_path / "node", pool="34MiB", slab="4MiB") as daemon,
        Engine(model, tmp_path, daemon, patience, **small) as engine,
    ):
        engine.run("wait_attached")
        engine.run("watch_bytes")
        free = engine.run("free_blocks")
        submitted = run_at_random(engine, daemon, random.Random(30), seconds=45)
        engine.run("run_out")
        engine.run("wait_attached")
        checks, counted = engine.run("checks"), engine.run("metrics")
        print(submitted, "requests", checks, counted)
        assert checks["wrong"] == checks["unknown"] == 0
        assert checks["loaded"] > 50 and checks["stored"] > 100
        assert not [k for k in counted if k.startswith("errors")]
        wait_for(lambda: set(engine.run("leftovers").values()) == {0}, 10, "nothing is left over")
        assert engine.run("free_blocks") == free


def run_at_random(engine: Engine, daemon: Daemon, rng: random.Random, seconds: float) -> int:
    """The number of requests that were submitted; the daemon runs again at the end."""
    parts = prompts(31, count=4, length=300)
    history: list[list[int]] = []
    alive: list[str] = []
    began, frozen, number = time.monotonic(), False, 0
    while time.monotonic() - began < seconds:
        action = rng.random()
        if action < 0.45 and len(alive) < 10:
            if history and rng.random() < 0.5:
                prompt = rng.choice(history[-20:])
            else:
                prompt = [t for i in rng.sample(range(4), rng.randint(0, 1)) for t in parts[i]] + prompts(number, 1, rng.randint(40, 400))[
                    0
                ]
                history.append(prompt)
            number += 1
            alive.append(f"c{number}")
            params = {"do_remote_decode": True} if rng.random() < 0.3 else None
            engine.run("submit", request_id=alive[-1], prompt=prompt, count=rng.randint(1, 120), params=params)
        elif action < 0.5 and alive:
            engine.run("abort", request_id=alive.pop(rng.randrange(len(alive))))
        elif action < 0.53:
            engine.run("reset")
        elif action < (0.60 if frozen else 0.56):
            daemon.thaw() if frozen else daemon.freeze()
            frozen = not frozen
        elif action < 0.605 and not frozen:
            daemon.kill()
            daemon.start()
        else:
            ended = {r.split("-")[0] for r in engine.run("step", times=rng.randint(1, 20))}
            alive = [r for r in alive if r not in ended]
    if frozen:
        daemon.thaw()
    return number
