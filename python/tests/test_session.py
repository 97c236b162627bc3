"""A process's session with a daemon: attaching, operations, revoking, and what happens when the daemon goes away."""

import array
import logging
import os
import struct
import threading

import pytest
from daemon import wait_for
from fake_daemon import WORDS, FakeDaemon

from kvferry import _native, wire
from kvferry.attachment import Refusal, wire_request_id
from kvferry.memory import SharedMemory
from kvferry.session import Session
from kvferry.v1 import engine_pb2 as pb

BLOCK = 4096
log = logging.getLogger("test")


@pytest.fixture
def fake(tmp_path_factory):
    directory = tmp_path_factory.mktemp("d")
    daemon = FakeDaemon(directory).start()
    yield daemon
    daemon.close()


class Client:
    """A worker with 8 blocks of 2 planes."""

    def __init__(self, daemon: FakeDaemon):
        self.memory = SharedMemory("test", 8 * BLOCK)
        self.memory.map[:] = os.urandom(8 * BLOCK)
        planes = [pb.Plane(base=0, stride=BLOCK, bytes=1000), pb.Plane(base=1000, stride=BLOCK, bytes=3000)]
        region = pb.Region(id=1, kind=pb.REGION_KIND_SHARED_HOST, bytes=8 * BLOCK, blocks=8, planes=planes)
        hello = pb.Hello(wire_version=1, role=pb.ROLE_WORKER, instance="i", ranks=1, regions=[region], space=pb.Space(model="m"))
        self.session = Session(daemon.engine_socket, daemon.descriptor_socket, hello, {1: self.memory.fd}, log)
        self.session.start()
        self.wait()

    def wait(self):
        self.attachment = wait_for(lambda: self.session.attachment, 10, "attached")
        self.space = self.attachment.spaces[""]

    def store(self, block_id: int, name: bytes, ended=None):
        ended = ended if ended is not None else []
        operation = self.attachment.store(self.space, "r", 1, [block_id], name, bytes(32), 1000, lambda op, end: ended.append(end))
        return operation, ended

    def load(self, names: bytes):
        results, ended = [], []
        operation = self.attachment.load(
            self.space, "r", names, 1000, None, lambda op, m: results.append(m), lambda op, end: ended.append(end)
        )
        return operation, results, ended


@pytest.fixture
def client(fake):
    c = Client(fake)
    yield c
    c.session.close()


def name(n: int) -> bytes:
    return n.to_bytes(32, "big")


def test_store_match_load_release(fake, client):
    operation, ended = client.store(3, name(1))
    wait_for(lambda: ended, 5, "the store ends")
    assert ended[0].outcome == pb.OUTCOME_COMMITTED and ended[0].blocks_stored == 1
    assert operation.state() == wire.COMMITTED
    assert client.attachment.match(client.space, "r", name(1) + name(2), 0, 5).result().blocks == 1

    operation, results, ended = client.load(name(1) + name(2))
    wait_for(lambda: results and results[-1].last, 5, "all results")
    assert [r.status[0] for r in results] == [pb.BLOCK_STATUS_READY, pb.BLOCK_STATUS_MISS]
    destination = bytearray(BLOCK)
    planes = struct.pack("<3Q", 0, BLOCK, 4000)
    first = results[0]
    status = _native.load_blocks(
        destination,
        planes,
        array.array("I", [0]),
        client.attachment.pool,
        b"\1",
        array.array("Q", first.offsets),
        array.array("Q", first.header_offsets),
        array.array("Q", first.generations),
        array.array("I", first.crc32c),
        1,
    )
    assert status == bytes([_native.LOADED])
    assert destination[:4000] == client.memory.map[3 * BLOCK : 3 * BLOCK + 4000]
    client.attachment.release([operation], 0)
    wait_for(lambda: ended, 5, "the load ends")


def test_revoke_wins_or_loses_once(fake, client):
    fake.store_gate.clear()
    operation, ended = client.store(3, name(1))
    assert operation.state() == wire.PENDING
    assert operation.revoke() and not operation.revoke()
    assert operation.state() == wire.REVOKED
    fake.store_gate.set()
    wait_for(lambda: ended, 5, "the store ends")
    assert ended[0].outcome == pb.OUTCOME_REVOKED and not fake.blocks
    operation, ended = client.store(3, name(1))
    wait_for(lambda: ended, 5, "the store ends")
    assert not operation.revoke() and len(fake.blocks) == 1
    assert [list(m.operations) for m in fake.seen("revoke")] == [[1]]


def test_words_run_out_and_come_back(fake, client):
    fake.store_gate.clear()
    ended: list = []
    for n in range(WORDS):
        client.store(n % 8, name(n), ended)
    with pytest.raises(Refusal, match="no_word"):
        client.store(0, name(WORDS))
    fake.store_gate.set()
    wait_for(lambda: len(ended) == WORDS, 5, "the stores end")
    client.store(0, name(WORDS), ended)
    wait_for(lambda: len(ended) == WORDS + 1, 5, "the store ends")


def test_daemon_goes_away_and_comes_back(fake, client):
    fake.store_gate.clear()
    operation, ended = client.store(3, name(1))
    lost = client.attachment
    fake.stop()
    wait_for(lambda: ended, 5, "the store ends")
    assert ended[0].outcome == pb.OUTCOME_FAILED and operation.state() == wire.FAILED
    # The old daemon, should it live, has lost the word.
    assert _native.load_u64(lost.words, 0) == wire.word(1, wire.REVOKED)
    with pytest.raises(Refusal, match="not_attached"):
        lost.store(client.space, "r", 1, [0], name(2), bytes(32), 1000, None)
    fake._closed = False
    fake.start()
    client.wait()
    assert client.attachment is not lost
    fake.store_gate.set()
    _, ended = client.store(3, name(1))
    wait_for(lambda: ended, 5, "the store ends")
    assert ended[0].outcome == pb.OUTCOME_COMMITTED


def test_space_changes(fake, client):
    client.session.use_space(pb.Space(model="m", weights_generation="g"))
    attachment, space_id = wait_for(lambda: client.session.space_id("g"), 5, "the new space's id")
    assert space_id != client.space and client.session.space_id("") is None


def test_space_changes_while_there_is_no_daemon(fake, client):
    fake.stop()
    wait_for(lambda: client.session.attachment is None, 5, "the daemon is gone")
    client.session.use_space(pb.Space(model="m", weights_generation="g"))
    fake._closed = False
    fake.start()
    wait_for(lambda: client.session.space_id("g"), 10, "the new space's id")


def test_nothing_is_left_behind(fake):
    before_fds, before_threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        c = Client(fake)
        c.session.close()
        c.memory.close_descriptor()
        wait_for(lambda: not any(t.name.startswith("kvferry") for t in threading.enumerate()), 5, "our threads are gone")
    # What belongs to the fake daemon's side of three sessions: words and the region that it mapped.
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before_fds + 3 * 4, 5, "descriptors are closed")
    assert threading.active_count() <= before_threads + 8


def test_descriptor_packets():
    packet = wire.pack_descriptors(bytes(16), [wire.ENTRY_PIDFD, 7])
    assert len(packet) == 84 and packet[:8] == bytes.fromhex("4b564644 0100 0200")
    for token, entries in ((bytes(15), [1]), (bytes(16), [1] * 16)):
        with pytest.raises(wire.WireError):
            wire.pack_descriptors(token, entries)
    good = struct.pack("<IHHIH10x15I", 0x4446564B, 1, 2, 0, 0, wire.ENTRY_POOL, wire.ENTRY_WORDS, *[0] * 13)
    assert wire.unpack_descriptors(good) == [wire.ENTRY_POOL, wire.ENTRY_WORDS]
    refused = struct.pack("<IHHIH10x15I", 0x4446564B, 1, 0, 7, 5, *[0] * 15) + b"token"
    with pytest.raises(wire.WireError, match="code 7: token"):
        wire.unpack_descriptors(refused)
    for bad in (b"", good[:-1], b"x" + good[1:], good[:4] + b"\2" + good[5:]):
        with pytest.raises(wire.WireError):
            wire.unpack_descriptors(bad)


@pytest.mark.parametrize("request_id", ["short", "x" * 256, "é" * 128])
def test_request_ids_that_fit_are_kept(request_id):
    assert wire_request_id(request_id) == request_id


@pytest.mark.parametrize("request_id", ["", "x" * 257, "é" * 129, "\ud800"])
def test_request_ids_that_do_not_fit_are_hashed(request_id):
    assert wire_request_id(request_id).startswith("sha256:") and len(wire_request_id(request_id)) == 71
