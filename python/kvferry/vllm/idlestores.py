"""A rank's side of idle mode: begins the stores of idle blocks when they are due.

On a thread of its own, since an engine without requests calls no hook. The step's metadata takes blocks out before anything may write there: what has
not begun is not begun, and what is being read is revoked, which decides against the daemon's commit.
"""

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from threading import Condition

from kvferry import wire
from kvferry.attachment import Operation, Refusal
from kvferry.threads import start_thread
from kvferry.v1 import engine_pb2 as pb
from kvferry.vllm.meta import StoreJob
from kvferry.vllm.metrics import Tallies

# A long prompt becomes idle all at once; its stores leave words and the daemon's queue to what is wanted now.
UNDER_WAY_MAX = 4

OnEnd = Callable[[Operation, pb.OperationEnd], None]


class IdleStores:
    """begin: hands a store to the daemon without waiting, or raises Refusal. Safe for use from any thread; begun stores end on the session's thread.

    Never larger than the engine's KV memory: the scheduler side has every block in one store at most.
    """

    def __init__(
        self,
        begin: Callable[[StoreJob, OnEnd], Operation],
        tallies: Tallies,
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._begin = begin
        self._tallies = tallies
        self._log = log
        self._clock = clock
        self._changed = Condition()  # its lock guards what follows
        self._waiting: OrderedDict[int, StoreJob] = OrderedDict()  # in the order in which they are due
        self._taken: dict[int, set[int]] = {}  # waiting store -> blocks that are not to be read
        self._running: dict[int, tuple[frozenset[int], Operation]] = {}  # with the blocks that it reads
        self._of_block: dict[int, int] = {}  # block id -> waiting store
        self._kept: Counter[int] = Counter()
        self._lost: Counter[int] = Counter()
        self._closed = False

    def start(self) -> None:
        start_thread("kvferry-idle", self._run)

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                try:
                    wait = self.begin_due()
                except Exception:
                    # What waits may not be what it is taken for.
                    self._tallies.add("errors", label="idle")
                    self._log.exception("kvferry: idle stores that wait are given up")
                    self._give_up()
                    wait = None
                self._changed.wait(wait)

    def _give_up(self) -> None:
        self._lost.update(self._waiting.keys())
        self.clear(revoke=False)

    def add(self, jobs: list[StoreJob]) -> None:
        if not jobs:
            return
        with self._changed:
            for job in jobs:
                self._waiting[job.store_id] = job
                self._of_block.update(dict.fromkeys(job.block_ids, job.store_id))
            self._changed.notify()

    def take(self, used: Iterable[int], reused: Iterable[int]) -> None:
        """used: idle no more. reused: may be written as soon as this returns."""
        with self._changed:
            for block_id in used:
                self._take(block_id, revoke=False)
            for block_id in reused:
                self._take(block_id, revoke=True)

    def _take(self, block_id: int, revoke: bool) -> None:
        for reads, operation in self._running.values() if revoke else ():
            if block_id in reads:
                operation.revoke()
        store_id = self._of_block.pop(block_id, 0)
        job = self._waiting.get(store_id)
        if job is None:
            return
        taken = self._taken.setdefault(store_id, set())
        taken.add(block_id)
        if len(taken) == len(job.block_ids):
            del self._waiting[store_id], self._taken[store_id]

    def clear(self, revoke: bool) -> None:
        """Begins none of those that wait. revoke: any block may be written as soon as this returns."""
        with self._changed:
            self._waiting.clear()
            self._taken.clear()
            self._of_block.clear()
            for _, operation in self._running.values() if revoke else ():
                operation.revoke()

    def begin_due(self) -> float | None:
        """Begins what is due; the seconds until more is, None where only a change can bring more."""
        with self._changed:
            while self._waiting and len(self._running) < UNDER_WAY_MAX:
                store_id, job = next(iter(self._waiting.items()))
                if (left := job.due - self._clock()) > 0:
                    return left
                del self._waiting[store_id]
                job = _without(job, self._taken.pop(store_id, set()))
                for block_id in job.block_ids:
                    if self._of_block.get(block_id) == store_id:
                        del self._of_block[block_id]
                self._begin_one(job)
            return None

    def _begin_one(self, job: StoreJob) -> None:
        try:
            operation = self._begin(job, lambda op, end: self._ended(job, end))
        except Exception as e:
            self._tallies.add("unstored_blocks", len(job.block_ids), str(e) if isinstance(e, Refusal) else "internal")
            if not isinstance(e, Refusal):
                self._log.exception("kvferry: an idle store was not begun")
            self._lost[job.store_id] += 1
        else:
            self._running[job.store_id] = frozenset(job.block_ids), operation

    def _ended(self, job: StoreJob, end: pb.OperationEnd) -> None:
        with self._changed:
            self._running.pop(job.store_id, None)
            whole = end.outcome == pb.OUTCOME_COMMITTED and end.blocks_stored + end.blocks_present >= len(job.block_ids)
            (self._kept if whole else self._lost)[job.store_id] += 1
            self._changed.notify()

    def take_settled(self) -> tuple[Counter[int], Counter[int]]:
        """Stores of which all blocks are resident, and the others that have ended."""
        with self._changed:
            kept, self._kept = self._kept, Counter()
            lost, self._lost = self._lost, Counter()
        return kept, lost

    def close(self) -> None:
        self.clear(revoke=True)
        with self._changed:
            self._closed = True
            self._changed.notify()


def _without(job: StoreJob, taken: set[int]) -> StoreJob:
    if not taken:
        return job
    size = wire.HASH_BYTES
    left = [i for i, block_id in enumerate(job.block_ids) if block_id not in taken]
    return StoreJob(
        job.store_id,
        job.request_id,
        [job.block_ids[i] for i in left],
        b"".join(job.hashes[size * i : size * (i + 1)] for i in left),
        b"".join(job.parents[size * i : size * (i + 1)] for i in left),
        job.retention,
        job.due,
    )
