"""Scheduler side and ranks without an engine: vLLM's classes are imported, its calls are made by hand."""

import logging
from collections import Counter
from types import SimpleNamespace

import torch
from daemon import wait_for
from fake_daemon import BLOCK_BYTES, LAYERS, _space_id

from kvferry.v1 import engine_pb2 as pb
from kvferry.vllm.config import Config
from kvferry.vllm.meta import LoadJob, RankMeta, StepMeta, StoreJob
from kvferry.vllm.scheduler import Scheduler
from kvferry.vllm.worker import Worker

BLOCKS, PER_LAYER = 16, BLOCK_BYTES // LAYERS // 4
NAMES = [bytes([n]) * 32 for n in range(1, 11)]
log = logging.getLogger("test")


def config(fake, **fields) -> Config:
    return Config(**{"socket": fake.engine_socket, "descriptors": fake.descriptor_socket, "match_wait_ms": 5000, **fields})


def hello(role) -> pb.Hello:
    return pb.Hello(wire_version=1, role=role, instance="i", ranks=1, space=pb.Space(model="m", block_tokens=4))


class Request(SimpleNamespace):
    """Tokens 0..tokens-1 in blocks of 4."""

    def __init__(self, request_id: str, tokens: int, salt: int = 0, params=None):
        hashes = [bytes([salt, n]) * 16 for n in range(tokens // 4)]
        super().__init__(
            request_id=request_id,
            num_tokens=tokens,
            num_prompt_tokens=tokens,
            num_computed_tokens=0,
            block_hashes=hashes,
            kv_transfer_params=params,
        )


class Side:
    """The scheduler side, with the calls that vLLM would make."""

    def __init__(self, fake, **fields):
        self.fake = fake
        self.scheduler = Scheduler(config(fake, **fields), hello(pb.ROLE_SCHEDULER), 1, BLOCKS, log)
        wait_for(lambda: self.scheduler._session.attachment, 10, "attached")

    def matched(self, request, local_tokens: int = 0):
        return wait_for(lambda: self._matched(request, local_tokens), 5, "an answer")

    def _matched(self, request, local_tokens):
        tokens, asynchronous = self.scheduler.matched_tokens(request, local_tokens)
        return None if tokens is None else (tokens, asynchronous)

    def hear(self, kind: str, count: int = 1) -> list:
        """So many messages of a kind that the daemon got."""
        return wait_for(lambda: len(got := self.fake.seen(kind)) >= count and got, 5, f"{count} x {kind}")

    def close(self):
        self.scheduler.close()

    def admit(self, request, table: list[int], local_tokens: int = 0) -> int:
        self.scheduler.arrived(request)
        tokens, _ = self.matched(request, local_tokens)
        self.scheduler.allocated(request, table, tokens)
        return tokens

    def step(self, tables: dict[str, list[int]] | None = None, new: dict[str, list[int]] | None = None):
        """tables: of the requests that compute all their tokens in this step; new: block ids that running ones get."""
        tables, new = tables or {}, new or {}
        requests = self.scheduler._requests
        return self.scheduler.step_meta(
            SimpleNamespace(
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=list(new), new_block_ids=[(ids,) for ids in new.values()], resumed_req_ids=set()
                ),
                num_scheduled_tokens={r: requests[r].request.num_tokens - requests[r].request.num_computed_tokens for r in tables},
                total_num_scheduled_tokens=len(tables),
                kv_connector_block_state=SimpleNamespace(get_block_ids=lambda r: (tables[r],)),
            )
        )

    def ended(self, ended=(), received=(), bad=(), refuses=False, sent=()):
        self.scheduler.step_ended(
            SimpleNamespace(
                kv_connector_worker_meta=RankMeta(Counter(ended), refuses),
                finished_recving=set(received),
                finished_sending=set(sent),
                invalid_block_ids=set(bad),
            )
        )

    def resident(self, request, blocks: int):
        space = _space_id(hello(pb.ROLE_SCHEDULER).space)
        for name in request.block_hashes[:blocks]:
            self.fake.blocks[self.fake._key(space, name, 0)] = (0, 0, 0)


class Rank:
    def __init__(self, fake, **fields):
        whole = torch.zeros(BLOCKS * LAYERS * PER_LAYER, dtype=torch.float32)
        whole.uniform_()
        shape, stride = (BLOCKS, 2, 4, PER_LAYER // 8), (PER_LAYER, PER_LAYER // 2, PER_LAYER // 8, 1)
        self.caches = {f"layer{n}": torch.as_strided(whole, shape, stride, n * BLOCKS * PER_LAYER) for n in range(LAYERS)}
        self.worker = Worker(config(fake, **fields), hello(pb.ROLE_WORKER), BLOCKS, log)
        before = [self.block(n) for n in range(BLOCKS)]
        self.worker.register(self.caches)
        wait_for(lambda: self.worker._session.attachment, 10, "attached")
        if self.worker._staging is None:
            # The engine's memory moved: what lay in it is not needed at that time, so it is not copied.
            for cache in self.caches.values():
                cache.uniform_()
        else:
            assert [self.block(n) for n in range(BLOCKS)] == before

    def block(self, n: int) -> bytes:
        return b"".join(t[n].contiguous().numpy().tobytes() for t in self.caches.values())

    def step(self, meta):
        self.worker.before_step(meta)
        self.worker.start_loads(meta)
        self.worker.start_stores(meta)
        return self.worker.finished()

    def store(self, ids: list[int], names: list[bytes]):
        self.step(StepMeta("", stores=[StoreJob(1, "r", ids, b"".join(names), bytes(32) * len(ids))]))

    def begin_load(self, ids: list[int], names: list[bytes], cancel=False, ticket: bytes | None = None, timeout_ms: int = 5000):
        job = LoadJob("r", ids, b"".join(names), ticket, len(ids) if ticket else 0, timeout_ms)
        _, received, bad = self.step(StepMeta("", loads=[job], cancels=["r"] if cancel else []))
        self._answer = received, bad

    def load_ended(self) -> bool:
        if not self._answer[0]:
            self._answer = self.worker.finished()[1:]
        return bool(self._answer[0])

    def end_load(self) -> set[int]:
        """The blocks that failed."""
        wait_for(self.load_ended, 10, "the load ends")
        received, bad = self._answer
        assert received == {"r"}
        return bad

    def load(self, ids: list[int], names: list[bytes], **how) -> set[int]:
        self.begin_load(ids, names, **how)
        return self.end_load()

    def counted(self) -> dict[str, float]:
        stats = self.worker.take_stats()
        return stats.data if stats else {}
