"""Scheduler side and loader without an engine: vLLM's classes are imported, its calls are made by hand."""

import threading
import time
from types import SimpleNamespace

import pytest
from daemon import wait_for
from fake_daemon import BLOCK_BYTES

from kvferry.v1 import engine_pb2 as pb

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

import torch  # noqa: E402
from sides import NAMES, Rank, Request, Side  # noqa: E402

from kvferry.vllm.config import unsupported  # noqa: E402
from kvferry.vllm.layout import _tensor_planes  # noqa: E402
from kvferry.vllm.loader import Loader, _Load, _Part  # noqa: E402
from kvferry.vllm.meta import LoadJob  # noqa: E402
from kvferry.vllm.refusal import RefusingWorker  # noqa: E402
from kvferry.vllm.space import weights_digest  # noqa: E402


@pytest.fixture
def side(fake):
    s = Side(fake)
    yield s
    s.scheduler.close()


def test_full_blocks_are_stored_once(side):
    request = Request("a", 11)
    assert side.admit(request, [5, 6, 7]) == 0
    meta = side.step({"a": [5, 6, 7]})
    (job,) = meta.stores
    assert job.block_ids == [5, 6] and job.hashes == b"".join(request.block_hashes)
    assert job.parents == bytes(32) + request.block_hashes[0]
    assert not side.step({"a": [5, 6, 7]}).stores


def test_what_is_resident_is_loaded_and_not_stored(side):
    request = Request("a", 16)
    side.resident(request, 3)
    assert side.admit(request, [5, 6, 7, 8], local_tokens=4) == 8
    meta = side.step()
    (job,) = meta.loads
    assert job.block_ids == [6, 7] and job.hashes == b"".join(request.block_hashes[1:3])
    side.ended(received=["a"])
    request.num_computed_tokens = 12
    side.scheduler.allocated(request, [5, 6, 7, 8], 0)
    (job,) = side.step({"a": [5, 6, 7, 8]}).stores
    assert job.block_ids == [8]
    wait_for(lambda: side.step() and side.fake.seen("release_lease"), 5, "the lease is given back")


def test_blocks_of_a_failed_load_are_stored_and_not_loaded_again(side):
    request = Request("a", 16)
    side.resident(request, 4)
    assert side.admit(request, [5, 6, 7, 8]) == 16
    side.step()
    side.ended(received=["a"], bad=[7])
    request.num_computed_tokens = 8
    side.scheduler.allocated(request, [5, 6, 7, 8], 0)
    (job,) = side.step({"a": [5, 6, 7, 8]}).stores
    assert job.block_ids == [7, 8]


def test_all_is_stored_anew_where_the_first_block_failed(side):
    request = Request("a", 16)
    side.resident(request, 4)
    assert side.admit(request, [5, 6, 7, 8]) == 16
    side.step()
    side.ended(received=["a"], bad=[5, 7])
    # vLLM asks again, and the answer that is remembered says that all of it is resident.
    assert side.matched(request) == (0, False)
    side.scheduler.allocated(request, [9, 10, 11, 12], 0)
    (job,) = side.step({"a": [9, 10, 11, 12]}).stores
    assert job.block_ids == [9, 10, 11, 12]


def test_reused_blocks_are_revoked_before_they_are_written(side):
    first, second = Request("a", 8, salt=1), Request("b", 12, salt=2)
    side.admit(first, [5, 6])
    (job,) = side.step({"a": [5, 6]}).stores
    side.scheduler.finished(first, [5, 6], True)
    # b hits block 5 in the engine's cache, and is given 6 anew.
    side.admit(second, [5, 6, 7], local_tokens=4)
    assert side.step({"b": [5, 6, 7]}).revokes == [job.store_id]
    side.ended(ended={job.store_id: 1})
    third = Request("c", 4, salt=3)
    side.admit(third, [5])
    # Only b's own store still reads: a's has ended.
    assert side.step({"c": [5]}).revokes == [job.store_id + 1]


def test_reuse_by_a_running_request(side):
    first, second = Request("a", 8, salt=1), Request("b", 4, salt=2)
    side.admit(first, [5, 6])
    (job,) = side.step({"a": [5, 6]}).stores
    side.scheduler.finished(first, [5, 6], True)
    side.admit(second, [7])
    side.step({"b": [7]})
    assert side.step(new={"b": [6]}).revokes == [job.store_id]


def test_a_shared_prefix_is_stored_by_one(side):
    first, second = Request("a", 8), Request("b", 12, params={"do_remote_decode": True})
    side.admit(first, [5, 6])
    (job,) = side.step({"a": [5, 6]}).stores
    side.admit(second, [5, 6, 7], local_tokens=8)
    (own,) = side.step({"b": [5, 6, 7]}).stores
    assert own.block_ids == [7]
    # But who hands it over keeps its blocks until that store has ended.
    hold, params = side.scheduler.finished(second, [5, 6, 7], True)
    assert hold and params["do_remote_prefill"] and params["kvferry_ticket"]
    hold = side.step().holds["b"]
    assert hold.store_ids == [job.store_id, own.store_id] and hold.epoch == side.fake.epoch
    wait_for(lambda: side.fake.seen("offer"), 5, "the offer")
    (offer,) = side.fake.seen("offer")
    assert offer.hashes == b"".join(second.block_hashes) and offer.tokens == 12 and offer.offer_id == hold.offer_id


def test_only_a_good_end_is_offered(side):
    request = Request("a", 8, params={"do_remote_decode": True})
    side.admit(request, [5, 6])
    assert side.scheduler.finished(request, [5, 6], False) == (False, None)


def test_aborted_load_is_cancelled_and_holds_nothing(side):
    request = Request("a", 8)
    side.resident(request, 2)
    side.admit(request, [5, 6])
    side.step()
    assert side.scheduler.finished(request, [5, 6], False) == (False, None)
    assert side.step().cancels == ["a"]
    side.ended(received=["a"], bad=[5, 6])
    assert not side.scheduler._loads and not side.scheduler._requests


def test_blocks_of_old_weights_are_not_stored(side):
    request = Request("a", 8)
    side.admit(request, [5, 6])
    side.scheduler.reset()
    meta = side.step({"a": [5, 6]})
    assert not meta.stores and meta.weights_generation
    wait_for(lambda: side.scheduler._session.space_id(meta.weights_generation), 5, "the new space")
    other = Request("b", 8)
    side.admit(other, [5, 6])
    assert side.step({"b": [5, 6]}).stores


def test_a_request_that_runs_on_over_a_reset_is_not_stored(side):
    # Its new blocks are computed with the new weights, on top of what the old ones made.
    request = Request("a", 16)
    side.admit(request, [5, 6, 7, 8])
    side.scheduler.reset()
    assert not side.step({"a": [5, 6, 7, 8]}, new={"a": [9]}).stores
    side.matched(request)  # it begins again from nothing
    side.scheduler.allocated(request, [5, 6, 7, 8], 0)
    assert side.step({"a": [5, 6, 7, 8]}).stores


def test_a_hook_that_fails_takes_everything_back(side):
    side.scheduler.failed("allocated")
    assert side.step().revoke_all
    assert not side.step().revoke_all
    assert side.scheduler.rescue_meta().revoke_all


def test_silent_daemon_costs_20_ms_once(fake):
    side = Side(fake, match_wait_ms=20, match_timeout_ms=200)
    fake.answer_matches.clear()
    first, second = Request("a", 8), Request("b", 8)
    for request, most_s in ((first, 0.1), (second, 0.005)):
        side.scheduler.arrived(request)
        began = time.monotonic()
        assert side.matched(request) == (0, False)
        assert time.monotonic() - began < most_s
        wait_for(lambda: side.scheduler._matcher._silent, 5, "the daemon is known to be silent")
    side.scheduler.close()


def test_a_rank_that_refuses_ends_loads(side):
    request = Request("a", 8)
    side.resident(request, 2)
    side.admit(request, [5, 6])
    worker = RefusingWorker()
    worker.before_step(meta := side.step())
    worker.start_loads(meta)
    worker.start_stores(meta)
    assert worker.finished() == (set(), {"a"}, {5, 6})
    side.scheduler.step_ended(
        SimpleNamespace(
            kv_connector_worker_meta=worker.take_meta(), finished_recving={"a"}, finished_sending=set(), invalid_block_ids={5, 6}
        )
    )
    other = Request("b", 8)
    assert side.admit(other, [7, 8]) == 0
    assert not side.step({"b": [7, 8]}).stores


def engine_config(groups=1, algorithm="sha256_cbor", **parallel):
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    shape = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    full = FullAttentionSpec(**shape, sliding_window=parallel.pop("full_window", None))
    spec = SlidingWindowSpec(**shape, sliding_window=32) if parallel.pop("window", False) else full
    sizes = {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1, **parallel}
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes), cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm)
    )
    return vllm_config, SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)] * groups)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, None),
        ({"groups": 2}, "2 KV groups"),
        ({"window": True}, "SlidingWindowSpec"),
        ({"full_window": 64}, "a window"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"decode_context_parallel_size": 2}, "context parallelism"),
        ({"nnodes": 2}, "several nodes"),
        ({"algorithm": "xxhash"}, "PYTHONHASHSEED"),
    ],
)
def test_what_is_not_supported_is_named(fields, said, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    reason = unsupported(*engine_config(**fields))
    assert reason is None if said is None else said in reason


def test_planes_of_layouts():
    def planes(t, blocks):
        return [(p.base, p.stride, p.bytes) for p in _tensor_planes("l", t, blocks, 0)]

    # A storage with the layers one after the other; K and V apart; blocks that the backend cuts in two.
    whole = torch.zeros(1000)
    assert planes(torch.as_strided(whole, (5, 2, 4), (8, 4, 1), 40), 5) == [(160, 32, 32)]
    assert planes(torch.zeros(2, 5, 4), 5) == [(0, 16, 16), (80, 16, 16)]
    assert planes(torch.zeros(10, 4), 5) == [(0, 32, 32)]
    # The inside of a block may be permuted, but must be in one piece.
    assert planes(torch.zeros(5, 4, 2).permute(0, 2, 1), 5) == [(0, 32, 32)]
    for bad in (torch.zeros(4, 5, 8)[:, :, :4].permute(1, 0, 2), torch.zeros(3, 4), torch.as_strided(whole, (10, 4), (8, 1))):
        with pytest.raises(ValueError, match="KV memory of l"):
            planes(bad, 5)


def test_weights_digest(tmp_path):
    from safetensors.torch import save_file

    weights = {"a": torch.zeros(5000), "b": torch.ones(3)}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    first = weights_digest(str(tmp_path))
    (tmp_path / "README.md").write_text("not a weight")
    assert weights_digest(str(tmp_path)) == first
    weights["a"][2500] = 1  # in the middle: no sample will do
    save_file(weights, tmp_path / "model.safetensors")
    second = weights_digest(str(tmp_path))
    (tmp_path / "config.json").write_text('{"rope_theta": 1}')
    assert len({first, second, weights_digest(str(tmp_path))}) == 3


# ---- a rank ----


@pytest.fixture(params=["lent", "staging"])
def rank(fake, request):
    r = Rank(fake, mode=request.param, staging_bytes=1 << 20)
    yield r
    r.worker.close()


def test_bytes_come_back(fake, rank):
    ids = [3, 1, 15, 0, 7]
    want = [rank.block(n) for n in ids]
    rank.store(ids, NAMES[:5])
    wait_for(lambda: len(fake.blocks) == 5, 5, "stored")
    assert rank.load([8, 9, 10, 11, 12], NAMES[:5]) == set()
    assert [rank.block(n) for n in (8, 9, 10, 11, 12)] == want


@pytest.mark.parametrize("spoil", ["generation", "checksum", "status"])
def test_wrong_blocks_are_reported(fake, rank, spoil):
    rank.store([1, 2, 3], NAMES[:3])
    wait_for(lambda: len(fake.blocks) == 3, 5, "stored")
    fake.spoil = spoil
    assert rank.load([8, 9, 10], NAMES[:3]) == {8, 9, 10}
    fake.spoil = None
    assert rank.load([8, 9, 10, 11], [*NAMES[:3], NAMES[9]]) == {11}
    released = wait_for(lambda: fake.seen("release"), 5, "released")
    assert sum(m.wrong_blocks for m in released) == (0 if spoil == "status" else 3)


def test_silent_daemon_is_given_up(fake):
    rank = Rank(fake)
    fake.answer_loads = False
    assert rank.load([8, 9], NAMES[:2], timeout_ms=200) == {8, 9}
    assert rank.worker.take_stats().data["unloaded_blocks:timeout"] == 2
    rank.worker.close()


def test_cancelled_and_unattached_loads_end(fake):
    rank = Rank(fake)
    fake.answer_loads = False
    assert rank.load([8, 9], NAMES[:2], cancel=True) == {8, 9}
    fake.stop()
    wait_for(lambda: rank.worker._session.attachment is None, 5, "the daemon is gone")
    assert rank.load([8, 9], NAMES[:2]) == {8, 9}
    rank.worker.close()


def test_daemon_that_goes_away_ends_loads(fake):
    rank = Rank(fake)
    fake.answer_loads = False
    threading.Timer(0.2, fake.stop).start()
    assert rank.load([8, 9], NAMES[:2]) == {8, 9}
    rank.worker.close()


def test_copies_that_do_not_fit_the_memory_are_refused(fake):
    rank = Rank(fake)
    loader: Loader = rank.worker._loader
    attachment = rank.worker._session.attachment
    for fields in ({"offsets": [2**63]}, {"header_offsets": [4]}, {"shard_bytes": 7}, {"crc32c": []}):
        good = {"offsets": [0], "header_offsets": [0], "generations": [0], "crc32c": [0], "shard_bytes": rank.worker._memory.block_bytes}
        message = pb.LoadResult(status=b"\1", **{**good, **fields})
        load = _Load(LoadJob("r", [1], NAMES[0], None, 0, 5000), time.monotonic() + 5, (attachment, bytes(32)))
        loader._take(load, SimpleNamespace(lends=False), _Part([0]), message)
        assert load.failed == {0}
    rank.worker.close()


def test_an_answer_out_of_range_ends_the_load(fake):
    rank = Rank(fake)
    rank.store([1, 2], NAMES[:2])
    wait_for(lambda: len(fake.blocks) == 2, 5, "stored")
    fake.answer_loads = False
    loader: Loader = rank.worker._loader
    loader.begin(LoadJob("r", [8, 9], b"".join(NAMES[:2]), None, 0, 30000), rank.worker._session.space_id(""))
    load = wait_for(lambda: loader._loads.get("r"), 5, "begun")
    (op,) = wait_for(lambda: list(load.parts), 5, "sent")
    load.missing.discard(0)  # as if the first block had come
    loader._events.put(lambda: loader._result("r", op, pb.LoadResult(operation=op.number, first=2, status=b"\1")))
    wait_for(lambda: loader._ended, 5, "the load ends")
    assert loader.take_ended() == ({"r"}, {9})
    rank.worker.close()


def test_full_staging_buffer(fake):
    rank = Rank(fake, mode="staging", staging_bytes=4 * BLOCK_BYTES)
    rank.store([1, 2, 3, 4, 5], NAMES[:5])
    assert rank.worker.take_stats().data == {"unstored_blocks:staging_full": 5}
    assert rank.worker.take_meta().ended == {1: 1}
    rank.worker.close()
