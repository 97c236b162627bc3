"""Memory that is shared with the daemon."""

import contextlib
import fcntl
import mmap
import os
import select
import socket
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from kvferry import _native, wire

DESCRIPTOR_TIMEOUT_S = 5.0
_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; Python has no name for it before 3.13


class SharedMemory:
    """A memfd that cannot shrink, mapped for reading and writing. It lives until the last mapping and descriptor are gone."""

    def __init__(self, name: str, size: int):
        self.size = size
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            # Who is given a descriptor for reading shall not open it for writing.
            os.fchmod(self.fd, 0o444)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            self.map = mmap.mmap(self.fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            with contextlib.suppress(OSError):  # as the engine's own memory may have had them
                self.map.madvise(mmap.MADV_HUGEPAGE)
        except BaseException:
            os.close(self.fd)
            raise

    def close_descriptor(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class GenerationTable:
    """A number for each block id, which this process alone can change: whoever reads a block of this engine's memory compares it before and after.

    Not locked: its owner is.
    """

    def __init__(self, entries: int):
        self.entries = entries
        self.shared = SharedMemory("kvferry-generations", 8 * entries)
        # The mapping that exists stays writable; no other can be made, whoever has the descriptor.
        fcntl.fcntl(self.shared.fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)

    def bump(self, block_ids: Iterable[int]) -> None:
        """These blocks may be written from now on."""
        _native.add_u64s(self.shared.map, array("I", block_ids))

    def bump_all(self) -> None:
        self.bump(range(self.entries))

    def values(self, block_ids: list[int]) -> list[int]:
        return list(array("Q", _native.load_u64s(self.shared.map, array("I", block_ids))))


class Process:
    """Another process, by its pidfd."""

    def __init__(self, pidfd: int):
        self._fd = os.dup(pidfd)

    def dead(self) -> bool:
        """Whether nothing of it runs any more; a frozen one is alive."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(0))

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)


@dataclass
class Descriptors:
    """What came back from the daemon; None for what did not."""

    pool: mmap.mmap | None = None  # for reading only
    words: mmap.mmap | None = None
    daemon: Process | None = None
    lent: mmap.mmap | None = None  # for reading only, like its table
    generations: mmap.mmap | None = None


def exchange_descriptors(path: str, token: bytes, given: dict[int, int]) -> Descriptors:
    """Hands this process's pidfd and other descriptors, by region id or entry, to the daemon."""
    pidfd = os.pidfd_open(os.getpid())
    try:
        return _exchange(path, token, [wire.ENTRY_PIDFD, *given], [pidfd, *given.values()], DESCRIPTOR_TIMEOUT_S)
    finally:
        os.close(pidfd)


def fetch_lent(path: str, token: bytes, timeout_s: float) -> Descriptors:
    return _exchange(path, token, [], [], timeout_s)


def _exchange(path: str, token: bytes, entries: list[int], given: list[int], timeout_s: float) -> Descriptors:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
        s.settimeout(timeout_s)
        s.connect(path)
        socket.send_fds(s, [wire.pack_descriptors(token, entries)], given)
        answer, fds, _, _ = socket.recv_fds(s, wire.ANSWER_BYTES_MAX, 4)
    try:
        kinds = wire.unpack_descriptors(answer)
        if len(kinds) != len(fds):
            raise wire.WireError(f"descriptor socket: {len(kinds)} entries but {len(fds)} descriptors")
        out = Descriptors()
        for kind, fd in zip(kinds, fds):
            if kind == wire.ENTRY_POOL:
                out.pool = _map(fd, mmap.PROT_READ)
            elif kind == wire.ENTRY_WORDS:
                out.words = _map(fd, mmap.PROT_READ | mmap.PROT_WRITE)
            elif kind == wire.ENTRY_DAEMON:
                out.daemon = Process(fd)
            elif kind == wire.ENTRY_LENT:
                out.lent = _map(fd, mmap.PROT_READ)
            elif kind == wire.ENTRY_GENERATIONS:
                out.generations = _map(fd, mmap.PROT_READ)
            else:
                raise wire.WireError(f"descriptor socket: unknown entry {kind:#x}")
        return out
    finally:
        for fd in fds:
            os.close(fd)


def _map(fd: int, protection: int) -> mmap.mmap:
    return mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, protection)
