"""Where the blocks of each layer lie in the engine's KV memory, and how that memory is lent."""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from kvferry import wire
from kvferry.memory import SharedMemory
from kvferry.v1 import engine_pb2 as pb

PAGE = 4096


@dataclass(frozen=True)
class Plane:
    """As in the Region message: block b has its bytes at base + b*stride."""

    base: int
    stride: int
    bytes: int


def pack(planes: list[Plane]) -> bytes:
    """For the C helper."""
    return b"".join(wire.PLANE.pack(p.base, p.stride, p.bytes) for p in planes)


def _tensor_planes(name: str, t: torch.Tensor, blocks: int, storage_base: int) -> list[Plane]:
    """Planes of one layer, which is [blocks, ...] or [2, blocks, ...]. Raises ValueError where a block is not in one piece."""
    size, start = t.element_size(), int(t.storage_offset())
    if t.shape[0] % blocks == 0 and t.shape[0] > 0:
        outer, dim = [0], 0
    elif t.dim() > 1 and t.shape[1] % blocks == 0:
        outer, dim = [i * t.stride(0) for i in range(t.shape[0])], 1
    else:
        raise ValueError(f"KV memory of {name} has shape {tuple(t.shape)}: no dimension of {blocks} blocks")
    pieces = t.shape[dim] // blocks  # the attention backend may cut a block of the cache manager into several
    inner = t[(0,) * (dim + 1)]
    extent = 1 + sum((n - 1) * s for n, s in zip(inner.shape, inner.stride()))
    if extent != inner.numel() or (pieces > 1 and t.stride(dim) != extent):
        raise ValueError(f"KV memory of {name} has stride {t.stride()}: a block is not in one piece")
    return [Plane(storage_base + (start + o) * size, t.stride(dim) * pieces * size, inner.numel() * pieces * size) for o in outer]


class KVMemory:
    """The engine's KV memory: one address range per torch storage, seen as one where it is lent.

    memory: what the C helper reads and writes; planes: of every layer, in it; shared: the memfd, if lent.
    """

    def __init__(self, kv_caches: dict[str, torch.Tensor], blocks: int, lend: bool):
        for name, t in kv_caches.items():
            if t.device.type != "cpu":
                raise ValueError(f"KV memory of {name} is on {t.device}: only host memory is supported so far")
        storages: dict[int, Any] = {}
        for t in kv_caches.values():
            storages.setdefault(t.untyped_storage().data_ptr(), t.untyped_storage())
        self.shared: SharedMemory | None = None
        if lend:
            bases = self._lend(kv_caches, storages)
        elif len(storages) != 1:
            raise ValueError(f"KV memory lies in {len(storages)} allocations; staging needs one")
        else:
            (pointer,) = storages
            self._storage = storages[pointer]  # keeps the memory alive
            self.memory: Any = (ctypes.c_char * self._storage.nbytes()).from_address(pointer)
            bases = {pointer: 0}
        self.planes: list[Plane] = []
        for name, t in kv_caches.items():
            for plane in _tensor_planes(name, t, blocks, 0 if lend else bases[t.untyped_storage().data_ptr()]):
                if plane not in self.planes:  # layers may share their KV
                    self.planes.append(plane)
        self.block_bytes = sum(p.bytes for p in self.planes)

    def _lend(self, kv_caches: dict[str, torch.Tensor], storages: dict[int, Any]) -> dict[int, int]:
        """Moves the engine's KV memory into a memfd: every tensor object is pointed to its new place, content and all."""
        bases, size = {}, 0
        for pointer, storage in storages.items():
            bases[pointer] = size
            size += -(-storage.nbytes() // PAGE) * PAGE
        self.shared = SharedMemory("kvferry-kv", size)
        self.memory = self.shared.map
        whole = torch.frombuffer(self.shared.map, dtype=torch.uint8)
        for t in kv_caches.values():
            base = bases[t.untyped_storage().data_ptr()]
            if base % t.element_size():
                raise ValueError("KV memory is not aligned to its elements")
            t.set_(whole.untyped_storage(), base // t.element_size() + t.storage_offset(), t.shape, t.stride())
        return bases

    def region(self, region_id: int, blocks: int, writable: bool) -> pb.Region:
        assert self.shared is not None
        return pb.Region(
            id=region_id,
            kind=pb.REGION_KIND_SHARED_HOST,
            bytes=self.shared.size,
            blocks=blocks,
            planes=[pb.Plane(base=p.base, stride=p.stride, bytes=p.bytes) for p in self.planes],
            writable=writable,
        )


class Staging:
    """Slots in a memfd, each one block of all layers in a row. Not locked: its owner is."""

    def __init__(self, block_planes: list[Plane], size: int):
        block_bytes = sum(p.bytes for p in block_planes)
        stride = -(-block_bytes // PAGE) * PAGE
        self.slots = size // stride
        if self.slots == 0:
            raise ValueError(f"kv_connector_extra_config.staging_bytes: {size} is less than a block of {stride}")
        self.shared = SharedMemory("kvferry-staging", self.slots * stride)
        self.planes: list[Plane] = []
        base = 0
        for p in block_planes:
            self.planes.append(Plane(base, stride, p.bytes))
            base += p.bytes
        self._free = list(range(self.slots - 1, -1, -1))

    def take(self, n: int) -> list[int] | None:
        if n > len(self._free):
            return None
        return [self._free.pop() for _ in range(n)]

    def give(self, slots: list[int]) -> None:
        self._free.extend(slots)

    def region(self, region_id: int) -> pb.Region:
        return pb.Region(
            id=region_id,
            kind=pb.REGION_KIND_STAGING,
            bytes=self.shared.size,
            blocks=self.slots,
            planes=[pb.Plane(base=p.base, stride=p.stride, bytes=p.bytes) for p in self.planes],
        )
