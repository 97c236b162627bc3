"""What the scheduler side and the workers tell each other with every step. Pickled by vLLM between its own processes."""

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvferry.vllm.holds import Hold


@dataclass
class StoreJob:
    store_id: int  # given by the scheduler side, the same on every rank
    request_id: str
    block_ids: list[int]
    hashes: bytes
    parents: bytes
    retention: int = 0  # pb.Retention
    due: float = 0.0  # of an idle one: on the monotonic clock, which all processes of a node share


@dataclass
class LoadJob:
    request_id: str
    block_ids: list[int]
    hashes: bytes
    ticket: bytes | None
    offered: int  # so many of the blocks are the ticket's, the rest is here
    timeout_ms: int


@dataclass
class StepMeta(KVConnectorMetadata):
    weights_generation: str
    idle: bool = False  # nothing is computed in this step
    revoke_all: bool = False  # any block may be written again in this step
    revokes: list[int] = field(default_factory=list)  # stores whose blocks are written again in this step
    stores: list[StoreJob] = field(default_factory=list)  # to begin after this step's forward
    idle_stores: list[StoreJob] = field(default_factory=list)  # to begin when they are due; ids of their own
    idle_used: list[int] = field(default_factory=list)  # blocks of these that are idle no more
    idle_reused: list[int] = field(default_factory=list)  # blocks of these that are written again in this step
    idle_clear: bool = False  # forget those that have not begun
    loads: list[LoadJob] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)  # requests whose load is no longer wanted
    holds: dict[str, Hold] = field(default_factory=dict)  # requests that have finished and keep their blocks
    spills: dict[str, str] = field(default_factory=dict)  # held requests that shall give them back, and why


@dataclass
class RankMeta(KVConnectorWorkerMetadata):
    ended: Counter[int]  # store id -> number of ranks that are done with reading its blocks
    refuses: bool = False  # a rank serves nothing, for good
    kept: Counter[int] = field(default_factory=Counter)  # idle store id -> number of ranks on which all of its blocks are resident
    lost: Counter[int] = field(default_factory=Counter)  # the same where they are not, and the store has ended

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "RankMeta":
        assert isinstance(other, RankMeta)
        return RankMeta(self.ended + other.ended, self.refuses or other.refuses, self.kept + other.kept, self.lost + other.lost)
