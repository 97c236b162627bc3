"""A daemon in a few lines, for what the real one does only by accident: it keeps blocks in a memfd, and can be told to misbehave."""

import mmap
import os
import queue
import socket
import struct
import threading
from concurrent import futures

import grpc

from kvferry import _native, wire
from kvferry.v1 import engine_pb2 as pb
from kvferry.v1 import engine_pb2_grpc

HEADER = 256
WORDS = 16


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
        self.answer_matches = threading.Event()
        self.answer_matches.set()
        self.spoil: str | None = None  # "generation", "checksum" or "status": what is wrong with the next loads
        self.outcome: int | None = None  # of the next stores
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
        return pb.MatchResponse(blocks=blocks, dram_blocks=blocks)

    def _read(self, session, requests) -> None:
        try:
            for message in requests:
                self.received.append(message)
                kind = message.WhichOneof("message")
                if kind == "store":
                    threading.Thread(target=self._store, args=(session, message.store), daemon=True).start()
                elif kind == "load" and self.answer_loads:
                    self._load(session, message.load)
                elif kind == "accept" and self.answer_loads:
                    self._load(session, message.accept.load)
                elif kind == "release":
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
        stored = []
        for block_id, name in zip(store.block_ids, _split(store.hashes)):
            data = session.read_block(store.region, block_id)
            key = self._key(store.space_id, name, session.hello.rank)
            if key in self.blocks or len(self.blocks) + len(stored) >= self.slots:
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
            session.end(store.operation, pb.OUTCOME_COMMITTED, "", len(stored), len(store.block_ids) - len(stored))
        else:
            session.end(store.operation, pb.OUTCOME_REVOKED)

    def _load(self, session, load) -> None:
        hashes = _split(load.hashes)
        for first, name in enumerate(hashes):  # one part for each block: the worst case
            found = self.blocks.get(self._key(load.space_id, name, session.hello.rank))
            result = pb.LoadResult(operation=load.operation, first=first, last=first == len(hashes) - 1)
            if found is None or self.spoil == "status":
                result.status = bytes([pb.BLOCK_STATUS_MISS])
                result.offsets.append(0), result.header_offsets.append(0), result.generations.append(0), result.crc32c.append(0)
            else:
                slot, crc, length = found
                result.status = bytes([pb.BLOCK_STATUS_READY])
                result.offsets.append(slot * self.stride + HEADER)
                result.header_offsets.append(slot * self.stride)
                result.generations.append(4 if self.spoil == "generation" else 2)
                result.crc32c.append(crc ^ 1 if self.spoil == "checksum" else crc)
                result.shard_bytes = length
            if result.last:
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
                session = self.tokens.pop(token)
                for entry, fd in zip(entries[:count], fds):
                    if entry != wire.ENTRY_PIDFD:
                        session.regions[entry] = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
                    os.close(fd)
                answer = struct.pack("<IHHIH10x15I", 0x4446564B, 1, 2, 0, 0, wire.ENTRY_POOL, wire.ENTRY_WORDS, *[0] * 13)
                socket.send_fds(connection, [answer], [self.pool_fd, session.words_fd])
            session.outgoing.put(pb.SessionResponse(attached=pb.Attached()))


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
