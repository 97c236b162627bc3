"""A daemon in a few lines, for what the real one does only by accident: it keeps blocks in a memfd, and can be told to misbehave."""

import mmap
import os
import queue
import socket
import struct
import subprocess
import threading
from array import array
from concurrent import futures

import grpc

from kvferry import _native, wire
from kvferry.v1 import engine_pb2 as pb
from kvferry.v1 import engine_pb2_grpc

HEADER = 256
WORDS = 16
# Of the ranks in sides.py.
LAYERS, BLOCK_BYTES = 3, 3 * 4096


class FakeDaemon(engine_pb2_grpc.EngineServicer):
    def __init__(self, directory, slot_bytes: int = 1 << 16, slots: int = 64):
        self.engine_socket = str(directory / "engine.sock")
        self.descriptor_socket = str(directory / "descriptors.sock")
        self.slot_bytes, self.slots = slot_bytes, slots
        self.stride = HEADER + slot_bytes
        self.pool_fd = os.memfd_create("fake-pool")
        os.ftruncate(self.pool_fd, self.stride * slots)
        self.pool = mmap.mmap(self.pool_fd, self.stride * slots)
        self.blocks: dict[bytes, tuple[int, int, int]] = {}  # (space + hash + rank) -> slot, crc, length
        self.received: list[pb.SessionRequest] = []
        self.store_gate = threading.Event()  # stores wait for it between copy and commit
        self.store_gate.set()
        self.answer_loads = True
        self.held: list[tuple[_Session, pb.Load]] | None = None  # Loads that a test answers itself, in parts
        self.answer_matches = threading.Event()
        self.answer_matches.set()
        self.spoil: str | None = None  # "generation", "checksum" or "status": what is wrong with the next loads
        self.outcome: int | None = None  # of the next stores
        self.direct = False  # Accepts may lend blocks, and what they ask for is written there
        self.end_loads = True  # else a Load that was released is not quiet
        self.lent: Lent | None = None  # where Accepts find blocks
        self.process: subprocess.Popen | None = None  # whose pidfd is handed out as the daemon's
        self.answer_fetches = True
        self.matches: list[pb.MatchRequest] = []
        self.nvme_blocks = 0  # of those found, the last ones
        self.peer_blocks = 0  # that peers have beyond what is here
        self.sessions: dict[int, _Session] = {}
        self.tokens: dict[bytes, _Session] = {}
        self.lock = threading.Lock()
        self.epoch = os.urandom(16)
        self._closed = False

    def start(self) -> "FakeDaemon":
        for path in (self.engine_socket, self.descriptor_socket):
            if os.path.exists(path):
                os.unlink(path)
        self._descriptors = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._descriptors.bind(self.descriptor_socket)
        self._descriptors.listen()
        threading.Thread(target=self._serve_descriptors, daemon=True).start()
        self.server = grpc.server(futures.ThreadPoolExecutor(32))
        engine_pb2_grpc.add_EngineServicer_to_server(self, self.server)
        self.server.add_insecure_port("unix:" + self.engine_socket)
        self.server.start()
        return self

    def stop(self) -> None:
        self._closed = True
        self._descriptors.close()
        for session in list(self.sessions.values()):
            session.outgoing.put(None)
        self.server.stop(None).wait(5)

    def close(self) -> None:
        self.store_gate.set()
        self.answer_matches.set()
        self.stop()
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def be_mortal(self) -> None:
        """The pidfd that is handed out as the daemon's is that of a process which a test can kill."""
        self.direct = True
        self.process = subprocess.Popen(["sleep", "600"])

    def die(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def break_streams(self) -> None:
        """Ends all sessions and tells nothing; the fake goes on serving."""
        for session in list(self.sessions.values()):
            session.outgoing.put(None)

    def tell(self, message: pb.SessionResponse, role: int = pb.ROLE_WORKER) -> None:
        for session in list(self.sessions.values()):
            if session.hello.role == role:
                session.outgoing.put(message)

    def seen(self, kind: str) -> list:
        return [getattr(m, kind) for m in list(self.received) if m.WhichOneof("message") == kind]

    # ---- Engine ----

    def Session(self, requests, context):
        session = _Session(self)
        with self.lock:
            number = len(self.sessions) + 1
            self.sessions[number] = session
        session.hello = next(requests).hello
        token = os.urandom(16)
        self.tokens[token] = session
        threading.Thread(target=self._read, args=(session, requests), daemon=True).start()
        yield pb.SessionResponse(
            welcome=pb.Welcome(
                epoch=self.epoch,
                session_id=number,
                token=token,
                space_id=_space_id(session.hello.space),
                pool_bytes=len(self.pool),
                words=WORDS,
                store_blocks_max=64,
                load_blocks_max=4,
                match_blocks_max=8192,
                wire_version=1,
                peer_address="127.0.0.1:1",
                version="fake",
                direct=self.direct,
            )
        )
        while (message := session.outgoing.get()) is not None:
            yield message

    def Match(self, request, context):
        self.answer_matches.wait(30)
        hashes = _split(request.hashes)
        ranks = max((s.hello.ranks for s in self.sessions.values()), default=1)
        blocks = 0
        while blocks < len(hashes) and all(self._key(request.space_id, hashes[blocks], r) in self.blocks for r in range(ranks)):
            blocks += 1
        self.matches.append(request)
        at_peers = min(self.peer_blocks, len(hashes) - blocks) if request.peers else 0
        on_drive = min(self.nvme_blocks, blocks)
        return pb.MatchResponse(blocks=blocks + at_peers, dram_blocks=blocks - on_drive, nvme_blocks=on_drive, peer_blocks=at_peers)

    def _read(self, session, requests) -> None:
        try:
            for message in requests:
                self.received.append(message)
                kind = message.WhichOneof("message")
                if kind == "store":
                    threading.Thread(target=self._store, args=(session, message.store), daemon=True).start()
                elif kind == "load" and self.held is not None:
                    self.held.append((session, message.load))
                elif kind == "load" and self.answer_loads:
                    self._load(session, message.load)
                elif kind == "accept" and self.answer_loads:
                    self._accept(session, message.accept)
                elif kind == "release" and self.end_loads:
                    for number in message.release.operations:
                        session.end(number, pb.OUTCOME_COMMITTED)
                elif kind == "use_space":
                    ready = pb.SpaceReady(sequence=message.use_space.sequence, space_id=_space_id(message.use_space.space))
                    session.outgoing.put(pb.SessionResponse(space_ready=ready))
        except grpc.RpcError:
            pass
        session.outgoing.put(None)

    @staticmethod
    def _key(space_id: bytes, name: bytes, rank: int) -> bytes:
        return space_id + name + bytes([rank])

    def _store(self, session, store) -> None:
        stored, present = [], 0
        for block_id, name in zip(store.block_ids, _split(store.hashes)):
            data = session.read_block(store.region, block_id)
            key = self._key(store.space_id, name, session.hello.rank)
            if key in self.blocks:
                present += 1
                continue
            if len(self.blocks) + len(stored) >= self.slots:
                continue
            slot = len(self.blocks) + len(stored)
            base = slot * self.stride
            self.pool[base + HEADER : base + HEADER + len(data)] = data
            stored.append((key, slot, _native.crc32c(data), len(data)))
        self.store_gate.wait(30)
        if self.outcome is not None:
            session.swap(store.word, store.operation, wire.FAILED)
            session.end(store.operation, self.outcome, "as told")
        elif session.swap(store.word, store.operation, wire.COMMITTED):
            for key, slot, crc, length in stored:
                struct.pack_into("<Q", self.pool, slot * self.stride, 2)
                self.blocks[key] = (slot, crc, length)
            session.end(store.operation, pb.OUTCOME_COMMITTED, "", len(stored), present)
        else:
            session.end(store.operation, pb.OUTCOME_REVOKED)

    def _load(self, session, load) -> None:
        for first in range(last := len(load.hashes) // 32):  # one part for each block: the worst case
            self.answer(session, load, [first], first == last - 1)

    def answer(self, session, load, indices: list[int], last: bool, status: int = pb.BLOCK_STATUS_MISS) -> None:
        """One part of a Load's answer, of neighbours. status: of blocks that are not to be had."""
        result = pb.LoadResult(operation=load.operation, first=indices[0] if indices else 0, last=last)
        states = []
        for name in [_split(load.hashes)[i] for i in indices]:
            found = self.blocks.get(self._key(load.space_id, name, session.hello.rank))
            if found is None or self.spoil == "status":
                states.append(status)
                result.offsets.append(0), result.header_offsets.append(0), result.generations.append(0), result.crc32c.append(0)
            else:
                slot, crc, length = found
                states.append(pb.BLOCK_STATUS_READY)
                result.offsets.append(slot * self.stride + HEADER)
                result.header_offsets.append(slot * self.stride)
                result.generations.append(4 if self.spoil == "generation" else 2)
                result.crc32c.append(crc ^ 1 if self.spoil == "checksum" else crc)
                result.shard_bytes = length
        result.status = bytes(states)
        if last:
            session.swap(load.word, load.operation, wire.COMMITTED)
        session.outgoing.put(pb.SessionResponse(load_result=result))

    def _accept(self, session, accept) -> None:
        load = accept.load
        hashes = _split(load.hashes)
        if self.lent is not None:
            result = self.lent.answer(load.operation, hashes)
        elif accept.block_ids:
            found = [self.blocks.get(self._key(load.space_id, name, session.hello.rank)) for name in hashes]
            result = pb.LoadResult(operation=load.operation, last=True)
            for block_id, place in zip(accept.block_ids, found):
                if place is not None:
                    base = place[0] * self.stride + HEADER
                    session.write_block(accept.region, block_id, self.pool[base : base + place[2]])
            result.status = bytes(pb.BLOCK_STATUS_MISS if place is None else pb.BLOCK_STATUS_READY for place in found)
            result.source = bytes([pb.BLOCK_SOURCE_DELIVERED] * len(hashes))
            for column in (result.offsets, result.header_offsets, result.generations, result.crc32c):
                column.extend([0] * len(hashes))
        else:
            self._load(session, load)
            return
        session.swap(load.word, load.operation, wire.COMMITTED)
        session.outgoing.put(pb.SessionResponse(load_result=result))

    # ---- descriptors ----

    def _serve_descriptors(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._descriptors.accept()
            except OSError:
                return
            with connection:
                packet, fds, _, _ = socket.recv_fds(connection, 256, 16)
                _, _, count, token, *entries = struct.unpack("<IHH16s15I", packet)
                if count == 0:
                    if self.answer_fetches and self.lent is not None:
                        self._answer(connection, {wire.ENTRY_LENT: self.lent.fd, wire.ENTRY_GENERATIONS: self.lent.table_fd})
                    continue
                session = self.tokens.pop(token)
                for entry, fd in zip(entries[:count], fds):
                    if entry != wire.ENTRY_PIDFD:
                        writable = any(r.id == entry and r.writable for r in session.hello.regions)
                        session.regions[entry] = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
                    os.close(fd)
                given = {wire.ENTRY_POOL: self.pool_fd, wire.ENTRY_WORDS: session.words_fd}
                if self.process is not None:
                    given[wire.ENTRY_DAEMON] = pidfd = os.pidfd_open(self.process.pid)
                self._answer(connection, given)
                if self.process is not None:
                    os.close(pidfd)
            session.outgoing.put(pb.SessionResponse(attached=pb.Attached()))

    @staticmethod
    def _answer(connection, given: dict[int, int]) -> None:
        entries = [*given, *[0] * (15 - len(given))]
        socket.send_fds(connection, [struct.pack("<IHHIH10x15I", 0x4446564B, 1, len(given), 0, 0, *entries)], list(given.values()))


class Lent:
    """Another worker's memory, blocks one after the other, and its generation table."""

    def __init__(self, blocks: dict[bytes, bytes], layers: int, block_ids: list[int]):
        length = len(next(iter(blocks.values())))
        self.names = dict(zip(blocks, block_ids))
        count = max(block_ids) + 1
        self.fd, self.table_fd = os.memfd_create("fake-lent"), os.memfd_create("fake-table")
        os.ftruncate(self.fd, length * count)
        os.ftruncate(self.table_fd, 8 * count)
        self.memory, self.table = mmap.mmap(self.fd, 0), mmap.mmap(self.table_fd, 0)
        for name, data in blocks.items():
            self.memory[self.names[name] * length : (self.names[name] + 1) * length] = data
            _native.add_u64s(self.table, array("I", [self.names[name]]))
        each = length // layers
        planes = [pb.Plane(base=i * each, stride=length, bytes=each) for i in range(layers)]
        self.lent = pb.Lent(handle=7, token=os.urandom(16), bytes=length * count, blocks=count, planes=planes, generations=count)
        self.length = length

    def write_again(self, name: bytes) -> None:
        _native.add_u64s(self.table, array("I", [self.names[name]]))

    def answer(self, operation: int, names: list[bytes]) -> pb.LoadResult:
        result = pb.LoadResult(operation=operation, last=True, lent=self.lent, shard_bytes=self.length)
        result.source = bytes([pb.BLOCK_SOURCE_LENT] * len(names))
        result.status = bytes(pb.BLOCK_STATUS_READY if name in self.names else pb.BLOCK_STATUS_MISS for name in names)
        for name in names:
            result.offsets.append(self.names.get(name, 0))
            result.header_offsets.append(0)
            result.generations.append(1)
            result.crc32c.append(0)
        return result


class _Session:
    def __init__(self, daemon: FakeDaemon):
        self.hello = pb.Hello()
        self.outgoing: queue.SimpleQueue = queue.SimpleQueue()
        self.regions: dict[int, mmap.mmap] = {}
        self.words_fd = os.memfd_create("fake-words")
        os.ftruncate(self.words_fd, WORDS * wire.WORD_STRIDE)
        self.words = mmap.mmap(self.words_fd, WORDS * wire.WORD_STRIDE)

    def read_block(self, region_id: int, block_id: int) -> bytes:
        (region,) = [r for r in self.hello.regions if r.id == region_id]
        memory = self.regions[region_id]
        return b"".join(memory[p.base + block_id * p.stride :][: p.bytes] for p in region.planes)

    def write_block(self, region_id: int, block_id: int, data: bytes) -> None:
        (region,) = [r for r in self.hello.regions if r.id == region_id]
        at = 0
        for p in region.planes:
            start = p.base + block_id * p.stride
            self.regions[region_id][start : start + p.bytes] = data[at : at + p.bytes]
            at += p.bytes

    def quiet(self, word: int, operation: int) -> None:
        _native.store_u64(self.words, word * wire.WORD_STRIDE + wire.QUIET_OFFSET, operation)

    def swap(self, word: int, operation: int, state: int) -> bool:
        return _native.swap_u64(self.words, word * wire.WORD_STRIDE, wire.word(operation, wire.PENDING), wire.word(operation, state))

    def end(self, operation: int, outcome: int, reason: str = "", stored: int = 0, present: int = 0) -> None:
        end = pb.OperationEnd(operation=operation, outcome=outcome, reason=reason, blocks_stored=stored, blocks_present=present)
        self.outgoing.put(pb.SessionResponse(operation_end=end))


def _split(hashes: bytes) -> list[bytes]:
    return [hashes[i : i + 32] for i in range(0, len(hashes), 32)]


def _space_id(space: pb.Space) -> bytes:
    import hashlib

    return hashlib.sha256(space.SerializeToString(deterministic=True)).digest()
