"""Which finished requests keep their blocks for an offer, and which of them give theirs back first."""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

# So long a request waits for blocks that were asked back, rather than that another is preempted.
_RETURN_S = 0.1


@dataclass
class Hold:
    """A finished request keeps its blocks until its stores have ended, and its offer was served or is spilled."""

    store_ids: list[int]
    offer_id: bytes = b""  # where its blocks are lent
    epoch: bytes = b""  # of the daemon that has the offer


class _Kept:
    def __init__(self, block_ids: list[int], store_ids: list[int]):
        self.block_ids = block_ids
        self.store_ids = store_ids
        self.spilled: float | None = None  # when its blocks were asked back


class Holds:
    """blocks: of the whole KV memory, of which so many percent may be kept. The age of a hold is for the ranks to see."""

    def __init__(self, blocks: int, percent: int):
        self._most = blocks * percent // 100
        self._kept: dict[str, _Kept] = {}  # the oldest first
        self._blocks: Counter[int] = Counter()  # how many holds, not asked back, keep a block

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, request_id: str, block_ids: Iterable[int], store_ids: list[int]) -> None:
        kept = self._kept[request_id] = _Kept(list(block_ids), store_ids)
        self._blocks.update(kept.block_ids)

    def ended(self, request_id: str) -> None:
        if (kept := self._kept.pop(request_id, None)) is not None and kept.spilled is None:
            self._forget(kept)

    def _forget(self, kept: _Kept) -> int:
        """The number of blocks that nobody keeps any more."""
        before = len(self._blocks)
        for block_id in kept.block_ids:
            self._blocks[block_id] -= 1
            if self._blocks[block_id] == 0:
                del self._blocks[block_id]
        return before - len(self._blocks)

    def all(self) -> list[str]:
        """Asks all back."""
        asked = [request_id for request_id, kept in self._kept.items() if kept.spilled is None]
        for request_id in asked:
            self._spill(self._kept[request_id])
        return asked

    def over_share(self) -> list[str]:
        """Asks the oldest back until no more than the share is kept."""
        asked = []
        for request_id, kept in self._kept.items():
            if len(self._blocks) <= self._most:
                break
            if kept.spilled is None:
                self._spill(kept)
                asked.append(request_id)
        return asked

    def give_back(self, blocks: int) -> list[str]:
        """Asks the oldest back until so many blocks come free."""
        asked = []
        for request_id, kept in self._kept.items():
            if blocks <= 0:
                break
            if kept.spilled is None:
                blocks -= self._spill(kept)
                asked.append(request_id)
        return asked

    def _spill(self, kept: _Kept) -> int:
        kept.spilled = time.monotonic()
        return self._forget(kept)

    def returning(self, unfinished: Callable[[list[int]], set[int]]) -> bool:
        """Whether blocks that were asked back come within a step or a few: those that no store reads."""
        now = time.monotonic()
        return any(
            kept.spilled is not None and now - kept.spilled < _RETURN_S and not unfinished(kept.store_ids) for kept in self._kept.values()
        )
