from typing import Any

# Anything with the buffer protocol; typing has a name for it since Python 3.12.
Buffer = Any

LOADED: int  # the bytes are there and right
CHANGED: int  # the slot or block was given to others
CORRUPT: int  # the checksum does not hold
SKIPPED: int  # was not ready

def copy_blocks(
    dst: Buffer, dst_planes: Buffer, dst_ids: Buffer, src: Buffer, src_planes: Buffer, src_ids: Buffer, threads: int
) -> None: ...
def load_blocks(
    dst: Buffer,
    planes: Buffer,
    ids: Buffer,
    pool: Buffer,
    ready: Buffer,
    offsets: Buffer,
    headers: Buffer,
    generations: Buffer,
    crcs: Buffer,
    threads: int,
) -> bytes: ...
def load_lent(
    dst: Buffer,
    dst_planes: Buffer,
    dst_ids: Buffer,
    src: Buffer,
    src_planes: Buffer,
    src_ids: Buffer,
    table: Buffer,
    ready: Buffer,
    generations: Buffer,
    threads: int,
) -> bytes: ...
def populate(memory: Buffer, offset: int, length: int) -> bool: ...
def load_u64(memory: Buffer, offset: int) -> int: ...
def store_u64(memory: Buffer, offset: int, value: int) -> None: ...
def swap_u64(memory: Buffer, offset: int, old: int, new: int) -> bool: ...
def add_u64s(memory: Buffer, ids: Buffer) -> None: ...
def load_u64s(memory: Buffer, ids: Buffer) -> bytes: ...
def crc32c(data: Buffer, crc: int = 0) -> int: ...
def isa() -> str: ...
