"""Copies blocks from the pool into KV memory, on a thread of its own.

Only that thread writes into a load's blocks, so that a load which it reported as ended is written to no more: the engine computes failed
blocks in the same place.
"""

import logging
import queue
import time
from array import array
from collections.abc import Callable, Iterable
from threading import Condition

from kvferry import _native, wire
from kvferry.attachment import Attachment, Operation, Refusal
from kvferry.threads import start_thread
from kvferry.v1 import engine_pb2 as pb
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


class _Load:
    """One request's load on this rank, in as many operations as the daemon's limit makes of it."""

    def __init__(self, job: LoadJob, deadline: float):
        self.job = job
        self.started = time.monotonic()
        self.deadline = deadline
        self.missing = set(range(len(job.block_ids)))  # indices not loaded so far
        self.failed: set[int] = set()  # of these, what will not come
        self.operations: dict[int, tuple[Operation, Attachment, int, int]] = {}  # by number, with first index and count
        self.wrong = 0


class Loader:
    def __init__(self, memory: KVMemory, timeout_ms: int, threads: int, tallies: Tallies, log: logging.Logger):
        self._memory = memory
        self._planes = pack(memory.planes)
        self._timeout_ms = timeout_ms
        self._threads = threads
        self._tallies = tallies
        self._log = log
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
        load = _Load(job, time.monotonic() + self._timeout_ms / 1000)
        self._loads[job.request_id] = load
        if target is None:
            self._fail_rest(job.request_id, "not_attached")
            return
        attachment, space_id = target
        step = attachment.welcome.load_blocks_max or len(job.block_ids)
        for first in range(0, len(job.block_ids), step):
            count = min(step, len(job.block_ids) - first)
            try:
                op = attachment.load(
                    space_id,
                    job.request_id,
                    job.hashes[first * wire.HASH_BYTES : (first + count) * wire.HASH_BYTES],
                    self._timeout_ms,
                    job.ticket,
                    on_result=lambda op, message: self._events.put(lambda: self._result(job.request_id, op, message)),
                    on_end=lambda op, end: self._events.put(lambda: self._operation_end(job.request_id, op, end)),
                )
            except Refusal as refusal:
                self._fail(load, range(first, len(job.block_ids)), str(refusal))
                break
            # The callbacks only queue, so nothing of this operation was handled yet.
            load.operations[op.number] = (op, attachment, first, count)
        self._settle(load)

    def _result(self, request_id: str, op: Operation, message: pb.LoadResult) -> None:
        load = self._loads.get(request_id)
        if load is None or op.number not in load.operations or load.operations[op.number][0] is not op:
            return
        _, attachment, first, count = load.operations[op.number]
        n = len(message.status)
        if message.first + n > count or (n and attachment.pool is None):
            self._fail(load, range(first, first + count), "protocol")
        elif n:
            self._copy(load, attachment, first + message.first, message)
        if message.last:
            self._fail(load, range(first, first + count), "unanswered")
            self._release(load, op)
        self._settle(load)

    def _copy(self, load: _Load, attachment: Attachment, first: int, message: pb.LoadResult) -> None:
        n = len(message.status)
        ready = bytearray(n)
        for i, status in enumerate(message.status):
            index = first + i
            if index in load.missing and index not in load.failed:
                if status == pb.BLOCK_STATUS_READY:
                    ready[i] = 1
                else:
                    self._fail(load, [index], _REASONS.get(status, "protocol"))
        try:
            if message.shard_bytes != self._memory.block_bytes and any(ready):
                raise ValueError(f"shards of {message.shard_bytes} bytes, want {self._memory.block_bytes}")
            loaded = _native.load_blocks(
                self._memory.memory,
                self._planes,
                array("I", load.job.block_ids[first : first + n]),
                attachment.pool,
                ready,
                array("Q", message.offsets),
                array("Q", message.header_offsets),
                array("Q", message.generations),
                array("I", message.crc32c),
                self._threads,
            )
        except ValueError as e:
            self._log.warning("kvferry: an answer to a load makes no sense: %s", e)
            self._fail(load, [first + i for i in range(n) if ready[i]], "protocol")
            return
        for i, status in enumerate(loaded):
            if status == _native.LOADED:
                load.missing.discard(first + i)
            elif status in _WRONG:
                load.wrong += 1
                self._fail(load, [first + i], _WRONG[status])
        good = loaded.count(_native.LOADED)
        self._tallies.add("loaded_blocks", good)
        self._tallies.add("loaded_bytes", good * self._memory.block_bytes)

    def _operation_end(self, request_id: str, op: Operation, end: pb.OperationEnd) -> None:
        load = self._loads.get(request_id)
        if load is None or load.operations.get(op.number, (None,))[0] is not op:
            return
        _, _, first, count = load.operations.pop(op.number)
        reason = pb.Outcome.Name(end.outcome).removeprefix("OUTCOME_").lower()
        if end.outcome == pb.OUTCOME_REJECTED:
            self._log.warning("kvferry: the daemon rejected a load: %s", end.reason)
        self._fail(load, range(first, first + count), reason)
        self._settle(load)

    def _expire(self) -> None:
        now = time.monotonic()
        for request_id in [r for r, load in self._loads.items() if load.deadline <= now]:
            self._fail_rest(request_id, "timeout")

    def _fail_rest(self, request_id: str, reason: str) -> None:
        load = self._loads.get(request_id)
        if load is not None:
            self._fail(load, load.missing, reason)
            self._settle(load)

    def _fail(self, load: _Load, indices: Iterable[int], reason: str) -> None:
        """Those of the blocks that were not loaded so far will not be."""
        fresh = [i for i in indices if i in load.missing and i not in load.failed]
        if fresh:
            load.failed.update(fresh)
            self._tallies.add("unloaded_blocks", len(fresh), reason)

    def _release(self, load: _Load, op: Operation) -> None:
        _, attachment, _, _ = load.operations.pop(op.number)
        if load.wrong == 0:
            op.revoke()  # else the daemon looks at its blocks when it is released, which it does not for one that was taken back
        attachment.release([op], load.wrong)
        load.wrong = 0

    def _settle(self, load: _Load) -> None:
        """Reports the load when every block was loaded or has failed."""
        if load.missing != load.failed:
            return
        for op, _, _, _ in list(load.operations.values()):
            self._release(load, op)
        del self._loads[load.job.request_id]
        self._tallies.add("load_seconds", time.monotonic() - load.started)
        with self._lock:
            self._bad.update(load.job.block_ids[i] for i in load.failed)
            self._ended.add(load.job.request_id)
            self._open -= 1
            self._lock.notify()
