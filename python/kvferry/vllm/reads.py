"""Which blocks may still be read by stores, and which hold what their hash says under the current weights."""

from collections import Counter
from collections.abc import Iterable


class _Read:
    def __init__(self, block_ids: list[int], hashes: list[bytes], ranks: int):
        self.block_ids = block_ids
        self.hashes = hashes
        self.ranks = ranks  # that are not done


class Reads:
    """A store is unfinished until every rank is done with it. Told late it costs a revoke that comes too late to do anything."""

    def __init__(self) -> None:
        self._last = 0
        self._unfinished: dict[int, _Read] = {}
        self._by_block: dict[int, set[int]] = {}
        self._by_hash: dict[bytes, int] = {}
        self._content = 0  # number of the weights generation
        self._written: dict[int, int] = {}  # block id -> weights generation in which it was last allocated

    def add(self, block_ids: list[int], hashes: list[bytes], ranks: int) -> int:
        self._last += 1
        self._unfinished[self._last] = _Read(block_ids, hashes, ranks)
        for block_id in block_ids:
            self._by_block.setdefault(block_id, set()).add(self._last)
        for name in hashes:
            self._by_hash[name] = self._last
        return self._last

    def store_of(self, name: bytes) -> int | None:
        """The unfinished store that has this block."""
        return self._by_hash.get(name)

    def reuse(self, block_ids: Iterable[int]) -> list[int]:
        """The engine is about to write these blocks. Returns the unfinished stores that read any of them."""
        hit: set[int] = set()
        for block_id in block_ids:
            self._written[block_id] = self._content
            hit.update(self._by_block.get(block_id, ()))
        for store_id in hit:
            self._drop_hashes(store_id)
        return sorted(hit)

    def ended(self, ended: Counter[int]) -> None:
        for store_id, ranks in ended.items():
            read = self._unfinished.get(store_id)
            if read is None:
                continue
            read.ranks -= ranks
            if read.ranks > 0:
                continue
            self._drop_hashes(store_id)
            del self._unfinished[store_id]
            for block_id in read.block_ids:
                stores = self._by_block[block_id]
                stores.discard(store_id)
                if not stores:
                    del self._by_block[block_id]

    def _drop_hashes(self, store_id: int) -> None:
        for name in self._unfinished[store_id].hashes:
            if self._by_hash.get(name) == store_id:
                del self._by_hash[name]

    def unfinished(self, store_ids: Iterable[int]) -> set[int]:
        return {i for i in store_ids if i in self._unfinished}

    def forget_contents(self) -> None:
        """The weights changed: no block that was allocated before holds what its hash says."""
        self._content += 1
        self._by_hash.clear()

    def current(self, block_id: int) -> bool:
        return self._written.get(block_id) == self._content
