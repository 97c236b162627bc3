"""The connector in real engines, with a daemon that has a drive: a file, from which blocks come back."""

import random

import pytest
from daemon import Daemon, wait_for
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

    def all_down(self, blocks: int) -> bool:
        return self.counted().get("demote_blocks:moved", 0) >= blocks and self.blocks() == 0

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
    assert tokens(engine.generate(asked)) == reference(asked)
    engine.run("wait_stored")
    wait_for(lambda: node.all_down(STORED), 20, "the blocks are on the drive only")


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
        assert set(engine.run("leftovers").values()) == {0}
