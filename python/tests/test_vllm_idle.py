"""Idle mode without an engine: the scheduler side with vLLM's own block pool, ranks with a fake daemon. Time is what a test says it is."""

import logging
from collections import Counter
from types import SimpleNamespace

import pytest
from daemon import wait_for

from kvferry import wire
from kvferry.v1 import engine_pb2 as pb

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from sides import BLOCKS, Rank, Request, Side  # noqa: E402
from vllm.v1.core.block_pool import BlockPool  # noqa: E402
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id  # noqa: E402

from kvferry.attachment import Refusal  # noqa: E402
from kvferry.memory import GenerationTable  # noqa: E402
from kvferry.vllm.idle import IdleBlocks  # noqa: E402
from kvferry.vllm.idlestores import UNDER_WAY_MAX, IdleStores  # noqa: E402
from kvferry.vllm.meta import StoreJob  # noqa: E402
from kvferry.vllm.metrics import Tallies  # noqa: E402

PREFILL = {"do_remote_decode": True}
IDLE = {"store": "idle", "hbm_idle_s": 15}


class Engine(Side):
    """The scheduler side with a block pool, and one rank: what vLLM does with blocks is done here with the same calls."""

    def __init__(self, fake, **fields):
        super().__init__(fake, **IDLE, **fields)
        self.now = 1000.0
        self.pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=4)
        self.scheduler.use_pool(self.pool)
        self.idle = self.scheduler._idle
        self.rank = Rank(fake, **IDLE, **fields)
        self.idle._clock = self.rank.worker._idle._clock = lambda: self.now
        self.tables: dict[str, list] = {}
        self.meta = None

    def turn(self, tables=None, new=None):
        """One step, with the rank's part and its answer."""
        self.meta = self.step(tables, new)
        sent, _, _ = self.rank.step(self.meta)
        output = SimpleNamespace(
            kv_connector_worker_meta=self.rank.worker.take_meta(), finished_recving=set(), finished_sending=sent, invalid_block_ids=set()
        )
        self.scheduler.step_ended(output)
        for request_id in sent:
            self.pool.free_blocks(reversed(self.tables.pop(request_id)))
        return self.meta

    def begin(self, request) -> list[int]:
        """Admits a request and computes all of it; the ids of its blocks."""
        hits = []
        for name in request.block_hashes[: (request.num_tokens - 1) // 4]:
            if (found := self.pool.get_cached_block(name, [0])) is None:
                break
            hits += found
        self.pool.touch(hits)
        blocks = hits + self.pool.get_new_blocks(-(-request.num_tokens // 4) - len(hits))
        self.tables[request.request_id] = blocks
        ids = [b.block_id for b in blocks]
        self.admit(request, ids, local_tokens=4 * len(hits))
        for block, name in zip(blocks[len(hits) :], request.block_hashes[len(hits) :]):
            key = make_block_hash_with_group_id(name, 0)
            block.set_block_hash(key, num_tokens=None)
            self.pool.cached_block_hash_to_block.insert(key, block)
        request.hits = len(hits)
        self.turn({request.request_id: ids})
        request.num_computed_tokens = request.num_tokens
        return ids

    def end(self, request, well: bool = True):
        blocks = self.tables[request.request_id]
        keeps, params = self.scheduler.finished(request, [b.block_id for b in blocks], well)
        if not keeps:
            self.pool.free_blocks(reversed(self.tables.pop(request.request_id)))
        self.turn()
        return params

    def serve(self, request) -> list[int]:
        ids = self.begin(request)
        self.end(request)
        return ids

    def fill(self, blocks: int, request_id: str = "fill") -> list[int]:
        """A request that needs so many blocks, and goes on."""
        return self.begin(Request(request_id, 4 * blocks, salt=99))

    def later(self, seconds: float):
        """No step comes in the meantime."""
        self.now += seconds
        self.rank.worker._idle.begin_due()

    def stores(self, count: int) -> list[pb.Store]:
        return self.hear("store", count)

    def settle(self):
        """Steps until everything that was begun has ended, and the scheduler side knows."""
        idle = self.rank.worker._idle
        wait_for(lambda: not idle._running, 5, "stores end")
        self.turn()

    def names(self) -> set[bytes]:
        return {key[32:64] for key in self.fake.blocks}

    def counted(self) -> dict[str, float]:
        stats = self.scheduler.take_stats()
        return {k: v for k, v in (stats.data if stats else {}).items() if k.startswith(("idle", "given"))}

    def close(self):
        self.rank.worker.close()
        super().close()


@pytest.fixture
def engine(fake):
    e = Engine(fake)
    yield e
    e.close()


@pytest.fixture
def giving(fake):
    e = Engine(fake, hbm_give_back=True)
    yield e
    e.close()


# ---- when ----


def test_what_nobody_used_for_the_idle_time_is_stored_without_a_step(engine):
    request = Request("a", 11)
    ids = engine.begin(request)
    engine.now += 60  # it runs for long: that is no idleness
    engine.end(request)
    engine.later(14.9)
    assert not engine.fake.seen("store")
    engine.later(0.1)
    (store,) = engine.stores(1)
    assert list(store.block_ids) == ids[:2] and store.hashes == b"".join(request.block_hashes)
    assert store.parents == bytes(32) + request.block_hashes[0]
    engine.settle()
    assert engine.names() == set(request.block_hashes)
    assert engine.counted() == {"idle_blocks:stored": 2} and len(engine.idle) == 0
    assert engine.pool.get_cached_block(request.block_hashes[0], [0])  # kept: nobody asked to give it back


def test_a_block_that_is_used_again_waits_anew(engine):
    first, second = Request("a", 12), Request("b", 8)
    ids = engine.serve(first)
    engine.now += 10
    engine.begin(second)
    assert second.hits == 1
    engine.later(10)
    (store,) = engine.stores(1)
    assert list(store.block_ids) == ids[1:], "those that were not used are due"
    engine.settle()
    engine.end(second)
    engine.later(14)
    assert len(engine.fake.seen("store")) == 1
    engine.later(1)
    assert ids[0] in engine.stores(2)[1].block_ids
    engine.settle()
    counted = engine.counted()
    # b computed its last block itself, as vLLM has it: a second place of the same hash.
    assert counted == {"idle_blocks:used": 1, "idle_blocks:stored": 2 + 2}


def test_a_block_that_another_request_has_is_not_idle(engine):
    first, second = Request("a", 12), Request("b", 12)
    engine.begin(first)
    engine.begin(second)
    engine.end(first)
    engine.later(100)
    (store,) = engine.stores(1)
    assert list(store.hashes) == list(first.block_hashes[2]), "the others are in b's table"
    engine.end(second)
    engine.later(15)
    assert len(engine.stores(2)[1].block_ids) == 3


def test_what_is_resident_already_is_not_stored_again(engine):
    request = Request("a", 12)
    engine.resident(request, 2)
    engine.scheduler.arrived(request)
    engine.matched(request)
    blocks = engine.pool.get_new_blocks(3)
    engine.tables["a"] = blocks
    engine.scheduler.allocated(request, [b.block_id for b in blocks], 8)
    engine.step()
    engine.ended(received=["a"])
    for block, name in zip(blocks, request.block_hashes):
        block.set_block_hash(make_block_hash_with_group_id(name, 0), num_tokens=None)
    request.num_computed_tokens = 12
    engine.end(request)
    engine.later(15)
    assert [list(s.block_ids) for s in engine.stores(1)] == [[blocks[2].block_id]]


# ---- reuse ----


def test_a_block_that_is_reused_before_it_is_due_is_not_stored(engine):
    request = Request("a", 20)
    ids = engine.serve(request)
    reused = set(engine.fill(13)) & set(ids)
    assert len(reused) == 3 and set(engine.meta.idle_reused) == reused
    engine.later(15)
    (store,) = engine.stores(1)
    assert set(store.block_ids) == set(ids) - reused
    engine.settle()
    assert engine.names() == {name for i, name in zip(ids, request.block_hashes) if i not in reused}
    assert engine.counted() == {"idle_blocks:reused": 3, "idle_blocks:stored": 2}


def test_nothing_is_begun_where_all_blocks_are_reused(engine):
    engine.serve(Request("a", 20))
    engine.fill(15)
    engine.later(100)
    idle = engine.rank.worker._idle
    assert not idle._waiting and not idle._taken and not idle._of_block and not engine.fake.seen("store")
    assert len(engine.idle) == 0 and not engine.idle._jobs
    assert engine.counted() == {"idle_blocks:reused": 5}


def test_a_block_that_is_reused_in_mid_copy_is_revoked(engine):
    engine.fake.store_gate.clear()
    engine.serve(Request("a", 20))
    engine.later(15)
    engine.stores(1)
    meta = engine.step(*admitted(engine, Request("b", 52, salt=7)))
    assert meta.idle_reused
    engine.rank.worker.before_step(meta)
    (_, operation) = next(iter(engine.rank.worker._idle._running.values()))
    assert operation.state() == wire.REVOKED, "before anything is written"
    engine.fake.store_gate.set()
    engine.settle()
    assert not engine.names()
    counted = engine.counted()
    assert counted["idle_blocks:reused"] == 3 and counted["idle_blocks:unstored"] == 2
    assert engine.rank.counted()["unstored_blocks:revoked"] == 5


def admitted(engine, request):
    blocks = engine.pool.get_new_blocks(request.num_tokens // 4)
    engine.tables[request.request_id] = blocks
    ids = [b.block_id for b in blocks]
    engine.admit(request, ids)
    return ({request.request_id: ids},)


def test_a_block_that_is_used_in_mid_copy_is_stored(engine):
    engine.fake.store_gate.clear()
    request = Request("a", 12)
    engine.serve(request)
    engine.later(15)
    engine.stores(1)
    engine.begin(Request("b", 13))
    engine.fake.store_gate.set()
    engine.settle()
    assert engine.names() == set(request.block_hashes)


def test_a_block_that_was_reused_in_the_step_after_its_request_is_not_idle(engine):
    request = Request("a", 20)
    engine.begin(request)
    engine.scheduler.finished(request, [b.block_id for b in engine.tables["a"]], True)
    engine.pool.free_blocks(reversed(engine.tables.pop("a")))
    engine.fill(13)  # the same step's allocation
    engine.later(15)
    assert len(engine.stores(1)[0].block_ids) == 2


def test_a_block_that_a_running_request_takes_is_not_stored(engine):
    ids = engine.serve(Request("a", 20))
    filled = engine.fill(10)
    (block,) = engine.pool.get_new_blocks(1)
    assert block.block_id == ids[-1]
    engine.turn({"fill": filled}, new={"fill": [block.block_id]})
    engine.later(15)
    assert ids[-1] not in engine.stores(1)[0].block_ids


# ---- what else ends it ----


def test_blocks_of_an_aborted_request_are_stored(engine):
    request = Request("a", 12)
    engine.begin(request)
    request.num_computed_tokens = 8
    engine.end(request, well=False)
    engine.later(15)
    assert len(engine.stores(1)[0].block_ids) == 2


def test_blocks_of_an_aborted_load_are_not(engine):
    request = Request("a", 8)
    engine.resident(request, 2)
    engine.scheduler.arrived(request)
    engine.matched(request)
    engine.scheduler.allocated(request, [5, 6], 8)
    engine.step()
    engine.scheduler.finished(request, [5, 6], False)
    engine.turn()
    assert not engine.meta.idle_stores and len(engine.idle) == 0


def test_a_reset_forgets_what_has_not_begun(engine):
    engine.fake.store_gate.clear()
    first, second = Request("a", 8), Request("b", 8, salt=2)
    engine.serve(first)
    engine.now += 5
    engine.serve(second)
    engine.later(10)
    engine.stores(1)
    engine.scheduler.reset()
    engine.turn()
    engine.fake.store_gate.set()
    engine.later(100)
    wait_for(lambda: engine.names() == set(first.block_hashes), 5, "what was being read is right, in the space of the old weights")
    assert len(engine.fake.seen("store")) == 1 and len(engine.idle) == 0
    # And from then on in the new one.
    wait_for(lambda: engine.rank.worker._session.space_id(engine.meta.weights_generation), 5, "the new space")
    engine.serve(Request("c", 8, salt=3))
    engine.later(15)
    old, new = engine.stores(2)
    assert old.space_id != new.space_id


@pytest.mark.parametrize("why", ["failed", "rescue_meta"])
def test_a_hook_that_fails_forgets_everything(engine, why):
    engine.serve(Request("a", 8))
    if why == "failed":
        engine.scheduler.failed("a hook")
        engine.turn()
    else:
        engine.rank.step(engine.scheduler.rescue_meta())
    engine.later(100)
    assert not engine.fake.seen("store") and len(engine.idle) == 0 and not engine.rank.worker._idle._waiting


def test_a_daemon_that_is_not_there_costs_nothing(engine):
    engine.serve(Request("a", 8))
    engine.fake.stop()
    wait_for(lambda: engine.rank.worker._session.attachment is None, 5, "the daemon is gone")
    engine.later(15)
    engine.turn()
    assert engine.counted() == {"idle_blocks:unstored": 2} and len(engine.idle) == 0
    assert engine.rank.counted()["unstored_blocks:not_attached"] == 2


def test_a_handoff_is_stored_at_once(giving):
    request = Request("a", 12, params=PREFILL)
    giving.begin(request)
    assert [len(job.block_ids) for job in giving.meta.stores] == [3]
    params = giving.end(request)
    assert params["kvferry_ticket"]
    (offer,) = giving.hear("offer")
    assert len(offer.block_ids) == 3
    giving.later(100)
    giving.turn()
    assert not giving.meta.idle_stores, "its blocks are kept"
    giving.fake.tell(pb.SessionResponse(offer_served=pb.OfferServed(offer_id=offer.offer_id)))
    wait_for(lambda: giving.turn() and "a" not in giving.tables, 5, "the blocks come back")
    giving.turn()
    giving.later(15)
    giving.stores(2)
    giving.settle()
    assert giving.counted()["given_back_blocks"] == 3


def test_without_prefix_caching_it_is_eager(fake):
    side = Side(fake, **IDLE)
    side.scheduler.use_pool(BlockPool(BLOCKS, enable_caching=False, hash_block_size=4))
    side.admit(Request("a", 8), [5, 6])
    assert side.step({"a": [5, 6]}).stores
    side.close()


# ---- giving back ----


def test_hbm_is_given_back_once_it_is_stored(giving):
    request = Request("a", 12)
    ids = giving.serve(request)
    giving.fake.store_gate.clear()
    giving.later(15)
    giving.turn()
    assert giving.pool.get_cached_block(request.block_hashes[0], [0])
    giving.fake.store_gate.set()
    giving.settle()
    assert giving.counted() == {"idle_blocks:stored": 3, "given_back_blocks": 3}
    assert not any(giving.pool.get_cached_block(name, [0]) for name in request.block_hashes)
    assert giving.pool.get_num_free_blocks() == BLOCKS - 1
    # They are the first to be taken, and a hotter one is not evicted for lack of them.
    assert {b.block_id for b in giving.pool.get_new_blocks(3)} == set(ids)


def test_hbm_is_given_back_where_all_of_it_was_resident(giving):
    request = Request("a", 12)
    giving.resident(request, 3)
    giving.begin(request)
    wait_for(lambda: giving.rank.worker.finished()[1], 5, "it is loaded")
    giving.ended(received=["a"])
    giving.end(request)
    giving.later(15)
    giving.settle()
    assert giving.counted()["given_back_blocks"] == 3


@pytest.mark.parametrize("what", ["used", "in use", "reused", "refused", "partly"])
def test_hbm_is_not_given_back(giving, what):
    request = Request("a", 12)
    giving.serve(request)
    if what == "refused":
        giving.fake.outcome = pb.OUTCOME_FAILED
    if what == "partly":
        giving.fake.slots = 2
    giving.fake.store_gate.clear()
    giving.later(15)
    giving.stores(1)
    if what == "used":
        giving.serve(Request("b", 13))
    elif what == "in use":
        giving.begin(Request("b", 13))
    elif what == "reused":
        giving.fill(13)
    giving.fake.store_gate.set()
    giving.settle()
    counted = giving.counted()
    assert "given_back_blocks" not in counted
    if what != "reused":
        assert all(giving.pool.get_cached_block(name, [0]) for name in request.block_hashes)
    if what == "used":
        giving.later(15)
        giving.settle()
        assert giving.counted()["given_back_blocks"] == 3


# ---- several ranks, bounds ----


class Table:
    """Two ranks' scheduler side alone."""

    def __init__(self, blocks: int, ranks: int = 1, gives_back: bool = True):
        self.pool = BlockPool(blocks, enable_caching=True, hash_block_size=4)
        self.table = GenerationTable(blocks)
        self.tallies = Tallies()
        self.now = 0.0
        self.idle = IdleBlocks(self.pool, self.table, ranks, 15, gives_back, self.tallies, lambda: self.now)

    def end(self, request_id: str, count: int) -> list[StoreJob]:
        blocks = self.pool.get_new_blocks(count)
        ids = [b.block_id for b in blocks]
        self.table.bump(ids)
        self.idle.reused(ids)
        names = [f"{request_id}{i}".encode().ljust(32) for i in range(count)]
        for block, name in zip(blocks, names):
            key = make_block_hash_with_group_id(name, 0)
            block.set_block_hash(key, num_tokens=None)
            self.pool.cached_block_hash_to_block.insert(key, block)
        self.idle.finished(request_id, ids, names, [bytes(32), *names[:-1]], 0, held=False)
        self.pool.free_blocks(reversed(blocks))
        return self.idle.new_jobs()

    def cached(self) -> int:
        return sum(b.block_hash is not None for b in self.pool.blocks)


@pytest.mark.parametrize(("answers", "given_back"), [("kk", True), ("kl", False), ("ll", False), ("k", False)])
def test_every_rank_must_have_stored_it(answers, given_back):
    t = Table(16, ranks=2)
    (job,) = t.end("a", 3)
    for answer in answers:
        kept, lost = Counter(), Counter()
        (kept if answer == "k" else lost)[job.store_id] += 1
        t.idle.settled(kept, lost)
    assert t.cached() == (0 if given_back else 3)
    assert len(t.idle) == (3 if answers == "k" else 0)


def test_a_long_prompt_is_given_back_all_at_once():
    t = Table(256)
    jobs = t.end("a", 130)
    assert [len(job.block_ids) for job in jobs] == [64, 64, 2]
    for job in jobs:
        assert t.cached() == 130, "no block is left behind without its parent"
        t.idle.settled(Counter([job.store_id]), Counter())
    assert t.cached() == 0


def test_a_long_prompt_of_which_a_part_was_not_stored_stays():
    t = Table(256)
    first, second, third = t.end("a", 130)
    t.idle.settled(Counter([first.store_id, third.store_id]), Counter([second.store_id]))
    assert t.cached() == 130 and not t.idle._jobs


def test_bookkeeping_does_not_outgrow_the_memory():
    t = Table(64)
    stores = IdleStores(lambda job, on_end: pytest.fail("begun"), Tallies(), logging.getLogger("test"), lambda: t.now)
    for n in range(2000):
        jobs = t.end(f"r{n}", 1 + n % 40)
        # What the step's metadata would carry: the jobs of this round have taken blocks of those before.
        stores.take([], [b for job in jobs for b in job.block_ids])
        stores.add(jobs)
        if n % 3 == 0:
            used = [job.block_ids[0] for job in jobs]
            stores.take(t.idle.used(used), [])
        assert len(t.idle) <= 63 and len(t.idle._jobs) <= 63 and not t.idle._finished
        assert len(stores._waiting) == len(t.idle._jobs) and len(stores._of_block) == len(t.idle)
        assert sum(map(len, stores._taken.values())) <= 63


def test_few_stores_are_under_way_at_once():
    begun, now = [], 0.0
    operation = SimpleNamespace(revoke=lambda: True)

    def begin(job, on_end):
        if job.store_id == 3:
            raise Refusal("no_word")
        begun.append((job.store_id, on_end))
        return operation

    tallies = Tallies()
    stores = IdleStores(begin, tallies, logging.getLogger("test"), lambda: now)
    stores.add([StoreJob(n, "r", [n], bytes(32), bytes(32), due=1.0 * n) for n in range(1, 11)])
    assert stores.begin_due() == 1.0
    now = 8.5
    assert stores.begin_due() is None and [n for n, _ in begun] == [1, 2, 4, 5]
    assert len(begun) == UNDER_WAY_MAX
    committed = pb.OperationEnd(outcome=pb.OUTCOME_COMMITTED, blocks_stored=1)
    begun[0][1](operation, committed)
    begun[1][1](operation, pb.OperationEnd(outcome=pb.OUTCOME_EXPIRED))
    assert stores.begin_due() is None and [n for n, _ in begun] == [1, 2, 4, 5, 6, 7]
    for _, on_end in begun[2:]:
        on_end(operation, committed)
    assert stores.begin_due() == 0.5 and [n for n, _ in begun[6:]] == [8]
    assert stores.take_settled() == (Counter([1, 4, 5, 6, 7]), Counter([2, 3]))
    assert tallies.take().data == {"unstored_blocks:no_word": 1}


def test_a_store_that_still_reads_is_revoked_though_its_block_became_idle_again():
    revoked = []
    stores = IdleStores(
        lambda job, on_end: SimpleNamespace(revoke=lambda: revoked.append(job.store_id)), Tallies(), logging.getLogger("test"), lambda: 0.0
    )
    stores.add([StoreJob(1, "r", [5, 6], bytes(64), bytes(64))])
    stores.begin_due()
    stores.take([5], [])
    stores.add([StoreJob(2, "s", [5], bytes(32), bytes(32), due=15.0)])
    stores.take([], [5])
    assert revoked == [1] and not stores._waiting


def test_a_store_that_cannot_be_begun_raises_nothing(caplog):
    def begin(job, on_end):
        raise RuntimeError("broken")

    tallies = Tallies()
    stores = IdleStores(begin, tallies, logging.getLogger("test"), lambda: 0.0)
    stores.add([StoreJob(1, "r", [5], bytes(32), bytes(32))])
    stores.begin_due()
    assert tallies.take().data == {"unstored_blocks:internal": 1} and "idle store" in caplog.text


def test_the_thread_begins_what_is_due():
    begun = []
    stores = IdleStores(lambda job, on_end: begun.append(job.store_id), Tallies(), logging.getLogger("test"))
    stores.start()
    stores.add([StoreJob(1, "r", [5], bytes(32), bytes(32))])
    wait_for(lambda: begun == [1], 5, "begun")
    stores._running.clear()
    stores.close()


def test_the_thread_outlives_an_error(caplog):
    def clock():
        raise RuntimeError("broken")

    tallies = Tallies()
    stores = IdleStores(lambda job, on_end: None, tallies, logging.getLogger("test"), clock)
    stores.start()
    stores.add([StoreJob(1, "r", [5], bytes(32), bytes(32))])
    wait_for(lambda: stores.take_settled()[1] == Counter([1]), 5, "given up")
    stores._clock = lambda: 0.0
    stores.add([StoreJob(2, "r", [5], bytes(32), bytes(32))])
    wait_for(lambda: 2 in stores._running, 5, "begun")
    stores._running.clear()
    stores.close()
    assert tallies.take().data == {"errors:idle": 1}
