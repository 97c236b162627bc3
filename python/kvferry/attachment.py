"""One process's connection with one incarnation of the daemon, and the operations that run over it."""

import hashlib
import mmap
import queue
import threading
import time
from collections.abc import Callable, Sequence

import grpc

from kvferry import _native, wire
from kvferry.memory import Descriptors, Process
from kvferry.v1 import engine_pb2 as pb

REQUEST_ID_BYTES_MAX = 256
# Messages that wait while the daemon does not read; more are dropped. Operations are bounded by their words.
QUEUED_MAX = 8192


def wire_request_id(request_id: str) -> str:
    """The name of a request in messages: a client may have chosen one that they do not allow."""
    raw = request_id.encode(errors="surrogatepass")
    if 1 <= len(raw) <= REQUEST_ID_BYTES_MAX and not any(0xD800 <= ord(c) <= 0xDFFF for c in request_id):
        return request_id
    return "sha256:" + hashlib.sha256(raw).hexdigest()


class Refusal(Exception):
    """An operation was not begun; the text is the reason, fit for a metric label."""


class Operation:
    """A Store, Load or Accept. Its outcome is decided by the compare-and-swap in its word, whoever comes first."""

    def __init__(self, attachment: "Attachment", number: int, word: int, on_result, on_end, lends: bool):
        self._attachment = attachment
        self.number = number
        self.word = word
        self.lends = lends  # the daemon may write into its blocks until it is quiet
        self.started = time.monotonic()
        self._on_result: Callable[[Operation, pb.LoadResult], None] | None = on_result
        self._on_end: Callable[[Operation, pb.OperationEnd], None] | None = on_end
        self.end: pb.OperationEnd | None = None  # set once, when the daemon needs the word no more or is gone
        self._told = False  # the daemon itself said so

    def state(self) -> int:
        """PENDING until the outcome is decided."""
        if self.end is not None:
            return wire.COMMITTED if self.end.outcome == pb.OUTCOME_COMMITTED else wire.FAILED
        value = _native.load_u64(self._attachment.words, self.word * wire.WORD_STRIDE)
        if value >> 8 != self.number:
            return wire.FAILED
        return value & 0xFF

    def quiet(self) -> bool:
        """Whether it is proven that the daemon writes into lent blocks no more. That the session broke, or time has passed, proves nothing."""
        if not self.lends or self._told:
            return True
        # The mapping outlives the session, and a lost attachment uses no word again.
        quiet = _native.load_u64(self._attachment.words, self.word * wire.WORD_STRIDE + wire.QUIET_OFFSET)
        daemon = self._attachment.daemon
        return quiet in (self.number, wire.ALL_QUIET) or (daemon is not None and daemon.dead())

    def revoke(self) -> bool:
        """Decides that this operation shall not commit; False if it was decided before. Never waits."""
        if not self._decide():
            return False
        self._attachment.send(pb.SessionRequest(revoke=pb.Revoke(operations=[self.number])))
        return True

    def _decide(self) -> bool:
        # Also after the connection broke: the daemon may live and copy, and the word still decides.
        return _native.swap_u64(
            self._attachment.words,
            self.word * wire.WORD_STRIDE,
            wire.word(self.number, wire.PENDING),
            wire.word(self.number, wire.REVOKED),
        )

    def result(self, message: pb.LoadResult) -> None:
        if self._on_result is not None:
            self._on_result(self, message)

    def finish(self, end: pb.OperationEnd, told: bool) -> None:
        self._told = told
        self.end = end
        if self._on_end is not None:
            self._on_end(self, end)


class Attachment:
    """Everything that belongs to one epoch: the mappings, the words in use, the spaces' ids.

    Safe for use from any thread. Callbacks of operations run on the session's thread and must be short.
    """

    def __init__(self, welcome: pb.Welcome, match_call, outgoing: "queue.SimpleQueue[pb.SessionRequest | None]"):
        self.welcome = welcome
        self.epoch: bytes = welcome.epoch
        self.pool: mmap.mmap | None = None
        self.words: mmap.mmap = None  # type: ignore[assignment]  # set before anybody sees the attachment
        self.daemon: Process | None = None
        self.spaces: dict[str, bytes] = {}  # weights generation -> space id
        self.lost = False
        self.draining = False
        self.heard = time.monotonic()  # when the daemon last said something
        self._match_call = match_call
        self._outgoing = outgoing
        self._lock = threading.Lock()
        self._operations: dict[int, Operation] = {}
        self._next = 0
        self._free: list[int] = []

    def map(self, descriptors: Descriptors) -> None:
        words, wanted = descriptors.words, self.welcome.words * wire.WORD_STRIDE
        if words is not None and len(words) < wanted:
            raise wire.WireError(f"operation words: {len(words)} bytes, want {wanted}")
        if words is not None:
            self.words = words
            self._free = list(range(self.welcome.words - 1, -1, -1))
        self.pool = descriptors.pool
        self.daemon = descriptors.daemon

    @property
    def direct(self) -> bool:
        """Whether an Accept may lend blocks: only where the daemon is ended when it freezes, and its death can be seen."""
        return self.welcome.direct and self.daemon is not None

    def send(self, message: pb.SessionRequest) -> bool:
        """Queues a message; False when the connection is gone or the daemon does not read."""
        if self.lost or self._outgoing.qsize() >= QUEUED_MAX:
            return False
        self._outgoing.put(message)
        return True

    def store(
        self,
        space_id: bytes,
        request_id: str,
        region: int,
        block_ids: list[int],
        hashes: bytes,
        parents: bytes,
        deadline_ms: int,
        on_end,
        retention: pb.Retention = pb.RETENTION_NORMAL,
    ) -> Operation:
        """Begins a Store. on_end(operation, OperationEnd) comes once, also when the daemon goes away. Raises Refusal."""

        def message(op: Operation) -> pb.SessionRequest:
            return pb.SessionRequest(
                store=pb.Store(
                    operation=op.number,
                    word=op.word,
                    space_id=space_id,
                    request_id=wire_request_id(request_id),
                    region=region,
                    block_ids=block_ids,
                    hashes=hashes,
                    parents=parents,
                    deadline_ms=deadline_ms,
                    retention=retention,
                )
            )

        return self._begin(message, None, on_end)

    def load(
        self,
        space_id: bytes,
        request_id: str,
        hashes: bytes,
        deadline_ms: int,
        ticket: bytes | None,
        on_result,
        on_end,
        region: int = 0,
        lent: Sequence[int] = (),
    ) -> Operation:
        """Begins a Load, or an Accept if there is a ticket; lent: block ids of the region, one a hash, that the daemon may write. Raises Refusal."""

        def message(op: Operation) -> pb.SessionRequest:
            load = pb.Load(
                operation=op.number,
                word=op.word,
                space_id=space_id,
                request_id=wire_request_id(request_id),
                hashes=hashes,
                deadline_ms=deadline_ms,
            )
            if ticket is None:
                return pb.SessionRequest(load=load)
            return pb.SessionRequest(accept=pb.Accept(load=load, ticket=ticket, region=region, block_ids=lent))

        return self._begin(message, on_result, on_end, lends=len(lent) > 0)

    def _begin(self, message, on_result, on_end, lends: bool = False) -> Operation:
        with self._lock:
            if self.lost:
                raise Refusal("not_attached")
            if self.draining:
                raise Refusal("draining")
            if not self._free:
                raise Refusal("no_word")
            self._next += 1
            op = Operation(self, self._next, self._free.pop(), on_result, on_end, lends)
            self._operations[op.number] = op
            # Before the message, so that the daemon never meets another state.
            _native.store_u64(self.words, op.word * wire.WORD_STRIDE, wire.word(op.number, wire.PENDING))
            sent = False
            try:
                sent = self.send(message(op))
            finally:
                if not sent:
                    _native.store_u64(self.words, op.word * wire.WORD_STRIDE, wire.word(op.number, wire.FREE))
                    del self._operations[op.number]
                    self._free.append(op.word)
            if not sent:
                raise Refusal("queue_full")
        return op

    def release(self, operations: list[Operation], wrong_blocks: int) -> None:
        self.send(pb.SessionRequest(release=pb.Release(operations=[op.number for op in operations], wrong_blocks=wrong_blocks)))

    def match(
        self,
        space_id: bytes,
        request_id: str,
        hashes: bytes,
        lease_ms: int,
        timeout_s: float,
        peers: Sequence[str] = (),
        compute_us: int = 0,
    ) -> grpc.Future:
        """Asks how much of a prompt is resident, here or at peers; the future gives a MatchResponse."""
        request = pb.MatchRequest(
            session_id=self.welcome.session_id,
            request_id=wire_request_id(request_id),
            space_id=space_id,
            hashes=hashes,
            lease_ms=lease_ms,
            peers=peers,
            compute_us=compute_us,
        )
        return self._match_call.future(request, timeout=timeout_s)

    # ---- the session's thread ----

    def receive(self, message: pb.SessionResponse) -> str | None:
        """Takes one message; returns the text of a refusal."""
        self.heard = time.monotonic()
        kind = message.WhichOneof("message")
        if kind == "load_result":
            with self._lock:
                op = self._operations.get(message.load_result.operation)
            if op is not None:
                op.result(message.load_result)
        elif kind == "operation_end":
            end = message.operation_end
            with self._lock:
                op = self._operations.pop(end.operation, None)
                if op is not None:
                    self._free.append(op.word)
            if op is not None:
                op.finish(end, told=True)
        elif kind == "draining":
            self.draining = True
        elif kind == "refused":
            return f"{message.refused.field}: {message.refused.reason}"
        return None

    def lose(self, reason: str) -> None:
        """The connection is gone: what is not decided is revoked, and every operation has ended."""
        with self._lock:
            self.lost = True
            operations, self._operations = list(self._operations.values()), {}
        for op in operations:
            op._decide()
        for op in operations:
            op.finish(pb.OperationEnd(operation=op.number, outcome=pb.OUTCOME_FAILED, reason=reason), told=False)
