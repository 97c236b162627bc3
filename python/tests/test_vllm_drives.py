"""The connector in real engines, with a daemon that has a drive: a file, from which blocks come back."""

import os
import random
import urllib.request

import pytest
from daemon import Daemon, free_port, wait_for
from drive_file import DriveFile
from engine import Engine
from prompts import cached, prompts, tokens

pytestmark = pytest.mark.vllm

SLAB = 4 << 20
BLOCK = 512 << 10  # 128 tokens of the tiny model
HITS = [896, 896, 1024]  # of the three prompts' tokens, in whole blocks
STORED = 23  # those 22 blocks, and one that an answer completes


class Node(Daemon):
    """With a drive. What is idle for a second goes down to it, and leaves the pool."""

    def __init__(self, directory, size: str = "64MiB", **extra):
        self.drive_path = directory / "drive"
        settings = {
            "dram": {"idle": "1s", "onIdle": "move"},
            "nvme": {"drives": [{"path": str(self.drive_path), "size": size}], "slab": f"{SLAB >> 20}MiB", "reserve": "0"},
            **extra,
        }
        super().__init__(directory, slab=f"{SLAB >> 20}MiB", **settings)

    def demoted(self) -> int:
        return self.counted().get("demote_blocks:moved", 0)

    def lose_pool(self) -> None:
        (self.directory / "pool").unlink()

    @property
    def drive(self) -> DriveFile:
        return DriveFile(self.drive_path, SLAB)


@pytest.fixture
def node(tmp_path):
    with Node(tmp_path / "node") as n:
        yield n


def store_all(engine: Engine, node: Node, reference, asked: list[list[int]]) -> None:
    """The prompts are computed, stored, and gone down by themselves."""
    engine.run("wait_attached")
    before = node.demoted()
    assert tokens(engine.generate(asked)) == reference(asked)
    engine.run("wait_stored")
    wait_for(lambda: node.demoted() >= before + STORED, 20, "the blocks are on the drive")
    all_down(engine, node)


def all_down(engine: Engine, node: Node) -> None:
    """What is asked now is to be had from the drive only."""
    engine.run("wait_stored")
    wait_for(lambda: node.blocks() == 0, 20, "the blocks have left the pool")
    assert engine.run("reset")


def test_from_the_drive_after_both_were_killed(model, reference, node, tmp_path):
    asked = prompts(40)
    with Engine(model, tmp_path, node) as engine:
        store_all(engine, node, reference, asked)
        node.kill()
    node.lose_pool()
    node.start()
    assert node.blocks() == 0
    with Engine(model, tmp_path, node) as engine:
        engine.run("wait_attached")
        again = engine.generate(asked)
        assert tokens(again) == reference(asked)
        assert cached(again) == HITS
        mine, its = engine.run("metrics"), node.counted()
        assert mine["loaded_blocks"] == mine["nvme_blocks"] == mine["matched_blocks"] == 22
        assert its["lookup_blocks:nvme"] == 22 and its.get("lookup_blocks:dram", 0) == 0 and its["promote_blocks:moved"] == 22
        for said in ("none", "for ever"):
            answer = engine.generate(prompts(52, count=1), 1, params={"kvferry_retention": said})
            assert answer[0]["reason"] == "length"
        mine = engine.run("metrics")
        assert mine["retentions:none"] == mine["retentions:malformed"] == 1
        assert set(engine.run("leftovers").values()) == {0}


def damage_payloads(node: Node) -> None:
    rng = random.Random(41)
    node.drive.flip([payload + rng.randrange(size) for _, payload, size in node.drive.slots() for _ in range(3)])


def damage_headers(node: Node) -> None:
    """Some of them, in the log, where the last ones are, and in the tables."""
    logged = node.drive.logged_headers()
    print("headers in the log", [count for _, count in logged])
    node.drive.flip([logged[-2][0] + 40, *(header + 40 for header, _, _ in node.drive.slots()[4::5])])


def damage_tail(node: Node) -> None:
    _, payload, size = node.drive.slots()[STORED // 2]
    node.drive.cut(payload + size // 2)


@pytest.mark.long
def test_a_damaged_drive(model, reference, node, tmp_path):
    """While the daemon is down, and the pool is lost; at last also while it runs."""
    with Engine(model, tmp_path, node) as engine:
        for n, damage in enumerate((damage_tail, damage_headers, damage_payloads, None)):
            asked = prompts(42 + n)
            store_all(engine, node, reference, asked)
            started = engine.run("metrics").get("loaded_blocks", 0)
            if damage is None:
                damage_payloads(node)
            else:
                node.kill()
                node.lose_pool()
                (node.log_path).write_text("")
                damage(node)
                node.start()
                engine.run("wait_attached")
            before = node.counted()
            answers = engine.generate(asked)
            assert tokens(answers) == reference(asked)
            loaded = engine.run("metrics").get("loaded_blocks", 0) - started
            after = node.counted()
            broken = after.get("broken_blocks:nvme", 0) - before.get("broken_blocks:nvme", 0)
            print(getattr(damage, "__name__", "while it runs"), "loaded", loaded, "broken", broken, "cached", cached(answers))
            if damage in (damage_payloads, None):
                assert loaded == 0 and broken == 22
            elif damage is damage_headers:
                assert 0 < loaded < 22 and broken == 0
            else:
                assert 0 < loaded < 22 and broken > 0
                assert "is to have" in node.log_path.read_text()
            # What was broken has left, so that it is stored anew.
            engine.run("wait_stored")
            assert engine.run("reset")
            again = engine.generate(asked)
            assert tokens(again) == reference(asked)
            assert cached(again) == HITS
            all_down(engine, node)
        assert set(engine.run("leftovers").values()) == {0}


@pytest.mark.long
def test_two_ranks_from_the_drive(model, node, tmp_path):
    """Every rank's shard goes down and comes up by itself."""
    asked = prompts(53)
    parallel = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}
    with Engine(model, tmp_path, node, **parallel) as engine:
        wait_for(lambda: node.attached(workers=2), 15, "both ranks are attached")
        first = tokens(engine.generate(asked))
        wait_for(lambda: node.demoted() >= 2 * STORED and node.blocks() == 0, 30, "the blocks are on the drive only")
        assert engine.run("reset")
        again = engine.generate(asked)
        assert tokens(again) == first
        assert cached(again) == HITS
        assert node.counted()["promote_blocks:moved"] == 44
        # One that waits behind another one is brought up by a hint of the scheduler side.
        wait_for(lambda: node.blocks() == 0, 30, "the blocks are on the drive only")
        assert engine.run("reset")
        (ahead,) = prompts(54, count=1, length=100)
        before = engine.run("metrics").get("prefetched_requests", 0)
        assert engine.run("time_to_first_token_behind", ahead=ahead, prompt=asked[0], count=40)["tokens"] == first[0][:2]
        assert node.counted()["promote_blocks:moved"] == 44 + 14
        assert engine.run("metrics")["prefetched_requests"] == before + 1


@pytest.mark.long
def test_a_drive_that_is_late(model, reference, node, tmp_path):
    """Deadlines that are shorter than what the drive takes, and aborts, while two transfers' blocks come up."""
    (prompt,) = asked = prompts(50, count=1, length=3900)
    with Engine(model, tmp_path, node) as engine:
        engine.run("wait_attached")
        assert tokens(engine.generate(asked)) == reference(asked)
        free = engine.run("free_blocks")
        for ms in (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128):
            all_down(engine, node)
            engine.run("set_load_timeout", ms=ms)
            answer = engine.generate(asked)
            assert tokens(answer) == reference(asked)
            print(ms, "ms:", answer[0]["cached"], "tokens loaded")
        counted = engine.run("metrics")
        print(counted)
        assert counted["loaded_blocks"] > 0
        assert counted.get("unloaded_blocks:timeout", 0) + counted.get("unloaded_blocks:expired", 0) > 0
        engine.run("set_load_timeout", ms=30000)
        for steps in range(4):
            all_down(engine, node)
            engine.run("submit", request_id=f"gone{steps}", prompt=prompt, count=12)
            engine.run("step_until_loading")
            engine.run("step", times=steps)
            engine.run("abort", request_id=f"gone{steps}")
            engine.run("run_out")
            assert engine.run("reset")
            assert engine.run("free_blocks") == free
        all_down(engine, node)
        answer = engine.generate(asked)
        assert tokens(answer) == reference(asked)
        assert cached(answer) == [len(prompt) // 128 * 128]
        assert node.counted().get("broken_blocks:nvme", 0) == 0
        assert set(engine.run("leftovers").values()) == {0}


@pytest.mark.long
def test_a_drive_that_is_slower_than_computing(model, reference, node, tmp_path):
    asked = prompts(51, count=5)
    with Engine(model, tmp_path, node) as engine:
        engine.run("wait_attached")
        assert tokens(engine.generate(asked)) == reference(asked)
        all_down(engine, node)
        assert cached(engine.generate(asked)) == [len(p) // 128 * 128 for p in asked]  # and the drive's rate is measured
        all_down(engine, node)
        engine.run("set_pace", block_us=1)
        answers = engine.generate(asked)
        assert tokens(answers) == reference(asked)
        its = node.counted()
        assert cached(answers)[-2:] == [0, 0]  # the first ones are tries
        assert its["drives:slow"] == 1 and its["drives:not_worth_reading"] == 2
        all_down(engine, node)
        engine.run("set_pace", block_us=100_000)
        answers = engine.generate(asked)
        assert tokens(answers) == reference(asked)
        assert cached(answers) == [len(p) // 128 * 128 for p in asked]


def daemon_memory(node: Node) -> dict[str, int]:
    """In KiB: heap is what the garbage collector lets it grow to, about twice of what lives."""
    pid = node.process.pid
    with open(f"/proc/{pid}/status") as f:
        fields = dict(line.split(":", 1) for line in f)
    with urllib.request.urlopen(f"http://{node.config['metrics']['listen']}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    (heap,) = [float(line.split()[1]) for line in lines if line.startswith("go_memstats_next_gc_bytes ")]
    return {"anon": int(fields["RssAnon"].split()[0]), "heap": int(heap) >> 10, "fds": len(os.listdir(f"/proc/{pid}/fd"))}


@pytest.mark.long
def test_pressure(model, tmp_path):
    """Pool and drive are full all the time, with ten times as much asked for: no request fails, and every byte is right."""
    block_tokens, block = 32, 128 << 10
    small = {"num_gpu_blocks_override": 120, "block_size": block_tokens, "max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 512}
    downs = {"idle": "1s", "onIdle": "copy", "high": 0.8, "low": 0.6}
    metrics = {"listen": f"127.0.0.1:{free_port()}"}
    with (
        Node(tmp_path / "node", size="18MiB", pool="10MiB", dram=downs, metrics=metrics) as node,
        Engine(model, tmp_path, node, {"match_wait_ms": 200}, **small) as engine,
    ):
        room = (8 << 20) // block + (16 << 20) // block
        shared = [p[:256] for p in prompts(60, count=20, length=256)]
        own = [prompts(61 + i, count=12, length=200) for i in range(20)]
        working_set = 20 * 256 // block_tokens + sum((256 + len(p)) // block_tokens - 8 for part in own for p in part)
        assert working_set >= 9 * room, (working_set, room)
        engine.run("wait_attached")
        engine.run("watch_bytes")
        some = [shared[i] + own[i][0] for i in range(3)]
        alone = [tokens(engine.generate([p])) for p in some]
        samples, requests = [], 0
        for n in range(4):
            out = engine.run("press", timeout_s=120, seconds=15, seed=n, shared=shared, own=own, at_once=8, count=8)
            assert out["reasons"] == {"length": out["requests"]}, out
            requests += out["requests"]
            samples.append(daemon_memory(node))
            print(out, samples[-1], node.cli("status")["tiers"])
        engine.run("wait_stored")
        checks, mine, its = engine.run("checks"), engine.run("metrics"), node.counted()
        print(requests, "requests", checks, mine, its)
        assert checks["wrong"] == checks["unknown"] == 0
        assert checks["loaded"] > 200 and mine["nvme_blocks"] > 50
        assert its["demote_blocks:moved"] > room and its["promote_blocks:moved"] > 50
        assert not [k for k in mine if k.startswith("errors")]
        assert its.get("broken_blocks:nvme", 0) == its.get("broken_blocks:pool", 0) == its.get("drives:degraded", 0) == 0
        assert samples[-1]["anon"] - samples[0]["anon"] < 16 << 10 and samples[-1]["heap"] < 2 * samples[0]["heap"] + 4096
        assert samples[-1]["fds"] <= samples[0]["fds"] + 2
        assert engine.run("reset")
        assert [tokens(engine.generate([p])) for p in some] == alone
        wait_for(lambda: set(engine.run("leftovers").values()) == {0}, 10, "nothing is left over")
