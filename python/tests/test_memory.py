"""Memory that is shared, and other processes."""

import mmap
import os
import signal
import subprocess

import pytest
from daemon import wait_for

from kvferry import _native
from kvferry.memory import GenerationTable, Process, SharedMemory


def test_generations_can_be_changed_by_their_owner_alone():
    table = GenerationTable(4)
    table.bump([1, 3])
    table.bump([3])
    assert table.values([3, 0, 1]) == [2, 0, 1]
    other = mmap.mmap(table.shared.fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
    table.bump_all()
    assert [_native.load_u64(other, 8 * n) for n in range(4)] == [1, 2, 1, 3]
    with pytest.raises(PermissionError):
        mmap.mmap(table.shared.fd, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.write(table.shared.fd, b"x")
    with pytest.raises(PermissionError):
        os.ftruncate(table.shared.fd, 0)
    with pytest.raises(ValueError):
        table.bump([4])


def test_shared_memory_cannot_be_opened_for_writing():
    memory = SharedMemory("test", 4096)
    assert os.fstat(memory.fd).st_mode & 0o777 == 0o444
    memory.map[:4] = b"ours"
    os.pwrite(memory.fd, b"also", 0)  # who has this descriptor


def test_only_a_dead_process_is_dead():
    with subprocess.Popen(["sleep", "60"]) as child:
        pidfd = os.pidfd_open(child.pid)
        process = Process(pidfd)
        os.close(pidfd)
        assert not process.dead()
        child.send_signal(signal.SIGSTOP)
        assert not process.dead()
        child.kill()
        wait_for(process.dead, 5, "dead")
    assert process.dead()
