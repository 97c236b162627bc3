"""Memory that is shared with the daemon."""

import contextlib
import fcntl
import mmap
import os
import socket

from kvferry import wire

DESCRIPTOR_TIMEOUT_S = 5.0


class SharedMemory:
    """A memfd that cannot shrink, mapped for reading and writing. It lives until the last mapping and descriptor are gone."""

    def __init__(self, name: str, size: int):
        self.size = size
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
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


def exchange_descriptors(path: str, token: bytes, regions: dict[int, int]) -> tuple[mmap.mmap | None, mmap.mmap | None]:
    """Hands this process's pidfd and the descriptors of its regions (by region id) to the daemon.

    Returns the mappings that came back: the pool, for reading only, and the operation words; None for what did not come.
    """
    pidfd = os.pidfd_open(os.getpid())
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
            s.settimeout(DESCRIPTOR_TIMEOUT_S)
            s.connect(path)
            packet = wire.pack_descriptors(token, [wire.ENTRY_PIDFD, *regions])
            socket.send_fds(s, [packet], [pidfd, *regions.values()])
            answer, fds, _, _ = socket.recv_fds(s, wire.ANSWER_BYTES_MAX, 4)
    finally:
        os.close(pidfd)
    try:
        entries = wire.unpack_descriptors(answer)
        if len(entries) != len(fds):
            raise wire.WireError(f"descriptor socket: {len(entries)} entries but {len(fds)} descriptors")
        pool = words = None
        for entry, fd in zip(entries, fds):
            size = os.fstat(fd).st_size
            if entry == wire.ENTRY_POOL:
                pool = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
            elif entry == wire.ENTRY_WORDS:
                words = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            else:
                raise wire.WireError(f"descriptor socket: unknown entry {entry:#x}")
        return pool, words
    finally:
        for fd in fds:
            os.close(fd)
