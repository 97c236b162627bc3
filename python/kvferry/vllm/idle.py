"""The scheduler side of idle mode: which blocks nobody uses, and what becomes of them.

A block is idle from the moment in which the last request that had it is gone. It is handed to the ranks at once, with the time at which its store
is due, because an engine without requests calls no hook; until then, and while it is read, nothing pins it. Whoever takes it first decides:

    idle ── due ──► stored ── given back, where that is wanted
      │               │
      ├── a request finds it in the engine's own cache: used
      └── the engine allocates it again: reused
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_utils import get_block_hash

from kvferry.memory import GenerationTable
from kvferry.vllm.meta import StoreJob
from kvferry.vllm.metrics import Tallies

JOB_BLOCKS_MAX = 64


@dataclass
class Finished:
    """A request's blocks when it ended."""

    request_id: str
    block_ids: list[int]
    hashes: list[bytes]
    parents: list[bytes]
    retention: int
    generations: list[int]
    since: float


class _Batch:
    """What became idle with one request: given back all at once, so that no block is left behind whose parent is gone."""

    def __init__(self) -> None:
        self.jobs = 0  # that have not ended
        self.resident = True  # what has ended so far
        self.blocks: list[tuple[int, int, bytes]] = []  # stored: id, generation, hash


class _Job:
    def __init__(self, batch: _Batch, ranks: int):
        self.batch = batch
        self.ranks = ranks  # that have not said how it ended
        self.resident = True  # on the ranks that have
        self.blocks: dict[int, tuple[int, bytes]] = {}  # idle still: id -> generation, hash


class IdleBlocks:
    """Of each block id at most one is tracked, so that nothing here outgrows the engine's KV memory. pool: vLLM's, of which references are read, and which
    is changed by give-backs only."""

    def __init__(
        self,
        pool: Any,
        table: GenerationTable,
        ranks: int,
        idle_s: float,
        gives_back: bool,
        tallies: Tallies,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._pool = pool
        self._table = table
        self._ranks = ranks
        self._idle_s = idle_s
        self.gives_back = gives_back
        self._tallies = tallies
        self._clock = clock
        self._last = 0
        self._finished: list[Finished] = []  # since the last step
        self._held: dict[str, Finished] = {}  # their blocks are kept for an offer
        self._jobs: dict[int, _Job] = {}
        self._tracked: dict[int, int] = {}  # block id -> job

    def __len__(self) -> int:
        return len(self._tracked)

    def finished(self, request_id: str, block_ids: list[int], hashes: list[bytes], parents: list[bytes], retention: int, held: bool) -> None:
        """A request has ended. held: its blocks stay taken until released()."""
        if not block_ids:
            return
        ended = Finished(request_id, block_ids, hashes, parents, retention, self._table.values(block_ids), self._clock())
        if held:
            self._held[request_id] = ended
        else:
            self._finished.append(ended)

    def released(self, request_id: str) -> None:
        if (ended := self._held.pop(request_id, None)) is not None:
            ended.since = self._clock()
            self._finished.append(ended)

    def new_jobs(self) -> list[StoreJob]:
        """For the blocks of requests that ended since the last step, as far as nobody has them now."""
        finished, self._finished = self._finished, []
        return [job for ended in finished for job in self._jobs_of(ended)]

    def _jobs_of(self, ended: Finished) -> list[StoreJob]:
        now = self._table.values(ended.block_ids)
        idle = [
            i
            for i, block_id in enumerate(ended.block_ids)
            if now[i] == ended.generations[i] and block_id not in self._tracked and self._is_idle(block_id, ended.hashes[i])
        ]
        batch, jobs = _Batch(), []
        for at in range(0, len(idle), JOB_BLOCKS_MAX):
            part = idle[at : at + JOB_BLOCKS_MAX]
            self._last += 1
            job = self._jobs[self._last] = _Job(batch, self._ranks)
            job.blocks = {ended.block_ids[i]: (ended.generations[i], ended.hashes[i]) for i in part}
            self._tracked.update(dict.fromkeys(job.blocks, self._last))
            batch.jobs += 1
            jobs.append(
                StoreJob(
                    self._last,
                    ended.request_id,
                    [ended.block_ids[i] for i in part],
                    b"".join(ended.hashes[i] for i in part),
                    b"".join(ended.parents[i] for i in part),
                    ended.retention,
                    due=ended.since + self._idle_s,
                )
            )
        return jobs

    def _is_idle(self, block_id: int, name: bytes) -> bool:
        """Whether nobody has the block, and the engine itself takes it for what the hash says."""
        block = self._pool.blocks[block_id]
        return block.ref_cnt == 0 and not block.is_null and block.block_hash is not None and get_block_hash(block.block_hash) == name

    def used(self, block_ids: Iterable[int]) -> list[int]:
        """A request has found these in the engine's own cache. Returns those that the ranks need to hear of."""
        return self._untrack(block_ids, "used")

    def reused(self, block_ids: Iterable[int]) -> list[int]:
        """The engine is about to write these."""
        return self._untrack(block_ids, "reused")

    def _untrack(self, block_ids: Iterable[int], end: str) -> list[int]:
        taken = []
        for block_id in block_ids:
            store_id = self._tracked.pop(block_id, None)
            if store_id is None:
                continue
            taken.append(block_id)
            job = self._jobs[store_id]
            del job.blocks[block_id]
            if not job.blocks:
                self._end(store_id)  # no rank begins it, and if one has begun it does not matter
        if taken:
            self._tallies.add("idle_blocks", len(taken), end)
        return taken

    def settled(self, kept: Counter[int], lost: Counter[int]) -> None:
        """So many ranks have all blocks of a store resident, or not."""
        for store_id in kept.keys() | lost.keys():
            job = self._jobs.get(store_id)
            if job is None:
                continue
            job.ranks -= kept[store_id] + lost[store_id]
            job.resident = job.resident and not lost[store_id]
            if job.ranks <= 0:
                self._tallies.add("idle_blocks", len(job.blocks), "stored" if job.resident else "unstored")
                for block_id in job.blocks:
                    del self._tracked[block_id]
                self._end(store_id)

    def _end(self, store_id: int) -> None:
        job = self._jobs.pop(store_id)
        batch = job.batch
        batch.jobs -= 1
        batch.resident = batch.resident and job.resident
        batch.blocks += [(block_id, generation, name) for block_id, (generation, name) in job.blocks.items()]
        if batch.jobs == 0 and batch.resident and self.gives_back:
            self._give_back(batch.blocks)

    def _give_back(self, stored: list[tuple[int, int, bytes]]) -> None:
        """Makes these the blocks that the engine takes first, without content."""
        now = self._table.values([block_id for block_id, _, _ in stored])
        ids = [
            block_id
            for (block_id, generation, name), current in zip(stored, now)
            if current == generation and block_id not in self._tracked and self._is_idle(block_id, name)
        ]
        if not ids:
            return
        blocks = [self._pool.blocks[block_id] for block_id in ids]
        self._pool.touch(blocks)
        try:
            self._pool.evict_blocks(set(ids))
        finally:
            self._pool.free_blocks(blocks)
        self._tallies.add("given_back_blocks", len(ids))

    def clear(self) -> None:
        """No block is known to hold what its hash says. The ranks are told by whoever says so."""
        self._finished.clear()
        self._held.clear()
        self._jobs.clear()
        self._tracked.clear()
