"""Counts what happened, and shows it among vLLM's own metrics."""

import threading
from collections import Counter as Tally
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

# Counter name -> what it says, and the label that splits it.
COUNTERS = {
    "stored_blocks": ("Blocks that became resident in the pool.", None),
    "stored_bytes": ("Bytes copied into the pool.", None),
    "present_blocks": ("Blocks that were to be stored and were resident already.", None),
    "unstored_blocks": ("Blocks that were not stored, by reason.", "reason"),
    "idle_blocks": ("Blocks that nobody used any more, by what became of them.", "end"),
    "given_back_blocks": ("Idle blocks that were stored and whose HBM was given back.", None),
    "loaded_blocks": ("Blocks that came into KV memory.", None),
    "loaded_bytes": ("Bytes that came into KV memory.", None),
    "source_blocks": ("Blocks that came into KV memory, by where from.", "source"),
    "asked_again_blocks": ("Blocks that could not be had from lent memory and were looked for in the pool, by reason.", "reason"),
    "load_seconds": ("Time from the start of loads to their end.", None),
    "unloaded_blocks": ("Blocks whose load failed, so that they were computed, by reason.", "reason"),
    "asked_blocks": ("Blocks of arriving prompts that were looked up.", None),
    "matched_blocks": ("Blocks of arriving prompts that were found.", None),
    "nvme_blocks": ("Of the blocks that were found, those that were on a drive only.", None),
    "prefetched_requests": ("Requests whose blocks were brought up from drives while they waited for a place.", None),
    "retentions": ("Requests that said how long they want their blocks kept, by what they said.", "retention"),
    "unasked_requests": ("Requests that were not looked up or not in time, by reason.", "reason"),
    "offers": ("Prompts offered to other instances.", None),
    "lent_prompts": ("Prompts whose blocks were kept for their offer, on each rank, by how that ended.", "end"),
    "transfers": ("Transfers that a router began before the prompt was computed, by what became of them on the prefill side.", "result"),
    "peer_hints": ("Requests that named peers, by what became of that.", "result"),
    "peer_blocks": ("Of the blocks that were found, those of peers.", None),
    "tickets": ("Tickets that came with requests, by what became of them.", "result"),
    "errors": ("Internal errors of the connector; the engine went on.", "where"),
}


class Stats(KVConnectorStats):
    """data: "name" or "name:label value" -> sum since the last report."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for key, value in other.data.items():
            self.data[key] = self.data.get(key, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        reduced: dict[str, int | float] = {k: round(v, 3) for k, v in self.data.items()}
        seconds = self.data.get("load_seconds", 0)
        if seconds:
            reduced["load_MBps"] = round(self.data.get("loaded_bytes", 0) / seconds / 1e6, 1)
        return reduced

    def is_empty(self) -> bool:
        return not self.data


class Tallies:
    """Sums since the last take(). Safe for use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: Tally[str] = Tally()

    def add(self, name: str, n: float = 1, label: str = "") -> None:
        assert (COUNTERS[name][1] is not None) == bool(label), name
        with self._lock:
            self._sums[f"{name}:{label}" if label else name] += n  # type: ignore[assignment]

    def take(self) -> Stats | None:
        with self._lock:
            sums, self._sums = self._sums, Tally()
        return Stats(data=dict(sums)) if sums else None


class PromMetrics(KVConnectorPromMetrics):
    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, Any] = {}
        for name, (documentation, label) in COUNTERS.items():
            self._counters[name] = self._counter_cls(
                name=f"vllm:kvferry_{name}", documentation=documentation, labelnames=labelnames + ([label] if label else [])
            )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for key, n in transfer_stats_data.items():
            name, _, label = key.partition(":")
            if name in self._counters:
                self._counters[name].labels(*values, *([label] if label else [])).inc(n)
