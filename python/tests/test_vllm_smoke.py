"""The connector in real engines, the part that CI runs. Tokens are compared with an engine without kvferry."""

import base64
import os
import signal
import subprocess

import pytest
from api_server import ApiServer, post
from daemon import wait_for
from engine import Engine, EngineError
from nodes import TwoNodes
from prompts import cached, prompts, sharing_prompts, tokens
from tiny_model import make_model

from kvferry.v1 import engine_pb2 as pb

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("mode", ["lent", "staging"])
def test_stored_blocks_are_loaded_after_reset_and_restart(model, reference, daemon, tmp_path, mode):
    asked = prompts(1)
    with Engine(model, tmp_path, daemon, {"mode": mode}) as engine:
        engine.run("wait_attached")
        engine.run("watch_bytes")
        assert tokens(engine.generate(asked)) == reference(asked)
        engine.run("wait_stored")
        assert engine.run("reset")
        again = engine.generate(asked)
        assert tokens(again) == reference(asked)
        assert cached(again) == [896, 896, 1024]
        checks = engine.run("checks")
        assert checks["loaded"] == 22 and checks["wrong"] == checks["unknown"] == 0
        counted = engine.run("metrics")
        assert counted["loaded_blocks"] == 22 and counted["stored_blocks"] == 23
        assert set(engine.run("leftovers").values()) == {0}
    wait_for(lambda: daemon.gone(), 5, "the killed engine's sessions are gone")
    with Engine(model, tmp_path, daemon, {"mode": mode}) as engine:
        engine.run("wait_attached")
        again = engine.generate(asked)
        assert tokens(again) == reference(asked)
        assert cached(again) == [896, 896, 1024]


def test_chunked_prefill_salts_and_failing_blocks(model, reference, daemon, tmp_path):
    asked = prompts(2)
    with Engine(model, tmp_path, daemon, max_num_batched_tokens=192) as engine:
        engine.run("wait_attached")
        assert tokens(engine.generate(asked)) == reference(asked)
        engine.run("wait_stored")
        assert engine.run("reset")
        assert cached(engine.generate(asked, salt="another tenant")) == [0, 0, 0]
        engine.run("wait_stored")
        for salt in (None, "another tenant"):
            assert engine.run("reset")
            again = engine.generate(asked, salt=salt)
            assert cached(again) == [896, 896, 1024]
            assert tokens(again) == reference(asked)
        engine.run("fail_loads", every=3)
        assert engine.run("reset")
        again = engine.generate(asked)
        assert tokens(again) == reference(asked)
        assert engine.run("metrics")["unloaded_blocks:checksum"] == 22 // 3
        assert set(engine.run("leftovers").values()) == {0}


def test_requests_at_once_share_a_prefix(model, daemon, tmp_path):
    asked = sharing_prompts(3, count=8, shared=640, own=200)
    with Engine(model, tmp_path, daemon, max_num_seqs=8) as engine:
        engine.run("wait_attached")
        engine.run("watch_bytes")
        engine.generate(asked)
        engine.run("wait_stored")
        assert engine.run("reset")
        again = engine.generate(asked)
        assert all(n >= 640 for n in cached(again))
        checks = engine.run("checks")
        assert checks["loaded"] >= 5 + 8 and checks["wrong"] == checks["unknown"] == 0
        assert set(engine.run("leftovers").values()) == {0}


def test_daemon_killed_and_started_again(model, reference, daemon, tmp_path):
    first, second = prompts(4), prompts(5)
    with Engine(model, tmp_path, daemon) as engine:
        engine.run("wait_attached")
        assert tokens(engine.generate(first)) == reference(first)
        engine.run("wait_stored")
        daemon.kill()
        assert tokens(engine.generate(second)) == reference(second)
        daemon.start()
        engine.run("wait_attached")
        assert engine.run("reset")
        again = engine.generate(first)
        assert tokens(again) == reference(first)
        assert cached(again) == [896, 896, 1024]  # the pool outlives its daemon
        assert tokens(engine.generate(second)) == reference(second)
        assert set(engine.run("leftovers").values()) == {0}


def test_weights_changed_in_place(model, reference, daemon, tmp_path):
    asked = prompts(6)
    with Engine(model, tmp_path, daemon) as engine:
        engine.run("wait_attached")
        engine.generate(asked)
        engine.run("wait_stored")
        assert engine.run("reset", connector=True)
        engine.run("wait_space")
        assert cached(engine.generate(asked)) == [0, 0, 0]
        engine.run("wait_stored")
        assert engine.run("reset")
        again = engine.generate(asked)
        assert cached(again) == [896, 896, 1024]
        assert tokens(again) == reference(asked)
    assert len(daemon.cli("spaces")["spaces"]) == 2


def test_models_do_not_share(model, daemon, tmp_path):
    asked = prompts(7)
    other = make_model(tmp_path / "other" / os.path.basename(model), seed=1)
    for path in (model, other):
        with Engine(path, tmp_path, daemon) as engine:
            engine.run("wait_attached")
            assert cached(engine.generate(asked)) == [0, 0, 0]
            engine.run("wait_stored")


def test_what_cannot_be_served_is_said_once(model, reference, daemon, tmp_path):
    asked = prompts(11)
    with Engine(model, tmp_path, daemon, {"mode": "staging", "staging_bytes": 4096}) as engine:
        for _ in range(2):
            assert tokens(engine.generate(asked)) == reference(asked)
            engine.run("reset")
        (said,) = [line for line in engine.log().splitlines() if "nothing is cached:" in line]
        assert "staging_bytes: 4096 is less than a block" in said
    assert daemon.cli("status")["tiers"][0]["blocks"] == 0


def prefill(engine: Engine, prompt: list[int]) -> dict:
    """The parameters that a proxy carries from the prefill engine's answer to the decode engine."""
    (answer,) = engine.generate([prompt], 1, params={"do_remote_decode": True, "do_remote_prefill": False})
    params = answer["params"]
    assert params["do_remote_prefill"] and not params["do_remote_decode"]
    # vLLM would show this number as the decode engine's.
    del params["remote_prefill_cached_tokens"]
    return params


def change_ticket(params: dict, **fields) -> dict:
    ticket = pb.Ticket.FromString(base64.b64decode(params["kvferry_ticket"]))
    for name, value in fields.items():
        setattr(ticket, name, value)
    return {**params, "kvferry_ticket": base64.b64encode(ticket.SerializeToString()).decode()}


def test_handoff_between_nodes(model, reference, tmp_path):
    asked = prompts(8, count=7)
    with (
        TwoNodes(tmp_path) as nodes,
        Engine(model, tmp_path, nodes.a, {"offer_lifetime_ms": 4000}) as p,
        Engine(model, tmp_path, nodes.b) as d,
    ):
        p.run("wait_attached")
        d.run("wait_attached")
        for prompt in asked[:2]:
            params = prefill(p, prompt)
            answer = d.generate([prompt], params=params)
            assert tokens(answer) == reference([prompt])
            assert answer[0]["cached"] == len(prompt) // 128 * 128
        # The engine's own cache has this prompt, the pool too: handed over all the same.
        assert d.run("reset")
        answer = d.generate([asked[0]], params=prefill(p, asked[0]))
        assert answer[0]["cached"] == 896
        # Of this one the decode engine has the first half already.
        longer = asked[1] + asked[2][:500]
        answer = d.generate([longer], params=prefill(p, longer))
        assert tokens(answer) == reference([longer])
        assert answer[0]["cached"] == len(longer) // 128 * 128
        wrong = change_ticket(prefill(p, asked[6]), secret=bytes(16))
        malformed = {**prefill(p, asked[3]), "kvferry_ticket": "!"}
        for prompt, params in ((asked[6], wrong), (asked[3], malformed), (asked[4], {"do_remote_prefill": True})):
            answer = d.generate([prompt], params=params)
            assert tokens(answer) == reference([prompt])
            assert answer[0]["cached"] == 0
        params = prefill(p, asked[5])
        wait_for(lambda: not nodes.a.open_offers(), 15, "the offer's lifetime is over")
        answer = d.generate([asked[5]], params=params)
        assert tokens(answer) == reference([asked[5]])
        assert answer[0]["cached"] == 0
        assert set(p.run("leftovers").values()) == set(d.run("leftovers").values()) == {0}
        counted = d.run("metrics")
        assert counted["tickets:accepted"] == 6 and counted["tickets:malformed"] == 1 and counted["tickets:absent"] == 1


def test_two_ranks_and_one_killed(model, reference, daemon, tmp_path):
    asked = prompts(9)
    parallel = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}
    with Engine(model, tmp_path, daemon, **parallel) as engine:
        wait_for(lambda: daemon.attached(workers=2), 15, "both ranks are attached")
        first = tokens(engine.generate(asked))
        wait_for(lambda: len(daemon.cli("blocks")["blocks"]) >= 22, 15, "the blocks are stored")
        assert engine.run("reset")
        again = engine.generate(asked)
        assert tokens(again) == first
        assert cached(again) == [896, 896, 1024]
        workers = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(engine.process.pid)], capture_output=True, text=True).stdout
        (victim,) = [line.split()[0] for line in workers.splitlines() if "Worker_TP1" in line or "Worker-1" in line]
        os.kill(int(victim), signal.SIGKILL)
        with pytest.raises(EngineError):
            for seed in range(100):
                engine.generate(prompts(100 + seed))
    wait_for(lambda: daemon.gone(), 5, "the killed engine's sessions are gone")
    with Engine(model, tmp_path, daemon, **parallel) as engine:
        wait_for(lambda: daemon.attached(workers=2), 15, "both ranks are attached")
        again = engine.generate(asked)
        assert tokens(again) == first
        assert cached(again) == [896, 896, 1024]


def test_api_server(model, reference, daemon, tmp_path):
    (prompt,) = prompts(10, count=1)
    with ApiServer(model, tmp_path, daemon, "--max-model-len", "4096").wait() as server:
        wait_for(lambda: daemon.attached(workers=1), 15, "the engine is attached")
        assert [server.complete(prompt)["tokens"]] == reference([prompt])
        wait_for(lambda: daemon.cli("status")["tiers"][0]["blocks"] == 7, 15, "the prompt is stored")
        post(server.url + "/reset_prefix_cache", {})
        again = server.complete(prompt)
        assert [again["tokens"]] == reference([prompt])
        assert again["cached"] == 896
        assert server.metrics()["loaded_blocks_total"] == 7
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(30)
    wait_for(daemon.gone, 5, "the engine's sessions are gone")
