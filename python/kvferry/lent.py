"""Memory that other workers of the node lend, mapped for reading."""

import mmap
from collections import OrderedDict

from kvferry import wire
from kvferry.attachment import Attachment
from kvferry.memory import fetch_lent
from kvferry.v1 import engine_pb2 as pb

# An address range each; an engine has one for each of its ranks.
MAPPED_MAX = 64
# Shorter than for attaching: a load waits for it, and can have its blocks from the pool.
_FETCH_TIMEOUT_S = 1.0


class LentMemory:
    def __init__(self, memory: mmap.mmap, table: mmap.mmap, planes: bytes):
        self.memory = memory
        self.table = table
        self.planes = planes  # packed

    def close(self) -> None:
        self.memory.close()
        self.table.close()


class LentMemories:
    """What is mapped, by epoch and handle. One thread uses it, so that nothing is unmapped while it is copied from."""

    def __init__(self, descriptor_path: str):
        self._path = descriptor_path
        self._mapped: OrderedDict[tuple[bytes, int], LentMemory] = OrderedDict()

    def get(self, attachment: Attachment, lent: pb.Lent) -> LentMemory:
        """Fetches and maps it where it is not mapped yet. Raises OSError or WireError."""
        key = attachment.epoch, lent.handle
        if key in self._mapped:
            self._mapped.move_to_end(key)
            return self._mapped[key]
        got = fetch_lent(self._path, lent.token, _FETCH_TIMEOUT_S)
        if got.lent is None or got.generations is None:
            raise wire.WireError("descriptor socket: no lent memory came")
        if len(got.lent) < lent.bytes or len(got.generations) < 8 * lent.generations:
            raise wire.WireError(f"lent memory of {len(got.lent)} bytes, table of {len(got.generations)}: less than was said")
        planes = b"".join(wire.PLANE.pack(p.base, p.stride, p.bytes) for p in lent.planes)
        # Handles of an earlier daemon mean nothing any more.
        for old in [k for k in self._mapped if k[0] != attachment.epoch]:
            self._mapped.pop(old).close()
        while len(self._mapped) >= MAPPED_MAX:
            self._mapped.popitem(last=False)[1].close()
        self._mapped[key] = LentMemory(got.lent, got.generations, planes)
        return self._mapped[key]

    def drop(self, epoch: bytes, handle: int) -> None:
        """Its owner is gone."""
        if (memory := self._mapped.pop((epoch, handle), None)) is not None:
            memory.close()

    def close(self) -> None:
        while self._mapped:
            self._mapped.popitem()[1].close()
