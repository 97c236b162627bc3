"""Brings blocks into KV memory, on a thread of its own: copies them from the pool or from another worker's lent memory, or lends them to the daemon
to be written.

Only that thread writes into a load's blocks, or the daemon where they are lent to it. So a load is reported as ended only when this thread writes
no more, and of the daemon it is proven (Operation.quiet): the engine computes failed blocks in the same place.
"""

import logging
import queue
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from threading import Condition

from kvferry import _native, wire
from kvferry.attachment import Attachment, Operation, Refusal
from kvferry.lent import LentMemories
from kvferry.threads import start_thread
from kvferry.v1 import engine_pb2 as pb
from kvferry.vllm.config import Config
from kvferry.vllm.layout import KVMemory, pack
from kvferry.vllm.meta import LoadJob
from kvferry.vllm.metrics import Tallies

_TICK_S = 0.05

_REASONS: dict[int, str] = {
    pb.BLOCK_STATUS_MISS: "miss",
    pb.BLOCK_STATUS_BUSY: "busy",
    pb.BLOCK_STATUS_FAILED: "failed",
    pb.BLOCK_STATUS_EXPIRED: "expired",
}
_WRONG = {_native.CHANGED: "generation", _native.CORRUPT: "checksum"}
_POOL, _LENT, _DELIVERED = pb.BLOCK_SOURCE_POOL, pb.BLOCK_SOURCE_LENT, pb.BLOCK_SOURCE_DELIVERED


class _Part:
    """What one operation was asked for: indices into the load's blocks."""

    def __init__(self, indices: list[int]):
        self.indices = indices
        self.unanswered = set(indices)
        self.wrong = 0  # blocks of the pool that were not what they should be


class _Load:
    """One request's load on this rank, in as many operations as the daemon's limit makes of it."""

    def __init__(self, job: LoadJob, deadline: float, target: tuple[Attachment, bytes] | None):
        self.job = job
        self.started = time.monotonic()
        self.deadline = deadline
        self.target = target
        self.missing = set(range(len(job.block_ids)))  # indices not loaded so far
        self.failed: set[int] = set()  # of these, what will not come
        self.again: dict[int, str] = {}  # what was asked for once more, and why
        self.parts: dict[Operation, _Part] = {}  # under way
        self.lending: list[Operation] = []  # not known to be quiet

    def decided(self) -> bool:
        return self.missing == self.failed


class Loader:
    """lends: the region whose blocks the daemon may be given to write; 0 for none."""

    def __init__(self, memory: KVMemory, config: Config, lends: int, tallies: Tallies, log: logging.Logger):
        self._memory = memory
        self._planes = pack(memory.planes)
        self._config = config
        self._lends = lends
        self._tallies = tallies
        self._log = log
        self._lent = LentMemories(config.descriptors)
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._loads: dict[str, _Load] = {}  # the thread's own
        self._lock = Condition()  # guards what follows
        self._open = 0  # loads that were begun and not reported
        self._ended: set[str] = set()
        self._bad: set[int] = set()
        self._thread = start_thread("kvferry-loader", self._run)

    def begin(self, job: LoadJob, target: tuple[Attachment, bytes] | None) -> None:
        """Starts a load; target is None where no daemon is attached. It is told as ended in any case, once."""
        with self._lock:
            self._open += 1
        self._events.put(lambda: self._begin(job, target))

    def cancel(self, request_id: str) -> None:
        self._events.put(lambda: self._fail_rest(request_id, "cancelled"))

    def lent_gone(self, epoch: bytes, handle: int) -> None:
        self._events.put(lambda: self._lent.drop(epoch, handle))

    def wait(self, timeout_s: float) -> None:
        """Gives the interpreter's lock to this thread where a load is under way, until one ends."""
        with self._lock:
            if self._open and not self._ended:
                self._lock.wait(timeout_s)

    def take_ended(self) -> tuple[set[str], set[int]]:
        """Requests whose load has ended since the last call, and the block ids of theirs that were not loaded."""
        with self._lock:
            ended, self._ended = self._ended, set()
            bad, self._bad = self._bad, set()
        return ended, bad

    def close(self) -> None:
        self._events.put(None)
        self._thread.join(2.0)

    # ---- the thread ----

    def _run(self) -> None:
        while True:
            try:
                event = self._events.get(timeout=_TICK_S if self._loads else None)
            except queue.Empty:
                event = self._expire
            if event is None:
                self._lent.close()
                return
            try:
                event()
                if self._loads:
                    self._expire()
            except Exception:
                self._tallies.add("errors", label="loader")
                self._log.exception("kvferry: loads in progress are given up")
                for request_id in list(self._loads):
                    self._fail_rest(request_id, "internal")

    def _begin(self, job: LoadJob, target: tuple[Attachment, bytes] | None) -> None:
        load = _Load(job, time.monotonic() + job.timeout_ms / 1000, target)
        self._loads[job.request_id] = load
        self._ask(load, list(range(job.offered)), job.ticket)
        self._ask(load, list(range(job.offered, len(job.block_ids))), None)
        self._settle(load)

    def _ask(self, load: _Load, indices: list[int], ticket: bytes | None) -> None:
        if load.target is None:
            self._fail(load, indices, "not_attached")
            return
        attachment, space_id = load.target
        job, step = load.job, attachment.welcome.load_blocks_max or len(indices)
        lends = ticket is not None and self._lends and attachment.direct
        for first in range(0, len(indices), step):
            part = _Part(indices[first : first + step])
            try:
                op = attachment.load(
                    space_id,
                    job.request_id,
                    b"".join(job.hashes[i * wire.HASH_BYTES : (i + 1) * wire.HASH_BYTES] for i in part.indices),
                    max(1, int((load.deadline - time.monotonic()) * 1000)),
                    ticket,
                    on_result=lambda op, message: self._events.put(lambda: self._result(job.request_id, op, message)),
                    on_end=lambda op, end: self._events.put(lambda: self._operation_end(job.request_id, op, end)),
                    region=self._lends if lends else 0,
                    lent=[job.block_ids[i] for i in part.indices] if lends else (),
                )
            except Refusal as refusal:
                self._fail(load, indices[first:], str(refusal))
                return
            # The callbacks only queue, so nothing of this operation was handled yet.
            load.parts[op] = part
            if op.lends:
                load.lending.append(op)

    def _result(self, request_id: str, op: Operation, message: pb.LoadResult) -> None:
        load = self._loads.get(request_id)
        part = load.parts.get(op) if load is not None else None
        if load is None or part is None:
            return
        n = len(message.status)
        if message.first + n > len(part.indices) or len(message.source) not in (0, n):
            self._fail(load, part.unanswered, "protocol")
        elif n:
            self._take(load, op, part, message)
        if message.last:
            self._fail(load, part.unanswered, "unanswered")
            self._release(load, op)
        self._settle(load)

    def _take(self, load: _Load, op: Operation, part: _Part, message: pb.LoadResult) -> None:
        """Has the blocks of one answer copied where they are to be copied."""
        n = len(message.status)
        indices = part.indices[message.first : message.first + n]
        sources = message.source or bytes(n)
        ready: dict[int, bytearray] = {_POOL: bytearray(n), _LENT: bytearray(n), _DELIVERED: bytearray(n)}
        for i, (index, status, source) in enumerate(zip(indices, message.status, sources)):
            if index not in part.unanswered:
                continue
            part.unanswered.discard(index)
            if status != pb.BLOCK_STATUS_READY:
                self._fail(load, [index], _REASONS.get(status, "protocol"))
            elif source not in ready or (source == _DELIVERED and not op.lends):
                self._fail(load, [index], "protocol")
            elif index in load.missing and index not in load.failed:
                ready[source][i] = 1
        ids = array("I", [load.job.block_ids[i] for i in indices])
        wanted = [i for i in range(n) if ready[_POOL][i] or ready[_LENT][i]]
        try:
            if wanted and message.shard_bytes != self._memory.block_bytes:
                raise ValueError(f"shards of {message.shard_bytes} bytes, want {self._memory.block_bytes}")
            if any(ready[_POOL]):
                self._copy(load, part, indices, ids, ready[_POOL], message)
            if any(ready[_LENT]):
                self._copy_lent(load, indices, ids, ready[_LENT], message)
        except (ValueError, OverflowError) as e:
            self._log.warning("kvferry: an answer to a load makes no sense: %s", e)
            self._fail(load, [indices[i] for i in wanted], "protocol")
        self._loaded(load, [indices[i] for i in range(n) if ready[_DELIVERED][i]], "direct")

    def _copy(self, load: _Load, part: _Part, indices: list[int], ids: array, ready: bytearray, message: pb.LoadResult) -> None:
        assert load.target is not None
        if (pool := load.target[0].pool) is None:
            raise ValueError("blocks in a pool that was not handed out")
        status = _native.load_blocks(
            self._memory.memory,
            self._planes,
            ids,
            pool,
            ready,
            array("Q", message.offsets),
            array("Q", message.header_offsets),
            array("Q", message.generations),
            array("I", message.crc32c),
            self._config.copy_threads,
        )
        self._loaded(load, [indices[i] for i, s in enumerate(status) if s == _native.LOADED], "pool")
        for i, s in enumerate(status):
            if s in _WRONG:
                part.wrong += 1
                self._fail(load, [indices[i]], _WRONG[s])

    def _copy_lent(self, load: _Load, indices: list[int], ids: array, ready: bytearray, message: pb.LoadResult) -> None:
        """What its owner wrote again in the meantime may be in the pool, and is asked for once more."""
        assert load.target is not None
        try:
            lent = self._lent.get(load.target[0], message.lent)
        except (OSError, ValueError, wire.WireError) as e:
            self._log.warning("kvferry: lent memory cannot be mapped: %s", e)
            self._ask_again(load, {indices[i]: "unmapped" for i in range(len(ready)) if ready[i]})
            return
        status = _native.load_lent(
            self._memory.memory,
            self._planes,
            ids,
            lent.memory,
            lent.planes,
            # Of blocks that lie elsewhere these are no block ids.
            array("I", [block_id if r else 0 for block_id, r in zip(message.offsets, ready)]),
            lent.table,
            ready,
            array("Q", message.generations),
            self._config.copy_threads,
        )
        self._loaded(load, [indices[i] for i, s in enumerate(status) if s == _native.LOADED], "lent")
        self._ask_again(load, {indices[i]: "generation" for i, s in enumerate(status) if s == _native.CHANGED})

    def _ask_again(self, load: _Load, reasons: dict[int, str]) -> None:
        for i in [i for i in reasons if i in load.again]:
            self._fail(load, [i], reasons.pop(i))
        if reasons:
            load.again.update(reasons)
            for reason, count in Counter(reasons.values()).items():
                self._tallies.add("asked_again_blocks", count, reason)
            self._ask(load, sorted(reasons), None)

    def _loaded(self, load: _Load, indices: list[int], source: str) -> None:
        if indices:
            load.missing.difference_update(indices)
            self._tallies.add("loaded_blocks", len(indices))
            self._tallies.add("loaded_bytes", len(indices) * self._memory.block_bytes)
            self._tallies.add("source_blocks", len(indices), source)

    def _operation_end(self, request_id: str, op: Operation, end: pb.OperationEnd) -> None:
        load = self._loads.get(request_id)
        if load is None:
            return
        if (part := load.parts.pop(op, None)) is not None:
            if end.outcome == pb.OUTCOME_REJECTED:
                self._log.warning("kvferry: the daemon rejected a load: %s", end.reason)
            self._fail(load, part.unanswered, pb.Outcome.Name(end.outcome).removeprefix("OUTCOME_").lower())
        self._settle(load)

    def _expire(self) -> None:
        now = time.monotonic()
        for request_id, load in list(self._loads.items()):
            if load.deadline <= now or load.decided():
                self._fail_rest(request_id, "timeout")

    def _fail_rest(self, request_id: str, reason: str) -> None:
        load = self._loads.get(request_id)
        if load is not None:
            self._fail(load, load.missing, reason)
            self._settle(load)

    def _fail(self, load: _Load, indices: Iterable[int], reason: str) -> None:
        """Those of the blocks that were not loaded so far will not be."""
        fresh = [i for i in indices if i in load.missing and i not in load.failed]
        load.failed.update(fresh)
        for label, count in Counter(load.again.get(i, reason) for i in fresh).items():
            self._tallies.add("unloaded_blocks", count, label)

    def _release(self, load: _Load, op: Operation) -> None:
        part = load.parts.pop(op)
        assert load.target is not None
        if part.wrong == 0:
            op.revoke()  # else the daemon looks at its blocks when it is released, which it does not for one that was taken back
        load.target[0].release([op], part.wrong)

    def _settle(self, load: _Load) -> None:
        """Reports the load when every block was loaded or has failed, and nobody writes into any of them any more."""
        if not load.decided():
            return
        for op in list(load.parts):
            self._release(load, op)
        load.lending = [op for op in load.lending if not op.quiet()]
        if load.lending:
            return  # the end of an operation comes here again, or the next tick
        del self._loads[load.job.request_id]
        self._tallies.add("load_seconds", time.monotonic() - load.started)
        with self._lock:
            self._bad.update(load.job.block_ids[i] for i in load.failed)
            self._ended.add(load.job.request_id)
            self._open -= 1
            self._lock.notify()
