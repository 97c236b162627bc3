"""The scheduler side: what to look up, load, store, hand over and take back, decided from vLLM's calls.

It never waits for the daemon. What it knows of a request is in one _Request; what may still read blocks is in _Reads.
"""

import logging
import os
from collections import Counter
from typing import Any

from kvferry import wire
from kvferry.attachment import wire_request_id
from kvferry.memory import GenerationTable
from kvferry.session import Session
from kvferry.v1 import engine_pb2 as pb
from kvferry.vllm.config import Config
from kvferry.vllm.handoff import (
    RETENTIONS,
    Offers,
    OpenOffer,
    Transfer,
    read_peers,
    read_retention,
    read_ticket,
    read_transfer,
    transfer_ticket,
)
from kvferry.vllm.holds import Hold, Holds
from kvferry.vllm.matcher import Match, Matcher
from kvferry.vllm.meta import LoadJob, RankMeta, StepMeta, StoreJob
from kvferry.vllm.metrics import Stats, Tallies
from kvferry.vllm.pace import Pace
from kvferry.vllm.reads import Reads

STORE_BLOCKS_MAX = 64
RELEASES_MAX = 4096
# Requests whose prompts are brought up ahead: the daemon lets each have a quarter of the pool, and the rest of it is for what is asked for now.
COMING_MAX = 2
_NO_PARENT = bytes(wire.HASH_BYTES)


class _Request:
    def __init__(self, request: Any):
        self.request = request
        self.match: Match | None = None
        self.placed = False  # it has blocks, or had
        self.ticket: pb.Ticket | None = None
        self.ticket_bytes = b""
        self.load_timeout_ms = 0
        self.peers: list[str] = []
        self.retention = ""  # one of RETENTIONS, where it said so
        self.transfer: Transfer | None = None  # under which it is to be offered
        self.opened: OpenOffer | None = None
        self.may_load = True  # False after a load of it failed: what failed once is computed
        self.may_store = True  # False once the weights changed under it: what it computes from then on stands on what the old ones made
        self.local_blocks = 0  # hits in the engine's own cache at the last look-up
        self.table_length = 0  # blocks of its table that were seen so far
        self.stored_until = 0  # blocks before this one are resident or were handed to a store
        self.stores: set[int] = set()  # that cover blocks of it and have not ended


class Scheduler:
    """Every method runs on the scheduler's thread. ranks: worker processes that must be done with a store; blocks: of each one's KV memory."""

    def __init__(self, config: Config, hello: pb.Hello, ranks: int, blocks: int, log: logging.Logger):
        self._config = config
        self._hello = hello
        self._ranks = ranks
        self._log = log
        self._block_tokens: int = hello.space.block_tokens
        self._generation: str = hello.space.weights_generation
        self._tallies = Tallies()
        self._requests: dict[str, _Request] = {}
        self._loads: dict[str, LoadJob] = {}  # begun and not ended
        self._reads = Reads()
        self._holds = Holds(blocks, config.spill_percent)
        self._unplaced: dict[str, int] = {}  # requests that could begin in this step, and the blocks that they need
        self._pace = Pace(self._block_tokens)
        self._table: GenerationTable | None = None
        given = {}
        if config.mode == "lent":
            self._table = GenerationTable(blocks)
            hello.generations = blocks
            given[wire.ENTRY_GENERATIONS] = self._table.shared.fd
        self._offers = Offers(config, self._block_tokens, hello.instance, self._table)
        # What a peer's transfer writes straight into blocks is not in the pool.
        self._direct = config.mode == "lent" and config.direct != "off"
        self._meta = StepMeta(self._generation)
        self._leases: set[str] = set()  # of requests, to be given back
        self._coming: set[str] = set()  # requests without blocks whose prompt is being brought up from the drives
        self._refused = False  # a rank cannot serve
        self._complained = False  # about a retention that is none
        self._session = Session(config.socket, config.descriptors, hello, given, log)
        self._matcher = Matcher(self._session, config, self._tallies)
        self._session.start()

    # ---- look-up ----

    def arrived(self, request: Any) -> None:
        state = _Request(request)
        self._requests[request.request_id] = state
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):
            self._take_ticket(state, params)
        elif params.get("do_remote_decode"):
            self._open_offer(state, params)
        state.peers, result = read_peers(params)
        if result != "absent":
            self._tallies.add("peer_hints", label=result)
        state.retention, said = read_retention(params)
        if said != "absent":
            self._tallies.add("retentions", label=said)
        if said == "malformed" and not self._complained:
            self._complained = True
            given = params["kvferry_retention"]
            self._log.warning("kvferry: kvferry_retention %.64r of a request is ignored; known are %s (said once)", given, ", ".join(RETENTIONS))
        self._look_up(state)

    def _take_ticket(self, state: _Request, params: dict[str, Any]) -> None:
        target = self._session.space_id(self._generation)
        if target is None:
            self._tallies.add("tickets", label="not_attached")
            return
        attachment, space_id = target
        hashes, tokens = state.request.block_hashes, state.request.num_tokens
        state.load_timeout_ms = self._config.load_timeout_ms
        state.ticket_bytes, state.ticket, result = read_ticket(params, space_id, hashes, tokens)
        if result == "absent":
            transfer, result = read_transfer(params, decodes=True)
            if transfer is not None:
                # Its blocks come while the other engine computes.
                state.load_timeout_ms = self._config.transfer_timeout_ms
                state.ticket_bytes, state.ticket, result = transfer_ticket(
                    transfer, space_id, hashes[: tokens // self._block_tokens], tokens, attachment.welcome.load_blocks_max
                )
        self._tallies.add("tickets", label=result)

    def _open_offer(self, state: _Request, params: dict[str, Any]) -> None:
        state.transfer, result = read_transfer(params, decodes=False)
        if state.transfer is not None:
            target = self._session.space_id(self._generation)
            if target is None:
                result = "not_attached"
            else:
                state.opened = self._offers.begin(state.request, state.transfer, *target)
                result = "begun" if state.opened is not None else "not_offered"
        if result != "absent":
            self._tallies.add("transfers", label=result)

    def _look_up(self, state: _Request) -> None:
        blocks = min(len(state.request.block_hashes), state.request.num_tokens // self._block_tokens)
        state.match = None
        if blocks:
            state.match = self._matcher.ask(
                state.request.request_id, state.request.block_hashes[:blocks], self._generation, state.peers, self._pace.block_us
            )

    def matched_tokens(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """None: ask again in a moment."""
        state = self._requests.get(request.request_id)
        if state is None:
            return 0, False
        # The engine begins this request from nothing, or again after it was preempted.
        state.local_blocks = state.table_length = computed_tokens // self._block_tokens
        state.stored_until = 0
        state.may_store = True
        if state.match is not None and state.match.stale(self._generation):
            self._look_up(state)
        available = self._matcher.result(state.match)
        if available is None and state.ticket is None:
            return None, False
        self._unplaced[request.request_id] = -(-(request.num_tokens - computed_tokens) // self._block_tokens)
        available = available or 0
        if not state.may_load or self._refused:
            return 0, False  # and all of it is stored: what could not be loaded is gone, or broken
        state.stored_until = available
        if state.ticket is not None:
            available = max(available, state.ticket.blocks)
        tokens = min(available * self._block_tokens, request.num_tokens) - computed_tokens
        return (tokens, True) if tokens > 0 else (0, False)

    # ---- blocks ----

    def allocated(self, request: Any, block_ids: list[int], external_tokens: int) -> None:
        """block_ids is the request's whole table, hits in the engine's own cache first."""
        self._unplaced.pop(request.request_id, None)
        self._coming.discard(request.request_id)
        state = self._requests.get(request.request_id)
        if state is None:
            self._reused(block_ids)
            return
        state.placed = True
        self._reused(block_ids[state.table_length :])
        state.table_length = len(block_ids)
        if external_tokens <= 0:
            if state.match is not None and request.request_id not in self._loads:
                self._leases.add(request.request_id)
            return
        first, end = state.local_blocks, state.local_blocks + external_tokens // self._block_tokens
        offered = max(0, min(state.ticket.blocks, end) - first) if state.ticket is not None else 0
        if not (offered and self._direct):
            state.stored_until = max(state.stored_until, end)
        job = LoadJob(
            request.request_id,
            list(block_ids[first:end]),
            b"".join(request.block_hashes[first:end]),
            state.ticket_bytes if offered else None,
            offered,
            state.load_timeout_ms if offered else self._config.load_timeout_ms,
        )
        state.ticket = None  # a ticket is good for one claim
        self._loads[request.request_id] = job
        self._meta.loads.append(job)

    def unallocated(self, request: Any, block_ids: list[int], external_tokens: int) -> None:
        """allocated() has failed: the engine waits for the end of a load that nobody began, so that one is begun which ends at once."""
        state = self._requests.get(request.request_id)
        if external_tokens <= 0 or request.request_id in self._loads:
            return
        first = state.local_blocks if state is not None else 0
        job = LoadJob(request.request_id, list(block_ids[first:]), b"", None, 0, 0)
        self._loads[request.request_id] = job
        self._meta.loads.append(job)

    def _reused(self, block_ids: list[int]) -> None:
        """These blocks may be written as soon as the step's metadata has left."""
        if self._table is not None:
            self._table.bump(block_ids)
        self._meta.revokes.extend(self._reads.reuse(block_ids))

    # ---- the step ----

    def step_meta(self, output: Any) -> StepMeta:
        cached = output.scheduled_cached_reqs
        for request_id, new in zip(cached.req_ids, cached.new_block_ids):
            # A resumed request was told to allocated(), with its whole table.
            if new is not None and request_id not in cached.resumed_req_ids:
                self._reused(new[0])
                if state := self._requests.get(request_id):
                    state.table_length += len(new[0])
        serves = self._session.attachment is not None and not self._refused
        for request_id, scheduled in output.num_scheduled_tokens.items() if serves else ():
            if state := self._requests.get(request_id):
                tables = output.kv_connector_block_state.get_block_ids(request_id)
                if tables is not None:
                    self._store_finished(state, tables[0], state.request.num_computed_tokens + scheduled)
        self._release_leases()
        self._bring_up()
        self._spill(self._holds.over_share(), "share")
        # The engine had no room for what is left over here.
        self._spill(self._holds.give_back(sum(self._unplaced.values())), "pressure")
        self._unplaced.clear()
        self._pace.step_begins(self._prompt_tokens(output))
        meta, self._meta = self._meta, StepMeta(self._generation)
        meta.weights_generation = self._generation
        meta.idle = output.total_num_scheduled_tokens == 0
        return meta

    def _spill(self, request_ids: list[str], reason: str) -> None:
        self._meta.spills.update(dict.fromkeys(request_ids, reason))

    def _prompt_tokens(self, output: Any) -> int:
        """Tokens of prompts that a step computes."""
        computed = 0
        for request_id, scheduled in output.num_scheduled_tokens.items():
            if (state := self._requests.get(request_id)) is not None:
                computed += min(scheduled, max(0, state.request.num_prompt_tokens - state.request.num_computed_tokens))
        return computed

    def _store_finished(self, state: _Request, block_ids: list[int], tokens: int) -> None:
        """Hands the blocks that are full after this step to stores, and so what the engine's own cache had of the prompt."""
        if not state.may_store:
            return
        hashes = state.request.block_hashes
        end = min(tokens // self._block_tokens, len(hashes), len(block_ids))
        wanted: list[int] = []
        for i in range(state.stored_until, end):
            if (store_id := self._reads.store_of(hashes[i])) is not None:
                state.stores.add(store_id)  # another request's store has it
            elif self._reads.current(block_ids[i]):
                wanted.append(i)
        state.stored_until = max(state.stored_until, end)
        retention = RETENTIONS.get(state.retention, pb.RETENTION_NORMAL)
        for at in range(0, len(wanted), STORE_BLOCKS_MAX):
            part = wanted[at : at + STORE_BLOCKS_MAX]
            ids, names = [block_ids[i] for i in part], [hashes[i] for i in part]
            store_id = self._reads.add(ids, names, self._ranks)
            state.stores.add(store_id)
            parents = b"".join(hashes[i - 1] if i else _NO_PARENT for i in part)
            self._meta.stores.append(StoreJob(store_id, state.request.request_id, ids, b"".join(names), parents, retention))

    def step_ended(self, output: Any) -> None:
        self._pace.step_ended()
        if isinstance(meta := output.kv_connector_worker_meta, RankMeta):
            self._reads.ended(meta.ended)
            self._refused = self._refused or meta.refuses
        for request_id in output.finished_sending or ():
            self._holds.ended(request_id)
        for request_id in output.finished_recving or ():
            job = self._loads.pop(request_id, None)
            state = self._requests.get(request_id)
            if job is None or state is None:
                continue
            self._leases.add(request_id)
            failed = [i for i, block_id in enumerate(job.block_ids) if block_id in (output.invalid_block_ids or ())]
            if failed:
                state.may_load = False
                state.stored_until = min(state.stored_until, state.local_blocks + failed[0])

    # ---- the end of a request ----

    def finished(self, request: Any, block_ids: list[int], finished_well: bool) -> tuple[bool, dict[str, Any] | None]:
        """Whether the request's blocks must be kept, for its stores or its offer, and what goes back to the router.

        The engine goes on stepping as long as it keeps blocks of a finished request (its has_requests counts them), each millisecond when there
        is nothing else to do: so the ranks are asked, and the blocks come back, without another request having to come.
        """
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return False, None
        self._unplaced.pop(request.request_id, None)
        self._coming.discard(request.request_id)
        if state.match is not None:
            self._leases.add(request.request_id)
        loading = request.request_id in self._loads
        if loading:
            # Still receiving: the workers report it, at the latest at the load's deadline and when the daemon is quiet.
            self._meta.cancels.append(request.request_id)
        params = request.kv_transfer_params or {}
        if loading or not params.get("do_remote_decode") or not finished_well:
            if state.opened is not None:
                state.opened.end("aborted")
            return False, None
        answer, hold = self._offer(state, block_ids)
        pending = sorted(self._reads.unfinished(state.stores))
        if self._table is None or (not pending and hold is None):
            return False, answer
        hold = hold or Hold([])
        hold.store_ids = pending
        if hold.offer_id:
            self._holds.add(request.request_id, block_ids, pending)
        self._meta.holds[request.request_id] = hold
        return True, answer

    def _offer(self, state: _Request, block_ids: list[int]) -> tuple[dict[str, Any], Hold | None]:
        # These keys are what proxies carry from one engine to the other; without a ticket the prompt is computed again.
        answer: dict[str, Any] = {"do_remote_prefill": True, "do_remote_decode": False}
        answer.update(dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")))
        if state.retention:
            answer["kvferry_retention"] = state.retention  # a proxy gives the other leg these parameters only
        target = self._session.space_id(self._generation)
        if target is None or not state.may_store:
            return answer, None
        # What lies in a block that was computed with other weights is not what its hash says.
        lendable = block_ids if all(map(self._reads.current, block_ids)) else []
        made = self._offers.finish(state.request, lendable, state.transfer, state.opened, *target)
        if made is None:
            return answer, None
        answer["kvferry_ticket"], hold = made
        self._tallies.add("offers")
        return answer, hold

    def frees_pending(self) -> bool:
        """vLLM asks before it preempts a request because another found no block: blocks that are kept for an offer come back first."""
        if not self._holds.returning(self._reads.unfinished):
            self._spill(self._holds.give_back(1), "pressure")
        return self._holds.returning(self._reads.unfinished)

    def _release_leases(self) -> None:
        if not self._leases:
            return
        leases, self._leases = [wire_request_id(r) for r in self._leases], set()
        if (attachment := self._session.attachment) is not None:
            for at in range(0, len(leases), RELEASES_MAX):
                release = pb.ReleaseLease(request_ids=leases[at : at + RELEASES_MAX])
                attachment.send(pb.SessionRequest(release_lease=release))

    def _bring_up(self) -> None:
        """What the next requests will load comes up from the drives while they wait for a place. Those that have one by now load it themselves."""
        while len(self._coming) < COMING_MAX and self._matcher.on_drive:
            match = self._matcher.on_drive.popleft()
            state = self._requests.get(match.request_id)
            target = self._session.space_id(match.generation)
            if state is None or state.match is not match or state.placed or target is None or match.generation != self._generation:
                continue
            attachment, space_id = target
            most = attachment.welcome.load_blocks_max or len(match.hashes)
            prefetch = pb.Prefetch(space_id=space_id, hashes=b"".join(match.hashes[:most]))
            if attachment.send(pb.SessionRequest(prefetch=prefetch)):
                self._coming.add(match.request_id)
                self._tallies.add("prefetched_requests")

    # ---- the rest ----

    def reset(self) -> None:
        """The weights may have changed: what was stored so far, and what lies in the engine's blocks, belongs to another space."""
        self._generation = os.urandom(16).hex()
        space = pb.Space()
        space.CopyFrom(self._hello.space)
        space.weights_generation = self._generation
        self._session.use_space(space)
        self._reads.forget_contents()
        for state in self._requests.values():
            state.may_store = False
            if state.opened is not None:
                state.opened.end("the weights changed")
                state.opened = state.transfer = None
        self._spill(self._holds.all(), "reset")
        if self._table is not None:
            self._table.bump_all()
        self._meta.cancels.extend(self._loads)
        self._log.info("kvferry: the cache was reset: blocks of weights generation %s from now on", self._generation)

    def failed(self, where: str) -> None:
        """A hook has failed half-way: which blocks it would have taken back is not known, so all are."""
        self._tallies.add("errors", label=where)
        self._meta.revoke_all = True
        if self._table is not None:
            self._table.bump_all()

    def rescue_meta(self) -> StepMeta:
        """For a step whose own metadata could not be made. What a rank has to report an end of must reach it all the same."""
        meta, self._meta = self._meta, StepMeta(self._generation)
        if self._table is not None:
            self._table.bump_all()
        self._reads.ended(Counter({job.store_id: self._ranks for job in meta.stores}))
        return StepMeta(self._generation, revoke_all=True, loads=meta.loads, cancels=meta.cancels, holds=meta.holds, spills=meta.spills)

    def take_stats(self) -> Stats | None:
        return self._tallies.take()

    def close(self) -> None:
        self._matcher.close()
        self._session.close()
