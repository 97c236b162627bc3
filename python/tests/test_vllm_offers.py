"""The scheduler side's offers, generations, holds, transfers and peers, against a fake daemon."""

import base64

import pytest
from daemon import wait_for

from kvferry import _native
from kvferry.v1 import engine_pb2 as pb

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from sides import BLOCKS, Request, Side  # noqa: E402

PREFILL = {"do_remote_decode": True}
TRANSFER = {"id": "0f" * 16, "secret": "a1" * 16}
DECODE = {"do_remote_prefill": True, "kvferry_transfer": {**TRANSFER, "address": "10.0.0.1:7400"}}


@pytest.fixture
def side(fake):
    s = Side(fake)
    yield s
    s.close()


def table(side) -> list[int]:
    shared = side.scheduler._table.shared
    return [_native.load_u64(shared.map, 8 * n) for n in range(BLOCKS)]


def compute(side, request, blocks: list[int]):
    """Admits a request and computes all of it; its stores have ended."""
    side.admit(request, blocks)
    meta = side.step({request.request_id: blocks})
    side.ended(ended={job.store_id: 1 for job in meta.stores})
    request.num_computed_tokens = request.num_tokens
    return meta


def finish(side, request, blocks: list[int], well: bool = True):
    return side.scheduler.finished(request, blocks, well)


# ---- generations ----


def test_the_daemon_gets_a_table_that_it_cannot_write(side):
    (session,) = side.fake.sessions.values()
    assert session.hello.generations == BLOCKS
    given = session.regions[0xFFFFFFFC]
    compute(side, Request("a", 8), [5, 6])
    assert [_native.load_u64(given, 8 * n) for n in (4, 5, 6)] == [0, 1, 1]


def test_blocks_are_written_anew_from_the_allocation_on(side):
    # Not when the step's metadata is made: it may leave at any moment after.
    request = Request("a", 8)
    side.admit(request, [5, 6])
    assert table(side)[5:8] == [1, 1, 0]
    side.step({"a": [5, 6]}, new={"a": [7]})
    assert table(side)[5:8] == [1, 1, 1]
    # What the engine's own cache has is read only.
    side.admit(Request("b", 12), [5, 6, 9], local_tokens=8)
    assert table(side)[5:10] == [1, 1, 1, 0, 1]
    # A request that nobody knows.
    side.scheduler.allocated(Request("c", 4), [3], 0)
    assert table(side)[3] == 1


@pytest.mark.parametrize("why", ["reset", "failed", "rescue_meta"])
def test_all_blocks_are_taken_for_written(side, why):
    getattr(side.scheduler, why)(*(["a hook"] if why == "failed" else []))
    assert table(side) == [1] * BLOCKS


def test_what_a_rank_waits_for_outlives_a_step_that_fails(side):
    request = Request("a", 8, params=PREFILL)
    compute(side, request, [5, 6])
    assert finish(side, request, [5, 6])[0]
    assert set(side.scheduler.rescue_meta().holds) == {"a"}


def test_a_load_that_could_not_be_begun_ends(side):
    request = Request("a", 8)
    side.resident(request, 2)
    side.scheduler.arrived(request)
    assert side.matched(request) == (8, True)
    side.scheduler.unallocated(request, [5, 6], 8)
    (job,) = side.step().loads
    assert job.block_ids == [5, 6] and job.timeout_ms == 0
    side.ended(received=["a"], bad=[5, 6])
    assert not side.scheduler._loads


# ---- offers ----


def test_an_offer_lends_the_prompts_blocks(side):
    request = Request("a", 11, params=PREFILL)
    compute(side, request, [5, 6, 7])
    side.scheduler._table.bump([6])
    keeps, params = finish(side, request, [5, 6, 7])
    assert keeps and params["kvferry_ticket"]
    (offer,) = side.hear("offer")
    assert (offer.region, offer.block_ids, offer.generations) == (1, [5, 6], [1, 2])
    hold = side.step().holds["a"]
    assert (hold.offer_id, hold.epoch, hold.store_ids) == (offer.offer_id, side.fake.epoch, [])


@pytest.mark.parametrize("why", ["staging", "off", "preempted", "old weights"])
def test_blocks_are_not_lent(fake, why):
    side = Side(fake, **{"staging": {"mode": "staging"}, "off": {"spill_ms": 0}}.get(why, {}))
    request = Request("a", 8, params=PREFILL)
    compute(side, request, [5, 6])
    if why == "old weights":
        side.scheduler._reads.forget_contents()
    keeps, _ = finish(side, request, [] if why == "preempted" else [5, 6])
    assert not keeps
    (offer,) = side.hear("offer")
    assert not offer.block_ids and not offer.generations
    side.close()


def test_nothing_is_kept_where_nothing_was_offered(side):
    side.fake.stop()
    wait_for(lambda: side.scheduler._session.attachment is None, 5, "the daemon is gone")
    request = Request("a", 8, params=PREFILL)
    side.scheduler.arrived(request)
    keeps, params = finish(side, request, [5, 6])
    assert not keeps and "kvferry_ticket" not in params


def keep(side, request_id: str, blocks: list[int]) -> None:
    request = Request(request_id, 4 * len(blocks), salt=blocks[0], params=PREFILL)
    compute(side, request, blocks)
    assert finish(side, request, blocks)[0]


def test_the_oldest_holds_go_first_above_the_share(fake):
    side = Side(fake, spill_percent=25)  # of 16 blocks
    keep(side, "a", [1, 2])
    keep(side, "b", [2, 3])
    assert side.step().spills == {}
    keep(side, "c", [4, 5])  # five blocks: one is shared
    assert side.step().spills == {"a": "share"}
    assert side.step().spills == {}
    side.ended(sent=["a"])
    keep(side, "d", [6, 7, 8, 9])
    assert side.step().spills == {"b": "share", "c": "share"}
    side.ended(sent=["b", "c", "d"])
    assert len(side.scheduler._holds) == 0 and not side.scheduler._holds._blocks
    side.close()


def test_a_request_that_finds_no_room_gets_that_of_the_oldest_holds(fake):
    side = Side(fake, spill_percent=100)
    for n, name in enumerate("abc"):
        keep(side, name, [2 * n, 2 * n + 1])
    side.step()
    waiting = Request("w", 12, salt=99)
    side.scheduler.arrived(waiting)
    assert side.matched(waiting) == (0, False)
    # The engine asked, and then allocated nothing.
    assert side.step().spills == {"a": "pressure", "b": "pressure"}
    assert side.step().spills == {}
    side.close()


def test_a_request_that_would_be_preempted_for_a_hold_is_not(fake):
    side = Side(fake, spill_percent=100)
    assert not side.scheduler.frees_pending()
    keep(side, "a", [1, 2])
    keep(side, "b", [3, 4])
    assert side.scheduler.frees_pending() and side.scheduler.frees_pending()
    assert side.step().spills == {"a": "pressure"}
    side.ended(sent=["a"])
    assert side.scheduler.frees_pending()
    assert side.step().spills == {"b": "pressure"}
    # Nothing comes: nobody waits for it.
    wait_for(lambda: not side.scheduler.frees_pending(), 5, "preempts again")
    side.close()


def test_blocks_that_a_store_still_reads_are_not_waited_for(fake):
    side = Side(fake, spill_percent=100)
    request = Request("a", 8, params=PREFILL)
    side.admit(request, [5, 6])
    side.step({"a": [5, 6]})
    assert finish(side, request, [5, 6])[0]
    assert not side.scheduler.frees_pending()
    side.close()


def test_a_reset_ends_all_holds(side):
    keep(side, "a", [1, 2])
    side.scheduler.reset()
    assert side.step().spills == {"a": "reset"}


# ---- transfers ----


def test_a_transfer_is_offered_when_its_prompt_arrives(side):
    request = Request("a", 11, params={**PREFILL, "kvferry_transfer": TRANSFER})
    side.scheduler.arrived(request)
    (offer,) = side.hear("offer")
    assert offer.open_ended and offer.offer_id.hex() == TRANSFER["id"] and offer.secret.hex() == TRANSFER["secret"]
    assert offer.hashes == b"".join(request.block_hashes) and offer.tokens == 11 and not offer.block_ids
    side.matched(request)
    side.scheduler.allocated(request, [5, 6, 7], 0)
    keeps, params = finish(side, request, [5, 6, 7])
    assert keeps and pb.Ticket.FromString(base64.b64decode(params["kvferry_ticket"])).offer_id == offer.offer_id
    (complete,) = side.hear("complete_offer")
    assert (complete.offer_id, complete.region, complete.block_ids, complete.generations) == (offer.offer_id, 1, [5, 6], [1, 1])
    assert side.step().holds["a"].offer_id == offer.offer_id
    assert len(side.fake.seen("offer")) == 1 and not side.fake.seen("end_offer")


@pytest.mark.parametrize("when", ["waiting", "loading", "running"])
def test_a_transfer_ends_with_its_request(side, when):
    request = Request("a", 8, params={**PREFILL, "kvferry_transfer": TRANSFER})
    if when == "loading":
        side.resident(request, 2)
    side.scheduler.arrived(request)
    if when != "waiting":
        side.scheduler.allocated(request, [5, 6], side.matched(request)[0])
        side.step()
    assert finish(side, request, [5, 6], well=False) == (False, None)
    (end,) = side.hear("end_offer")
    assert end.offer_id.hex() == TRANSFER["id"] and end.reason == "aborted"


def test_a_transfer_ends_when_the_weights_change(side):
    request = Request("a", 8, params={**PREFILL, "kvferry_transfer": TRANSFER})
    side.admit(request, [5, 6])
    side.scheduler.reset()
    side.hear("end_offer")
    assert not finish(side, request, [5, 6])[0]
    assert not side.fake.seen("complete_offer")


def test_a_transfer_is_offered_anew_to_a_daemon_that_was_restarted(side):
    request = Request("a", 8, params={**PREFILL, "kvferry_transfer": TRANSFER})
    side.admit(request, [5, 6])
    side.hear("offer")
    before = side.scheduler._session.attachment
    side.fake.break_streams()
    wait_for(lambda: side.scheduler._session.attachment not in (None, before), 10, "attached again")
    assert finish(side, request, [5, 6])[0]
    again = side.hear("offer", 2)[1]
    assert again.open_ended and again.offer_id.hex() == TRANSFER["id"]
    (complete,) = side.hear("complete_offer")
    assert complete.offer_id == again.offer_id and complete.block_ids == [5, 6]


def test_a_malformed_transfer_is_counted_and_offered_as_usual(side):
    request = Request("a", 8, params={**PREFILL, "kvferry_transfer": {"id": "x", "secret": 7}})
    side.admit(request, [5, 6])
    assert not side.fake.seen("offer")
    assert finish(side, request, [5, 6])[1]["kvferry_ticket"]
    assert side.scheduler.take_stats().data["transfers:malformed"] == 1


def test_a_transfer_is_taken_before_its_prompt_is_computed(side):
    request = Request("a", 11, params=DECODE)
    assert side.admit(request, [5, 6, 7]) == 8
    (job,) = side.step().loads
    ticket = pb.Ticket.FromString(job.ticket)
    assert (ticket.offer_id.hex(), ticket.secret.hex(), ticket.epoch) == (TRANSFER["id"], TRANSFER["secret"], bytes(16))
    assert (ticket.addresses, ticket.blocks, ticket.tokens, ticket.tail_hash) == (["10.0.0.1:7400"], 2, 11, request.block_hashes[1])
    assert job.block_ids == [5, 6] and job.timeout_ms == 30000


def test_a_malformed_transfer_is_computed(side):
    params = {**DECODE, "kvferry_transfer": {**TRANSFER, "address": "nowhere"}}
    assert side.admit(Request("a", 8, params=params), [5, 6]) == 0
    assert side.scheduler.take_stats().data["tickets:malformed"] == 1


def test_only_what_the_ticket_names_is_asked_of_it(side):
    prefill = Request("p", 9, params=PREFILL)
    compute(side, prefill, [1, 2, 3])
    params = finish(side, prefill, [1, 2, 3])[1]
    # The decode engine's prompt is longer, and more of it is in the pool.
    for local, offered in ((0, 2), (4, 1), (8, 0)):
        request = Request(f"d{local}", 20, params=params)
        side.resident(request, 4)
        side.scheduler.arrived(request)
        state = side.scheduler._requests[request.request_id]
        wait_for(lambda state=state: state.match.blocks is not None, 5, "the look-up is answered")
        assert side.matched(request, local) == (16 - local, True)
        side.scheduler.allocated(request, [5, 6, 7, 8, 9], 16 - local)
        job = side.step().loads[-1]
        assert job.offered == offered and (job.ticket is not None) == (offered > 0)
        side.ended(received=[request.request_id])


@pytest.mark.parametrize(("fields", "stored"), [({}, [5, 6]), ({"direct": "off"}, []), ({"mode": "staging"}, [])])
def test_what_was_delivered_is_stored_like_what_is_computed(fake, fields, stored):
    side = Side(fake, **fields)
    request = Request("a", 9, params=DECODE)
    assert side.admit(request, [5, 6, 7]) == 8
    side.step()
    side.ended(received=["a"])
    request.num_computed_tokens = 8
    side.scheduler.allocated(request, [5, 6, 7], 0)
    assert [job.block_ids for job in side.step({"a": [5, 6, 7]}).stores] == ([stored] if stored else [])
    side.close()


# ---- the next turn ----


def test_peers_are_asked_with_what_computing_takes(side):
    side.fake.peer_blocks = 1
    side.scheduler._pace._block_s = 0.0025
    request = Request("a", 16, params={"kvferry_peers": ["10.0.0.1:7400", "node-b:7400"]})
    side.resident(request, 2)
    assert side.admit(request, [5, 6, 7, 8]) == 12
    (match,) = side.fake.matches
    assert match.peers == ["10.0.0.1:7400", "node-b:7400"] and match.compute_us == 2500
    (job,) = side.step().loads
    assert job.block_ids == [5, 6, 7] and job.ticket is None and job.request_id == match.request_id
    counted = side.scheduler.take_stats().data
    assert counted["peer_hints:accepted"] == 1 and counted["peer_blocks"] == 1


def test_malformed_peers_are_counted_and_ignored(side):
    assert side.admit(Request("a", 8, params={"kvferry_peers": ["a:1"] * 5}), [5, 6]) == 0
    (match,) = side.fake.matches
    assert not match.peers
    assert side.scheduler.take_stats().data["peer_hints:malformed"] == 1


def test_the_pace_is_that_of_steps_which_compute_prompts(side):
    pace = side.scheduler._pace
    decoding = Request("d", 8)
    side.admit(decoding, [1, 2])
    side.step({"d": [1, 2]})
    side.ended()
    assert pace.block_us == 0
    pace._clock = iter([10.0, 10.4, 20.0, 20.8]).__next__
    for name in "pq":
        request = Request(name, 400, salt=ord(name))
        side.admit(request, list(range(3, 9)))
        side.step({name: list(range(100))})
        side.ended()
    # Four tokens a block: 4 ms, then 8 ms with a quarter of the weight.
    assert pace.block_us == 5000
