"""A rank's loads into lent blocks and out of lent memory, and the blocks that it keeps for offers, against a fake daemon."""

import os
import time

import pytest
from daemon import wait_for
from fake_daemon import BLOCK_BYTES, LAYERS, Lent

from kvferry import _native, wire
from kvferry.v1 import engine_pb2 as pb

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from sides import NAMES, Rank  # noqa: E402

from kvferry.vllm.holds import Hold  # noqa: E402
from kvferry.vllm.meta import LoadJob, StepMeta, StoreJob  # noqa: E402

TICKET = b"a ticket"


def rank_of(fake, **fields) -> Rank:
    """With blocks 1 and 2 stored under the first two names."""
    rank = Rank(fake, **fields)
    rank.store([1, 2], NAMES[:2])
    wait_for(lambda: len(fake.blocks) == 2, 5, "stored")
    return rank


@pytest.fixture
def direct(fake):
    fake.be_mortal()
    rank = rank_of(fake)
    fake.end_loads = False
    yield rank
    rank.worker.close()


def stays_unreported(rank: Rank) -> None:
    """Longer than the loader takes between two looks."""
    for _ in range(15):
        assert not rank.load_ended()
        time.sleep(0.01)


def operation(fake) -> tuple:
    """Session, word and number of the last Accept."""
    accept = wait_for(lambda: fake.seen("accept"), 5, "the Accept")[-1]
    (session,) = [s for s in fake.sessions.values() if s.hello.role == pb.ROLE_WORKER]
    return session, accept.load.word, accept.load.operation


def test_delivered_blocks_are_reported_when_the_operation_has_ended(fake, direct):
    direct.begin_load([8, 9], NAMES[:2], ticket=TICKET)
    session, _, number = operation(fake)
    wait_for(lambda: fake.seen("release"), 5, "released")
    stays_unreported(direct)
    session.end(number, pb.OUTCOME_COMMITTED)
    assert direct.end_load() == set()
    assert [direct.block(8), direct.block(9)] == [direct.block(1), direct.block(2)]
    assert direct.counted()["source_blocks:direct"] == 2
    (accept,) = fake.seen("accept")
    assert accept.region == 1 and accept.block_ids == [8, 9] and accept.ticket == TICKET


def test_the_word_tells_that_it_is_quiet(fake, direct):
    direct.begin_load([8, 9], NAMES[:2], ticket=TICKET)
    session, word, number = operation(fake)
    wait_for(lambda: fake.seen("release"), 5, "released")
    for other in (number - 1, number + 1, number << 8):
        session.quiet(word, other)
        stays_unreported(direct)
    session.quiet(word, number)
    assert direct.end_load() == set()


@pytest.mark.parametrize("answered", [True, False])
@pytest.mark.parametrize("proof", ["word", "closed", "death"])
def test_a_broken_stream_proves_nothing(fake, direct, answered, proof):
    fake.answer_loads = answered
    direct.begin_load([8, 9], NAMES[:2], ticket=TICKET)
    session, word, number = operation(fake)
    lost = direct.worker._session.attachment
    fake.break_streams()
    wait_for(lambda: lost.lost, 5, "the session is lost")
    stays_unreported(direct)
    # The outcome is decided all the same: a daemon that lives commits nothing.
    assert _native.load_u64(session.words, word * wire.WORD_STRIDE) & 0xFF in (wire.REVOKED, wire.COMMITTED)
    if proof == "word":
        session.quiet(word, number)
    elif proof == "closed":  # as it does for an operation that it never heard of
        session.quiet(word, wire.ALL_QUIET)
    else:
        fake.die()
    assert direct.end_load() == (set() if answered else {8, 9})


@pytest.mark.parametrize("why", ["deadline", "cancel"])
def test_a_deadline_decides_and_proves_nothing(fake, direct, why):
    fake.answer_loads = False
    direct.begin_load([8, 9], NAMES[:2], ticket=TICKET, timeout_ms=100 if why == "deadline" else 30000, cancel=why == "cancel")
    session, word, number = operation(fake)
    wait_for(lambda: fake.seen("release"), 5, "released")
    assert [list(m.operations) for m in fake.seen("revoke")] == [[number]]
    assert _native.load_u64(session.words, word * wire.WORD_STRIDE) == wire.word(number, wire.REVOKED)
    stays_unreported(direct)
    session.end(number, pb.OUTCOME_REVOKED)
    assert direct.end_load() == {8, 9}
    assert direct.counted()["unloaded_blocks:" + ("timeout" if why == "deadline" else "cancelled")] == 2


def test_a_word_that_is_used_again_is_not_quiet_by_what_it_held(fake, direct):
    direct.begin_load([8, 9], NAMES[:2], ticket=TICKET)
    session, word, number = operation(fake)
    session.quiet(word, number)
    session.end(number, pb.OUTCOME_COMMITTED)
    assert direct.end_load() == set()
    direct.begin_load([10, 11], NAMES[:2], ticket=TICKET)
    wait_for(lambda: len(fake.seen("release")) == 2, 5, "released")
    _, again, second = operation(fake)
    assert again == word and second == number + 1
    stays_unreported(direct)
    session.quiet(word, second)
    assert direct.end_load() == set()


def test_operations_of_one_load_are_all_waited_for(fake, direct):
    names = NAMES[:6]  # the fake takes four blocks in an operation
    direct.begin_load([8, 9, 10, 11, 12, 13], names, ticket=TICKET)
    wait_for(lambda: len(fake.seen("accept")) == 2, 5, "two operations")
    session, _, number = operation(fake)
    session.end(number, pb.OUTCOME_COMMITTED)
    stays_unreported(direct)
    session.end(number - 1, pb.OUTCOME_COMMITTED)
    assert direct.end_load() == {10, 11, 12, 13}


def test_blocks_that_the_ticket_does_not_name_come_from_the_pool(fake, direct):
    job = LoadJob("r", [8, 9], b"".join(NAMES[:2]), TICKET, 1, 5000)
    direct.step(StepMeta("", loads=[job]))
    (accept,) = wait_for(lambda: fake.seen("accept"), 5, "the Accept")
    (load,) = wait_for(lambda: fake.seen("load"), 5, "the Load")
    assert (accept.block_ids, accept.load.hashes, load.hashes) == ([8], NAMES[0], NAMES[1])


@pytest.mark.parametrize("why", ["off", "not allowed", "no pidfd", "staging", "plain load"])
def test_nothing_is_lent_to_be_written(fake, why):
    fake.direct = why != "not allowed"
    if why != "no pidfd":
        fake.be_mortal()
        fake.direct = why != "not allowed"
    rank = rank_of(fake, direct="off" if why == "off" else "auto", mode="staging" if why == "staging" else "lent", staging_bytes=1 << 20)
    assert rank.load([8, 9], NAMES[:2], ticket=None if why == "plain load" else TICKET) == set()
    assert not any(a.block_ids for a in fake.seen("accept"))
    assert rank.counted()["source_blocks:pool"] == 2
    (worker,) = [s for s in fake.sessions.values() if s.hello.role == pb.ROLE_WORKER]
    assert worker.hello.reads_lent
    assert worker.hello.regions[0].writable == (why not in ("off", "staging"))
    rank.worker.close()


# ---- out of lent memory ----


@pytest.fixture
def lent(fake):
    """Blocks of the first four names in another worker's memory; of the first two also in the pool."""
    rank = rank_of(fake)
    contents = {NAMES[0]: rank.block(1), NAMES[1]: rank.block(2), NAMES[2]: os.urandom(BLOCK_BYTES), NAMES[3]: os.urandom(BLOCK_BYTES)}
    fake.lent = Lent(contents, LAYERS, [5, 0, 3, 7])
    yield rank
    rank.worker.close()


def test_blocks_are_copied_out_of_lent_memory(fake, lent):
    for ids in ([8, 9, 10, 11], [12, 13, 14, 15]):
        assert lent.load(ids, NAMES[:4], ticket=TICKET) == set()
        assert [lent.block(n) for n in ids[:2]] == [lent.block(1), lent.block(2)]
        length = fake.lent.length
        assert lent.block(ids[3]) == fake.lent.memory[7 * length : 8 * length]
        fake.answer_fetches = False  # it is mapped now
    assert lent.counted()["source_blocks:lent"] == 8
    assert not fake.seen("load")


def test_a_block_that_was_written_again_is_asked_for_once_more(fake, lent):
    fake.lent.write_again(NAMES[0])
    fake.lent.write_again(NAMES[2])
    assert lent.load([8, 9, 10, 11], NAMES[:4], ticket=TICKET) == {10}
    assert lent.block(8) == lent.block(1)
    (load,) = fake.seen("load")
    assert load.hashes == NAMES[0] + NAMES[2]
    counted = lent.counted()
    assert counted["source_blocks:lent"] == 2 and counted["source_blocks:pool"] == 1
    assert counted["asked_again_blocks:generation"] == 2 and counted["unloaded_blocks:generation"] == 1


def test_memory_that_cannot_be_mapped_is_done_without(fake, lent):
    fake.answer_fetches = False
    assert lent.load([8, 9, 10], NAMES[:3], ticket=TICKET) == {10}
    assert lent.counted()["unloaded_blocks:unmapped"] == 1


def test_lent_memory_is_unmapped_when_its_owner_is_gone(fake, lent):
    assert lent.load([8], NAMES[:1], ticket=TICKET) == set()
    mapped = lent.worker._loader._lent._mapped
    assert len(mapped) == 1
    fake.tell(pb.SessionResponse(lent_gone=pb.LentGone(handle=99)))
    fake.tell(pb.SessionResponse(lent_gone=pb.LentGone(handle=7)))
    wait_for(lambda: not mapped, 5, "unmapped")


def test_mappings_are_bounded(fake, lent, monkeypatch):
    monkeypatch.setattr("kvferry.lent.MAPPED_MAX", 2)
    for handle in range(1, 6):
        fake.lent.lent.handle = handle
        assert lent.load([8], NAMES[:1], ticket=TICKET) == set()
    assert [handle for _, handle in lent.worker._loader._lent._mapped] == [4, 5]


def test_lent_memory_that_does_not_fit_is_refused(fake, lent):
    del fake.lent.lent.planes[0]
    assert lent.load([8, 9], NAMES[:2], ticket=TICKET) == {8, 9}
    assert lent.counted()["unloaded_blocks:protocol"] == 2


# ---- blocks that are kept for offers ----


def served(fake, offer: bytes) -> None:
    fake.tell(pb.SessionResponse(offer_served=pb.OfferServed(offer_id=offer, reason="done")))


def hold(rank: Rank, offer: bytes = b"o" * 16, stores=(), spills=None) -> set[str]:
    epoch = rank.worker._session.attachment.epoch
    rank.worker.before_step(StepMeta("", holds={"r": Hold(list(stores), offer, epoch)}, spills=spills or {}))
    return rank.worker.finished()[0]


def reported(rank: Rank) -> bool:
    return "r" in rank.worker.finished()[0]


@pytest.fixture
def rank(fake):
    r = Rank(fake)
    yield r
    r.worker.close()


def test_an_offer_that_is_served_ends_the_hold_once(fake, rank):
    assert hold(rank) == set()
    assert not reported(rank)
    served(fake, b"o" * 16)
    wait_for(lambda: reported(rank), 5, "reported")
    served(fake, b"o" * 16)
    wait_for(lambda: rank.worker._served, 5, "the second one was heard")
    assert not reported(rank)
    assert rank.counted()["lent_prompts:served"] == 1


def test_an_offer_that_is_served_before_the_hold_is_known(fake, rank):
    served(fake, b"o" * 16)
    wait_for(lambda: rank.worker._served, 5, "heard")
    assert hold(rank) == {"r"}
    assert not rank.worker._served and not reported(rank)


def test_what_was_served_is_not_remembered_for_ever(fake, rank, monkeypatch):
    monkeypatch.setattr("kvferry.vllm.worker._SERVED_MAX", 3)
    for n in range(10):
        served(fake, bytes([n]) * 16)
    wait_for(lambda: bytes([9]) * 16 in rank.worker._served, 5, "all are heard")
    assert list(rank.worker._served) == [bytes([n]) * 16 for n in (7, 8, 9)]


def test_the_age_of_a_hold(fake):
    rank = Rank(fake, spill_ms=100)
    began = time.monotonic()
    assert hold(rank) == set()
    wait_for(lambda: reported(rank), 5, "spilled")
    assert time.monotonic() - began >= 0.1
    assert not reported(rank)
    assert rank.counted()["lent_prompts:age"] == 1
    rank.worker.close()


def test_a_spill_that_the_scheduler_side_wants(fake, rank):
    assert hold(rank, spills={"r": "share"}) == {"r"}
    rank.worker.before_step(StepMeta("", spills={"r": "share"}))  # once more, too late
    assert not reported(rank)
    assert rank.counted()["lent_prompts:share"] == 1


def test_a_hold_waits_for_its_stores(fake):
    rank = Rank(fake, hold_ms=300)
    fake.store_gate.clear()
    rank.step(StepMeta("", stores=[StoreJob(1, "r", [1], NAMES[0], bytes(32))]))
    served(fake, b"o" * 16)
    wait_for(lambda: rank.worker._served, 5, "heard")
    began = time.monotonic()
    assert hold(rank, stores=[1]) == set()
    wait_for(lambda: reported(rank), 5, "reported")
    assert time.monotonic() - began >= 0.3
    wait_for(lambda: fake.seen("revoke"), 5, "revoked")
    rank.worker.close()


def test_a_daemon_that_is_gone_ends_holds(fake, rank):
    assert hold(rank) == set()
    attachment = rank.worker._session.attachment
    fake.break_streams()
    wait_for(lambda: attachment.lost, 5, "lost")
    wait_for(lambda: reported(rank), 5, "reported")
    assert rank.counted()["lent_prompts:gone"] == 1


def test_an_offer_with_another_daemon_is_not_waited_for(fake, rank):
    rank.worker.before_step(StepMeta("", holds={"r": Hold([], b"o" * 16, b"another epoch...")}))
    assert reported(rank) and not reported(rank)


def test_a_hold_without_an_offer_ends_with_its_stores(fake, rank):
    assert hold(rank, offer=b"") == {"r"}
    assert not [k for k in rank.counted() if k.startswith("lent_prompts")]
