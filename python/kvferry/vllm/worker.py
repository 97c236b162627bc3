"""One rank: lends its KV memory, hands finished blocks to the daemon, and has blocks loaded."""

import logging
import time
from array import array
from collections import Counter, OrderedDict
from dataclasses import dataclass
from threading import Lock

import torch

from kvferry import _native, wire
from kvferry.attachment import Attachment, Operation, Refusal
from kvferry.session import Session
from kvferry.threads import start_thread
from kvferry.v1 import engine_pb2 as pb
from kvferry.vllm.config import Config
from kvferry.vllm.handoff import REGION
from kvferry.vllm.holds import Hold
from kvferry.vllm.idlestores import IdleStores, OnEnd
from kvferry.vllm.layout import KVMemory, Staging, pack
from kvferry.vllm.loader import Loader
from kvferry.vllm.meta import RankMeta, StepMeta, StoreJob
from kvferry.vllm.metrics import Stats, Tallies

# Ends of offers that are remembered for holds which have not reached this rank.
_SERVED_MAX = 4096
_POPULATE_BYTES = 64 << 20
# vLLM's own pause after a step without work is a millisecond.
IDLE_WAIT_S = 0.0005


@dataclass
class _Store:
    """A store that may still read its blocks."""

    operation: Operation
    deadline: float
    slots: list[int]  # of the staging buffer; empty where memory is lent


@dataclass
class _Held:
    """A finished request that keeps its blocks."""

    hold: Hold
    stores_until: float  # then stores that still read them are revoked
    spill_at: float
    end: str = ""  # why its blocks are lent no more; empty while they are


class Worker:
    """Every method but those of callbacks runs on the engine's thread and never waits for the daemon."""

    def __init__(self, config: Config, hello: pb.Hello, blocks: int, log: logging.Logger):
        self._config = config
        self._hello = hello
        self._blocks = blocks
        self._log = log
        self._generation = hello.space.weights_generation
        self._tallies = Tallies()
        self._session: Session | None = None
        self._loader: Loader | None = None
        self._staging: Staging | None = None
        self._stores: dict[int, _Store] = {}  # by store id; what the scheduler side believes to be reading
        self._idle: IdleStores | None = None  # in idle mode
        self._ended: Counter[int] = Counter()  # store ids to tell it about
        self._holds: dict[str, _Held] = {}
        self._lock = Lock()  # guards what follows
        self._served: OrderedDict[bytes, None] = OrderedDict()  # offers that nobody reads any more

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Raises ValueError where the memory cannot be served."""
        lend = self._config.mode == "lent"
        self._memory = KVMemory(kv_caches, self._blocks, lend)
        if lend:
            direct = self._config.direct != "off"
            shared, region = self._memory.shared, self._memory.region(REGION, self._blocks, writable=direct)
        else:
            self._staging = Staging(self._memory.planes, self._config.staging_bytes)
            self._planes, self._staging_planes = pack(self._memory.planes), pack(self._staging.planes)
            shared, region = self._staging.shared, self._staging.region(REGION)
        assert shared is not None
        self._hello.regions.append(region)
        self._hello.reads_lent = True
        self._loader = Loader(self._memory, self._config, REGION if region.writable else 0, self._tallies, self._log)
        self._session = Session(
            self._config.socket, self._config.descriptors, self._hello, {REGION: shared.fd}, self._log, self._attached, self._told
        )
        self._session.start()
        if self._config.store == "idle":
            self._idle = IdleStores(self._begin_idle, self._tallies, self._log)
            self._idle.start()
        self._log.info(
            "kvferry: rank %d serves %d blocks of %d KiB, %s, copies with %s",
            self._hello.rank,
            self._blocks,
            self._memory.block_bytes >> 10,
            "lent" if lend else f"staged through {self._staging.slots} slots",  # type: ignore[union-attr]
            _native.isa(),
        )

    def _attached(self, attachment: Attachment) -> None:
        """On the session's thread."""
        if self._config.direct == "on" and self._config.mode == "lent" and not attachment.direct:
            self._log.warning(
                "kvferry: blocks of other nodes come by way of the pool: the daemon has no watchdog, so it is lent nothing to write"
            )
        self._populate(attachment)

    def _told(self, attachment: Attachment, message: pb.SessionResponse) -> None:
        """On the session's thread."""
        if message.WhichOneof("message") == "lent_gone":
            assert self._loader is not None
            self._loader.lent_gone(attachment.epoch, message.lent_gone.handle)
            return
        with self._lock:
            self._served[message.offer_served.offer_id] = None
            while len(self._served) > _SERVED_MAX:
                self._served.popitem(last=False)

    def _populate(self, attachment: Attachment) -> None:
        """Touches the pool ahead of the loads: its page faults would take up to a third of a first load's time."""

        def touch() -> None:
            assert (pool := attachment.pool) is not None
            for offset in range(0, len(pool), _POPULATE_BYTES):
                length = min(_POPULATE_BYTES, len(pool) - offset)
                if attachment.lost or not _native.populate(pool, offset, length):
                    return

        start_thread("kvferry-populate", touch)

    def before_step(self, meta: StepMeta) -> None:
        """Takes back what this step writes again: before blocks are zeroed, loaded into or computed."""
        for store_id in list(self._stores) if meta.revoke_all else meta.revokes:
            self._take_back(store_id)
        if self._idle is not None:
            if meta.revoke_all or meta.idle_clear:
                self._idle.clear(revoke=meta.revoke_all)
            self._idle.take(meta.idle_used, meta.idle_reused)
        if meta.weights_generation != self._generation and self._session is not None:
            self._generation = meta.weights_generation
            space = pb.Space()
            space.CopyFrom(self._hello.space)
            space.weights_generation = self._generation
            self._session.use_space(space)
        now = time.monotonic()
        for request_id, hold in meta.holds.items():
            self._holds[request_id] = _Held(hold, now + self._config.hold_ms / 1000, now + self._config.spill_ms / 1000)
        for request_id, reason in meta.spills.items():
            if (held := self._holds.get(request_id)) is not None:
                held.end = held.end or reason

    def start_loads(self, meta: StepMeta) -> None:
        if self._loader is None:
            return
        target = self._session.space_id(self._generation) if self._session else None
        for job in meta.loads:
            self._loader.begin(job, target)
        for request_id in meta.cancels:
            self._loader.cancel(request_id)
        if meta.idle:
            # The engine turns without work until a load ends; that goes faster when it does not hold the interpreter's lock.
            self._loader.wait(IDLE_WAIT_S)

    def start_stores(self, meta: StepMeta) -> None:
        """The step's forward pass is complete: blocks that it finished may be read."""
        for job in meta.stores:
            try:
                self._start_store(job)
            except Exception as e:
                self._tallies.add("unstored_blocks", len(job.block_ids), str(e) if isinstance(e, Refusal) else "internal")
                self._ended[job.store_id] += 1
                if not isinstance(e, Refusal):
                    self._log.exception("kvferry: a store was not begun")
        if self._idle is not None:
            self._idle.add(meta.idle_stores)

    def _begin(self, job: StoreJob, target: tuple[Attachment, bytes], places: list[int], on_end: OnEnd) -> Operation:
        attachment, space_id = target
        return attachment.store(
            space_id,
            job.request_id,
            REGION,
            places,
            job.hashes,
            job.parents,
            self._config.store_timeout_ms,
            on_end=on_end,
            retention=job.retention,
        )

    def _target(self) -> tuple[Attachment, bytes]:
        target = self._session.space_id(self._generation) if self._session else None
        if target is None:
            raise Refusal("not_attached")
        return target

    def _begin_idle(self, job: StoreJob, on_end: OnEnd) -> Operation:
        """On the thread of IdleStores. What waits there is forgotten before the weights generation changes."""

        def ended(operation: Operation, end: pb.OperationEnd) -> None:
            self._count(job, end)
            on_end(operation, end)

        return self._begin(job, self._target(), job.block_ids, ended)

    def _start_store(self, job: StoreJob) -> None:
        target = self._target()
        slots = self._stage(job.block_ids) if self._staging is not None else []
        try:
            operation = self._begin(job, target, slots or job.block_ids, lambda op, end: self._count(job, end))
        except Exception:
            self._unstage(slots)
            raise
        self._stores[job.store_id] = _Store(operation, time.monotonic() + self._config.store_timeout_ms / 1000, slots)

    def _stage(self, block_ids: list[int]) -> list[int]:
        assert self._staging is not None
        slots = self._staging.take(len(block_ids))
        if slots is None:
            raise Refusal("staging_full")
        _native.copy_blocks(
            self._staging.shared.map,
            self._staging_planes,
            array("I", slots),
            self._memory.memory,
            self._planes,
            array("I", block_ids),
            self._config.copy_threads,
        )
        return slots

    def _unstage(self, slots: list[int]) -> None:
        if self._staging is not None:
            self._staging.give(slots)

    def _count(self, job: StoreJob, end: pb.OperationEnd) -> None:
        """On the session's thread."""
        self._tallies.add("stored_blocks", end.blocks_stored)
        self._tallies.add("stored_bytes", end.blocks_stored * self._memory.block_bytes)
        self._tallies.add("present_blocks", end.blocks_present)
        rest = len(job.block_ids) - end.blocks_stored - end.blocks_present
        if rest > 0:
            # Of a committed one, those for which there was no room.
            reason = "busy" if end.outcome == pb.OUTCOME_COMMITTED else pb.Outcome.Name(end.outcome).removeprefix("OUTCOME_").lower()
            self._tallies.add("unstored_blocks", rest, reason)
        if end.outcome == pb.OUTCOME_REJECTED:
            self._log.warning("kvferry: the daemon rejected a store: %s", end.reason)

    def _take_back(self, store_id: int) -> None:
        store = self._stores.get(store_id)
        if store is not None:
            store.operation.revoke()

    def _poll_stores(self) -> None:
        now = time.monotonic()
        for store_id, store in list(self._stores.items()):
            if store.operation.state() == wire.PENDING:
                if now < store.deadline:
                    continue
                store.operation.revoke()
            # Decided: if the daemon still reads, what it reads is thrown away.
            del self._stores[store_id]
            self._ended[store_id] += 1
            self._unstage(store.slots)

    def finished(self) -> tuple[set[str], set[str], set[int]]:
        """Requests whose held blocks are free, requests whose load has ended, blocks that failed to load."""
        self._poll_stores()
        now = time.monotonic()
        sent = set()
        for request_id, held in list(self._holds.items()):
            held.end = held.end or self._lent_end(held, now)
            pending = [i for i in held.hold.store_ids if i in self._stores]
            if not held.end or (pending and now < held.stores_until):
                continue
            for store_id in pending:
                self._take_back(store_id)
            if held.hold.offer_id:
                self._tallies.add("lent_prompts", label=held.end)
            del self._holds[request_id]
            sent.add(request_id)
        received, bad = self._loader.take_ended() if self._loader is not None else (set(), set())
        return sent, received, bad

    def _lent_end(self, held: _Held, now: float) -> str:
        """Why the blocks need not be kept for their offer; empty where they do."""
        if not (offer_id := held.hold.offer_id):
            return "not lent"
        with self._lock:
            if offer_id in self._served:
                del self._served[offer_id]
                return "served"
        attachment = self._session.attachment if self._session else None
        if attachment is None or attachment.lost or attachment.epoch != held.hold.epoch:
            return "gone"  # whoever had the offer will not say how it ended
        return "age" if now >= held.spill_at else ""

    def take_meta(self) -> RankMeta | None:
        ended, self._ended = self._ended, Counter()
        kept, lost = self._idle.take_settled() if self._idle is not None else (Counter(), Counter())
        return RankMeta(ended, kept=kept, lost=lost) if ended or kept or lost else None

    def failed(self, where: str) -> None:
        self._tallies.add("errors", label=where)

    def take_stats(self) -> Stats | None:
        return self._tallies.take()

    def close(self) -> None:
        for store_id in list(self._stores):
            self._take_back(store_id)
        if self._idle is not None:
            self._idle.close()
        if self._session is not None:
            self._session.close()
        if self._loader is not None:
            self._loader.close()
