"""Handoffs out of and into the engines' own memory, and the next turn, with real engines. Tokens are compared with an engine without kvferry."""

import os

import pytest
from engine import Engine
from nodes import TwoNodes
from prompts import prompts, tokens
from test_vllm_smoke import prefill

pytestmark = pytest.mark.vllm

BLOCK = 32
# A look-up at a peer takes longer than it may on a busy machine.
PATIENT_LOOKUPS = {"handoff": {"lookupTimeout": "5s"}}
SMALL = {"block_size": BLOCK, "max_num_batched_tokens": 192}


def transfer(address: str) -> tuple[dict, dict]:
    """What a router gives to both legs at the start."""
    named = {"id": os.urandom(16).hex(), "secret": os.urandom(16).hex()}
    return (
        {"do_remote_decode": True, "do_remote_prefill": False, "kvferry_transfer": named},
        {"do_remote_prefill": True, "do_remote_decode": False, "kvferry_transfer": {**named, "address": address}},
    )


def both(p: Engine, d: Engine, prompt: list[int], address: str, count: int = 12) -> dict:
    """Both legs at once; the answer of the decode engine."""
    first, second = transfer(address)
    p.call("generate", prompts=[prompt], count=1, params=first)
    (answer,) = d.generate([prompt], count, params=second)
    p.answer()
    return answer


class Free:
    """The blocks that an engine has free, before and after."""

    def __init__(self, *engines: Engine):
        self.before = [(e, e.run("free_blocks")) for e in engines]

    def check(self) -> None:
        for engine, free in self.before:
            engine.run("run_out")
            assert engine.run("free_blocks") == free
            assert set(engine.run("leftovers").values()) == {0}


def full(prompt: list[int]) -> int:
    """Tokens of its full blocks."""
    return len(prompt) // BLOCK * BLOCK


def test_one_node(model, reference, daemon, tmp_path):
    asked = prompts(40)
    with Engine(model, tmp_path, daemon, **SMALL) as p, Engine(model, tmp_path, daemon, **SMALL) as d:
        p.run("wait_attached")
        d.run("wait_attached")
        free = Free(p, d)
        for prompt in asked[:2]:
            answer = d.generate([prompt], params=prefill(p, prompt))
            assert tokens(answer) == reference([prompt])
            assert answer[0]["cached"] == full(prompt)
        answer = both(p, d, asked[2], daemon.address)
        assert [answer["tokens"]] == reference([asked[2]])
        assert answer["cached"] == full(asked[2])
        # The ticket of a prompt that the engine's own cache has too, and once more.
        params = prefill(p, asked[0])
        for _ in range(2):
            assert tokens(d.generate([asked[0]], params=params)) == reference([asked[0]])
        free.check()
        counted = d.run("metrics")
        assert counted["source_blocks:lent"] >= (full(asked[0]) + full(asked[1])) // BLOCK
        assert p.run("metrics")["lent_prompts:served"] >= 2


def test_two_nodes(model, reference, tmp_path):
    asked = prompts(41, count=4)
    with (
        TwoNodes(tmp_path, watchdog_s=10, **PATIENT_LOOKUPS) as nodes,
        Engine(model, tmp_path, nodes.a, **SMALL) as p,
        Engine(model, tmp_path, nodes.b, **SMALL) as d,
    ):
        p.run("wait_attached")
        d.run("wait_attached")
        free = Free(p, d)
        answer = d.generate([asked[0]], params=prefill(p, asked[0]))
        assert tokens(answer) == reference([asked[0]])
        assert answer[0]["cached"] == full(asked[0])
        assert d.run("metrics")["source_blocks:direct"] == full(asked[0]) // BLOCK
        # What was written straight into the engine's memory is stored after that.
        d.run("wait_stored")
        assert d.run("reset")
        assert d.generate([asked[0]])[0]["cached"] == full(asked[0])
        # Both legs at once: the prompt takes six steps.
        answer = both(p, d, asked[1], nodes.a.address)
        assert [answer["tokens"]] == reference([asked[1]])
        assert answer["cached"] == full(asked[1])
        assert d.run("metrics")["source_blocks:direct"] >= (full(asked[0]) + full(asked[1])) // BLOCK
        # A router that names no node, and one that names the wrong one.
        for params in ({**transfer("")[1]}, transfer(nodes.b.address)[1]):
            params["kvferry_transfer"]["id"] = "00" * 16
            d.run("submit", request_id="r", prompt=asked[3], count=12, params=params)
            out = d.run("run_out", timeout_s=60)
            assert list(out["tokens"].values()) == reference([asked[3]])
            assert d.run("reset")
        # The next turn on node a: the answer's blocks are on node b.
        (answer,) = d.generate([asked[2]], 100, params=prefill(p, asked[2]))
        d.run("wait_stored")
        p.run("wait_stored")
        p.run("run_out")  # what it kept for the offer
        assert p.run("reset")
        turn = asked[2] + answer["tokens"] + asked[3][:100]
        (second,) = p.generate([turn], params={"kvferry_peers": [nodes.b.address]})
        assert [second["tokens"]] == reference([turn])
        assert second["cached"] == full(asked[2] + answer["tokens"][:-1])
        assert p.run("metrics")["peer_blocks"] >= 2
        free.check()
        assert not [k for k in {**p.run("metrics"), **d.run("metrics")} if k.startswith("errors")]
