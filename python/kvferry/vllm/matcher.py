"""Asks the daemon what of a prompt is resident, while the request waits in the engine's queue."""

import queue
import time
from collections import deque

import grpc

from kvferry.session import Session
from kvferry.threads import start_thread
from kvferry.v1 import engine_pb2 as pb
from kvferry.vllm.config import Config
from kvferry.vllm.metrics import Tallies

# What Match found is leased at least so long that a request which comes up later asks again.
_FRESH_S = 30.0
_YIELD_S = 0.0001
# So long the daemon asks peers at most.
_PEERS_WAIT_S = 0.05


class Match:
    """blocks: the longest resident prefix; None until the answer is there."""

    def __init__(self, request_id: str, generation: str, peers: list[str], compute_us: int):
        self.request_id = request_id
        self.peers = peers
        self.compute_us = compute_us
        self.generation = generation
        self.asked = time.monotonic()
        self.waited_since: float | None = None  # when the scheduler first wanted to know
        self.blocks: int | None = None
        self.hashes: list[bytes] = []  # of these, where some are on a drive only

    def stale(self, generation: str) -> bool:
        return self.generation != generation or time.monotonic() - self.asked > _FRESH_S


class Matcher:
    """One thread that sends; answers come on gRPC's threads. ask and result never wait."""

    def __init__(self, session: Session, config: Config, tallies: Tallies):
        self._session = session
        self._config = config
        self._tallies = tallies
        self.on_drive: deque[Match] = deque()  # what was found of them is on a drive, in the order of the answers; the scheduler's to take
        self._silent = False  # the last answer did not come in time: nobody waits for the next
        self._questions: queue.SimpleQueue[tuple[Match, list[bytes]] | None] = queue.SimpleQueue()
        start_thread("kvferry-match", self._run)

    def ask(self, request_id: str, hashes: list[bytes], generation: str, peers: list[str], compute_us: int) -> Match | None:
        """None where nothing can be found. peers: nodes that may have more; compute_us: what a block takes to compute."""
        target = self._session.space_id(generation)
        if target is None:
            self._tallies.add("unasked_requests", label="not_attached")
            return None
        match = Match(request_id, generation, peers, compute_us)
        self._questions.put((match, hashes))
        self._tallies.add("asked_blocks", len(hashes))
        return match

    def result(self, match: Match | None) -> int | None:
        """Resident blocks; None where it is worth to ask again in a moment."""
        if match is None:
            return 0
        if match.blocks is not None:
            return match.blocks
        now = time.monotonic()
        if match.waited_since is None:
            match.waited_since = now
        wait_s = self._config.match_wait_ms / 1000 + (_PEERS_WAIT_S if match.peers else 0)
        if not self._silent and now - match.waited_since < wait_s:
            # An engine that only waits for this answer would hold the interpreter's lock against the thread that brings it.
            time.sleep(_YIELD_S)
            return None
        match.blocks = 0
        self._tallies.add("unasked_requests", label="silent" if self._silent else "late")
        return 0

    def close(self) -> None:
        self._questions.put(None)

    def _run(self) -> None:
        while (question := self._questions.get()) is not None:
            match, hashes = question
            try:
                self._send(match, hashes)
            except Exception:
                match.blocks = 0
                self._tallies.add("unasked_requests", label="error")

    def _send(self, match: Match, hashes: list[bytes]) -> None:
        target = self._session.space_id(match.generation)
        if target is None:
            match.blocks = 0
            return
        attachment, space_id = target
        hashes = hashes[: attachment.welcome.match_blocks_max or len(hashes)]
        call = attachment.match(
            space_id,
            match.request_id,
            b"".join(hashes),
            self._config.lease_ms,
            self._config.match_timeout_ms / 1000,
            match.peers,
            match.compute_us,
        )
        call.add_done_callback(lambda done: self._answered(match, hashes, done))

    def _answered(self, match: Match, hashes: list[bytes], call: grpc.Future) -> None:
        try:
            response: pb.MatchResponse = call.result()
        except (grpc.RpcError, grpc.FutureCancelledError) as e:
            code = e.code() if isinstance(e, grpc.Call) else None
            self._silent = code == grpc.StatusCode.DEADLINE_EXCEEDED
            match.blocks = 0
            self._tallies.add("unasked_requests", label="error" if code is None else code.name.lower())
            return
        self._silent = False
        if match.blocks is None:
            if response.nvme_blocks:
                match.hashes = hashes[: response.blocks - response.peer_blocks]
                self.on_drive.append(match)
            match.blocks = response.blocks
            self._tallies.add("matched_blocks", response.blocks)
            self._tallies.add("nvme_blocks", response.nvme_blocks)
            self._tallies.add("peer_blocks", response.peer_blocks)
