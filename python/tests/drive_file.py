"""A drive's file as WIRE.md describes it, for tests that damage it."""

import os
import pathlib
import struct

LOG_AT, LOG_END = 64 << 10, 1984 << 10
LOG_MAGIC = 0x31474F4C4E46564B
SLABS_AT = 2 << 20
SLAB_HEADER_BYTES, SLOT_HEADER_BYTES, ALIGN = 4096, 256, 4096


class DriveFile:
    def __init__(self, path: pathlib.Path, slab_bytes: int):
        self._path, self._slab_bytes = path, slab_bytes

    def slots(self) -> list[tuple[int, int, int]]:
        """Of every slot of slabs that are in use: where its header and its payload lie, and the payload's bytes."""
        found = []
        with open(self._path, "rb") as f:
            for slab in range(SLABS_AT, os.fstat(f.fileno()).st_size, self._slab_bytes):
                f.seek(slab)
                slot_bytes, slots = struct.unpack("<8xQQ", f.read(24))
                payloads = slab + SLAB_HEADER_BYTES + -(-slots * SLOT_HEADER_BYTES // ALIGN) * ALIGN
                found += [
                    (slab + SLAB_HEADER_BYTES + n * SLOT_HEADER_BYTES, payloads + n * slot_bytes, slot_bytes)
                    for n in range(slots if slot_bytes else 0)
                ]
        return found

    def logged_headers(self) -> list[tuple[int, int]]:
        """Of the log's blocks with slot headers, of its last round and in their order: where the first header lies, and how many there are."""
        found = []
        with open(self._path, "rb") as f:
            f.seek(LOG_AT)
            log = f.read(LOG_END - LOG_AT)
        for at in range(0, len(log), ALIGN):
            magic, turn, kind, count = struct.unpack_from("<QQ4xHH", log, at)
            if magic == LOG_MAGIC and kind == 1:
                found.append((turn, LOG_AT + at + 64, count))
        return [(at, count) for turn, at, count in found if turn == max(found)[0]]

    def flip(self, offsets: list[int]) -> None:
        """Changes the bytes at these places, on the disk."""
        with open(self._path, "r+b") as f:
            for offset in offsets:
                f.seek(offset)
                (byte,) = f.read(1)
                f.seek(offset)
                f.write(bytes([byte ^ 0x41]))
            f.flush()
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def cut(self, size: int) -> None:
        os.truncate(self._path, size)
