"""Loads whose blocks come up from a drive, late and in parts, and what the scheduler side says about keeping blocks, against a fake daemon."""

import logging
import time

import pytest
from daemon import wait_for

from kvferry import _native, wire
from kvferry.v1 import engine_pb2 as pb

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from sides import NAMES, Rank, Request, Side  # noqa: E402

from kvferry.vllm.scheduler import COMING_MAX  # noqa: E402

IDS = [8, 9, 10, 11]


@pytest.fixture
def rank(fake):
    """With blocks 1 to 4 stored under the first four names; the test answers Loads."""
    r = Rank(fake)
    r.store([1, 2, 3, 4], NAMES[:4])
    wait_for(lambda: len(fake.blocks) == 4, 5, "stored")
    fake.held = []
    yield r
    r.worker.close()


def begin(fake, rank, **how):
    rank.begin_load(IDS, NAMES[:4], **how)
    return wait_for(lambda: fake.held, 5, "the Load")[-1]


def copied(rank) -> list[bool]:
    return [rank.block(to) == rank.block(of) for of, to in zip((1, 2, 3, 4), IDS)]


def state(session, load) -> int:
    word = _native.load_u64(session.words, load.word * wire.WORD_STRIDE)
    return word & 0xFF if word >> 8 == load.operation else wire.FREE


def stays_unreported(rank) -> None:
    for _ in range(15):  # longer than the loader takes between two looks
        assert not rank.load_ended()
        time.sleep(0.01)


@pytest.mark.parametrize("parts", [[[0], [1, 2, 3]], [[2, 3], [0, 1]], [[3], [1], [0], [2]], [[0, 1, 2, 3], []], [[3], [0, 1, 2], []]])
def test_parts_come_in_any_order(fake, rank, parts):
    session, load = begin(fake, rank)
    told = 0
    for n, part in enumerate(parts):
        if told < 4:
            stays_unreported(rank)
        fake.answer(session, load, part, last=n == len(parts) - 1)
        told += len(part)
    assert rank.end_load() == set()
    assert copied(rank) == [True] * 4
    assert rank.counted()["loaded_blocks"] == 4
    wait_for(lambda: fake.seen("release"), 5, "released")


def test_blocks_are_copied_as_they_come(fake, rank):
    session, load = begin(fake, rank)
    fake.answer(session, load, [2], last=False)
    wait_for(lambda: copied(rank) == [False, False, True, False], 5, "the first part is copied")
    stays_unreported(rank)
    fake.answer(session, load, [0, 1], last=False)
    wait_for(lambda: copied(rank) == [True, True, True, False], 5, "the second part is copied")
    fake.answer(session, load, [3], last=True)
    assert rank.end_load() == set()


@pytest.mark.parametrize(
    ("status", "reason"),
    [(pb.BLOCK_STATUS_EXPIRED, "expired"), (pb.BLOCK_STATUS_FAILED, "failed"), (pb.BLOCK_STATUS_BUSY, "busy"), (pb.BLOCK_STATUS_MISS, "miss")],
)
def test_what_the_drive_does_not_give_is_computed(fake, rank, status, reason):
    session, load = begin(fake, rank)
    fake.answer(session, load, [0, 1], last=False)
    wait_for(lambda: copied(rank)[:2] == [True, True], 5, "copied")
    fake.spoil = "status"
    fake.answer(session, load, [2, 3], last=True, status=status)
    assert rank.end_load() == {10, 11}
    counted = rank.counted()
    assert counted["loaded_blocks"] == 2 and counted[f"unloaded_blocks:{reason}"] == 2


def test_a_drive_that_is_slower_than_the_deadline(fake, rank):
    session, load = begin(fake, rank, timeout_ms=200)
    fake.answer(session, load, [1], last=False)
    began = time.monotonic()
    assert rank.end_load() == {8, 10, 11}
    assert time.monotonic() - began < 2
    assert copied(rank) == [False, True, False, False]
    assert rank.counted()["unloaded_blocks:timeout"] == 3
    wait_for(lambda: fake.seen("revoke"), 5, "revoked")
    assert state(session, load) == wire.REVOKED
    # The engine computes in these blocks now: what comes after must not be written there.
    before = [rank.block(n) for n in IDS]
    fake.answer(session, load, [0], last=False)
    fake.answer(session, load, [2, 3], last=True)
    for _ in range(15):
        assert [rank.block(n) for n in IDS] == before
        time.sleep(0.01)
    assert "loaded_blocks" not in rank.counted()


def test_an_abort_while_blocks_come_up(fake, rank):
    session, load = begin(fake, rank)
    fake.answer(session, load, [0], last=False)
    wait_for(lambda: copied(rank)[0], 5, "copied")
    rank.worker._loader.cancel("r")
    assert rank.end_load() == {9, 10, 11}
    before = [rank.block(n) for n in IDS]
    # The request comes again under its name, into other blocks, while the first answer is still on its way.
    fake.held.clear()
    rank.begin_load([12, 13], NAMES[:2])
    again = wait_for(lambda: fake.held, 5, "the second Load")[0]
    fake.answer(session, load, [1, 2, 3], last=True)
    stays_unreported(rank)
    fake.answer(*again, [1], last=False)
    fake.answer(*again, [0], last=True)
    assert rank.end_load() == set()
    assert [rank.block(12), rank.block(13)] == [rank.block(1), rank.block(2)]
    assert [rank.block(n) for n in IDS] == before


def test_a_daemon_that_is_gone_between_two_parts(fake, rank):
    session, load = begin(fake, rank, timeout_ms=30000)
    fake.answer(session, load, [3], last=False)
    wait_for(lambda: copied(rank)[3], 5, "copied")
    fake.break_streams()
    assert rank.end_load() == {8, 9, 10}


def test_a_block_that_is_told_twice_is_copied_once(fake, rank):
    session, load = begin(fake, rank)
    fake.answer(session, load, [0, 1], last=False)
    fake.answer(session, load, [1, 2], last=False)
    fake.answer(session, load, [3], last=True)
    assert rank.end_load() == set()
    assert rank.counted()["loaded_blocks"] == 4


def test_a_last_part_that_leaves_blocks_out(fake, rank):
    session, load = begin(fake, rank)
    fake.answer(session, load, [2], last=False)
    fake.answer(session, load, [], last=True)
    assert rank.end_load() == {8, 9, 11}
    assert rank.counted()["unloaded_blocks:unanswered"] == 3


# ---- the scheduler side ----


@pytest.fixture
def side(fake):
    s = Side(fake)
    yield s
    s.close()


def counted(side) -> dict[str, float]:
    stats = side.scheduler.take_stats()
    return stats.data if stats else {}


def test_every_look_up_says_what_a_block_takes_to_compute(fake, side):
    """As the daemon takes it: for one block, all ranks side by side (match.go, prefix)."""
    side.admit(Request("a", 16), [5, 6, 7, 8])
    assert fake.matches[-1].compute_us == 0  # not known
    clock = [100.0]
    side.scheduler._pace._clock = lambda: clock[0]
    big = Request("b", 512)
    side.scheduler.arrived(big)
    side.scheduler._requests["b"].may_store = False
    side.step({"b": []})
    clock[0] += 0.256  # 512 tokens in 256 ms: 2 ms for a block of 4
    side.ended()
    side.admit(Request("c", 8), [9, 10])
    match = fake.matches[-1]
    assert match.compute_us == 2000 and not match.peers


def waiting(side, name: str, blocks: int = 4, on_drive: int = 2):
    """A request whose look-up was answered and that the engine has not asked about: all places are taken."""
    request = Request(name, 4 * blocks, salt=ord(name))
    side.resident(request, blocks - 1)
    side.fake.nvme_blocks = on_drive
    side.scheduler.arrived(request)
    wait_for(lambda: side.scheduler._requests[name].match.blocks is not None, 5, "the answer")
    return request


def prefetched(side) -> list[bytes]:
    """What the daemon was asked for so far; a message behind it has arrived."""
    side.scheduler._leases.add("behind")
    before = len(side.fake.seen("release_lease"))
    side.step()
    wait_for(lambda: len(side.fake.seen("release_lease")) > before, 5, "the daemon has read on")
    side.scheduler._leases.add("behind")
    side.scheduler._release_leases()
    wait_for(lambda: len(side.fake.seen("release_lease")) > before + 1, 5, "the daemon has read on")
    return [m.hashes for m in side.fake.seen("prefetch")]


def test_what_waits_is_brought_up_from_the_drive(side):
    request = waiting(side, "a")
    assert prefetched(side) == [b"".join(request.block_hashes[:3])]
    assert len(prefetched(side)) == 1  # once
    assert side.matched(request) == (12, True)
    side.scheduler.allocated(request, [5, 6, 7, 8], 12)
    assert len(prefetched(side)) == 1
    assert counted(side)["prefetched_requests"] == 1
    assert not side.scheduler._coming


@pytest.mark.parametrize("why", ["placed", "gone", "no drive", "other weights", "asked anew"])
def test_what_is_not_brought_up(side, why):
    request = waiting(side, "a", on_drive=0 if why == "no drive" else 2)
    if why == "placed":
        side.matched(request)
        side.scheduler.allocated(request, [5, 6, 7, 8], 12)
    elif why == "gone":
        side.scheduler.finished(request, [], False)
    elif why == "other weights":
        side.scheduler.reset()
    elif why == "asked anew":
        side.scheduler._requests["a"].match = None
    assert prefetched(side) == []
    assert not side.scheduler._matcher.on_drive and not side.scheduler._coming


def test_the_first_ones_are_brought_up_and_others_when_these_have_a_place(side):
    requests = [waiting(side, name) for name in "abcde"]
    assert len(prefetched(side)) == COMING_MAX == 2
    side.matched(requests[0])
    side.scheduler.allocated(requests[0], [5, 6, 7, 8], 12)
    side.scheduler.finished(requests[2], [], False)  # which was not brought up
    assert prefetched(side)[2:] == [b"".join(requests[3].block_hashes[:3])]
    side.scheduler.finished(requests[1], [], False)
    assert prefetched(side)[3:] == [b"".join(requests[4].block_hashes[:3])]


def test_what_is_on_a_drive_is_counted(fake, side):
    request = Request("a", 16)
    side.resident(request, 3)
    fake.nvme_blocks = 2
    assert side.admit(request, [5, 6, 7, 8]) == 12
    got = counted(side)
    assert got["matched_blocks"] == 3 and got["nvme_blocks"] == 2


@pytest.mark.parametrize(
    ("said", "sent"),
    [
        ("none", pb.RETENTION_NONE),
        ("short", pb.RETENTION_SHORT),
        ("normal", pb.RETENTION_NORMAL),
        ("long", pb.RETENTION_LONG),
        (None, pb.RETENTION_NORMAL),
    ],
)
def test_a_request_says_how_long_its_blocks_are_kept(fake, side, said, sent):
    request = Request("a", 8, params={"kvferry_retention": said, "do_remote_decode": True})
    side.admit(request, [5, 6])
    meta = side.step({"a": [5, 6]})
    (job,) = meta.stores
    assert job.retention == sent
    rank = Rank(fake)
    rank.step(meta)
    (store,) = wait_for(lambda: fake.seen("store"), 5, "the Store")
    assert store.retention == sent
    rank.worker.close()
    _, params = side.scheduler.finished(request, [5, 6], True)
    assert params.get("kvferry_retention") == said
    assert counted(side).get(f"retentions:{said}", 0) == (said is not None)


@pytest.mark.parametrize("said", ["forever", "", 7, ["long"], {"long": 1}, True, "long\n" * 1000])
def test_a_retention_that_is_none_is_ignored(side, said, caplog):
    for name in "ab":
        request = Request(name, 8, salt=ord(name), params={"kvferry_retention": said, "do_remote_decode": True})
        side.admit(request, [5, 6])
        (job,) = side.step({name: [5, 6]}).stores
        assert job.retention == pb.RETENTION_NORMAL
        _, params = side.scheduler.finished(request, [5, 6], True)
        assert "kvferry_retention" not in params
    assert counted(side)["retentions:malformed"] == 2
    (record,) = [r for r in caplog.records if "kvferry_retention" in r.getMessage() and r.levelno == logging.WARNING]
    assert len(record.getMessage()) < 300
