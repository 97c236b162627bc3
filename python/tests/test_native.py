"""The C helper against plain Python."""

import mmap
import os
import random
import struct
import threading
from array import array

import pytest

from kvferry import _native


def planes(*each: tuple[int, int, int]) -> bytes:
    return b"".join(struct.pack("<3Q", *p) for p in each)


def block(memory, each, block_id: int) -> bytes:
    return b"".join(bytes(memory[b + s * block_id :][:n]) for b, s, n in each)


def test_crc32c():
    assert _native.crc32c(b"123456789") == 0xE3069283
    data = os.urandom(100_000)
    for cut in (0, 1, 7, 63, 64, 255, 256, 4096, 99_999):
        assert _native.crc32c(data[cut:], _native.crc32c(data[:cut])) == _native.crc32c(data)


@pytest.mark.parametrize("seed", range(30))
def test_copy_blocks(seed):
    rng = random.Random(seed)
    n = rng.randint(1, 12)
    sizes = [rng.choice((1, 13, 64, 1000, 4096, 70_000)) for _ in range(rng.randint(1, 5))]
    src_planes, dst_planes, src_end, dst_end = [], [], 3, 0
    for size in sizes:
        stride = size + rng.randint(0, 100)
        src_planes.append((src_end, stride, size))
        src_end += stride * n
        stride = size + rng.randint(0, 64)
        dst_planes.append((dst_end, stride, size))
        dst_end += stride * n
    src, dst = os.urandom(src_end), bytearray(os.urandom(dst_end))
    before = bytes(dst)
    src_ids, dst_ids = rng.sample(range(n), n), rng.sample(range(n), n)
    taken = rng.randint(1, n)
    _native.copy_blocks(
        dst, planes(*dst_planes), array("I", dst_ids[:taken]), src, planes(*src_planes), array("I", src_ids[:taken]), rng.choice((1, 2))
    )
    for i in range(n):
        want = block(src, src_planes, src_ids[i]) if i < taken else block(before, dst_planes, dst_ids[i])
        assert block(dst, dst_planes, dst_ids[i]) == want


def test_copy_blocks_with_two_threads():
    size, n = 1 << 20, 40
    src, dst = os.urandom(size * n), bytearray(size * n)
    shape = planes((0, size, size // 2), (size // 2, size, size // 2))
    _native.copy_blocks(dst, shape, array("I", range(n)), src, shape, array("I", reversed(range(n))), 2)
    assert all(dst[size * i :][:size] == src[size * (n - 1 - i) :][:size] for i in range(n))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dst_ids": array("I", [2])}, "dst_ids: block 2 lies outside"),
        ({"src_ids": array("I", [0xFFFFFFFF])}, "src_ids: block 4294967295 lies outside"),
        ({"src_ids": array("I", [0, 1])}, "src_ids: want 1 entries"),
        ({"src_planes": planes((0, 2**63, 64))[:-8]}, "src_planes: want 1..4096 planes"),
        ({"src_planes": planes((2**64 - 1, 64, 64))}, "src_ids: block 0 lies outside"),
        ({"src_planes": planes((0, 64, 32))}, "src_planes: they do not match"),
        ({"dst_planes": planes((0, 64, 0))}, "dst_planes: a plane has 0 bytes"),
    ],
)
def test_copy_blocks_refuses(change, message):
    arguments = {
        "dst": bytearray(128),
        "dst_planes": planes((0, 64, 64)),
        "dst_ids": array("I", [0]),
        "src": bytes(128),
        "src_planes": planes((0, 64, 64)),
        "src_ids": array("I", [0]),
        "threads": 1,
        **change,
    }
    with pytest.raises(ValueError, match=message):
        _native.copy_blocks(*arguments.values())
    assert arguments["dst"] == bytes(128)


def load(pool: bytearray, **change) -> tuple[bytes, bytearray]:
    """Two blocks of 3 planes; headers at 0 and 8, payloads at 64 and 364."""
    dst = bytearray(3 * 1000)
    arguments = {
        "dst": dst,
        "planes": planes((0, 100, 100), (1000, 100, 100), (2000, 100, 100)),
        "ids": array("I", [4, 0]),
        "pool": pool,
        "ready": b"\1\1",
        "offsets": array("Q", [64, 364]),
        "headers": array("Q", [0, 8]),
        "generations": array("Q", [6, 10]),
        "crcs": array("I", [_native.crc32c(pool[64:364]), _native.crc32c(pool[364:664])]),
        "threads": 1,
        **change,
    }
    return _native.load_blocks(*arguments.values()), dst


def make_pool() -> bytearray:
    return bytearray(struct.pack("<2Q", 6, 10) + bytes(48) + os.urandom(600))


def test_load_blocks():
    pool = make_pool()
    status, dst = load(pool)
    assert status == bytes([_native.LOADED] * 2)
    shape = [(0, 100, 100), (1000, 100, 100), (2000, 100, 100)]
    assert block(dst, shape, 4) == pool[64:364]
    assert block(dst, shape, 0) == pool[364:664]


def test_load_blocks_tells_what_is_wrong():
    pool = make_pool()
    assert load(pool, generations=array("Q", [7, 10]))[0] == bytes([_native.CHANGED, _native.LOADED])
    assert load(pool, crcs=array("I", [0, _native.crc32c(pool[364:664])]))[0] == bytes([_native.CORRUPT, _native.LOADED])
    assert load(pool, ready=b"\0\1", offsets=array("Q", [2**64 - 1, 364]))[0] == bytes([_native.SKIPPED, _native.LOADED])
    for change in ({"offsets": array("Q", [64, 365])}, {"headers": array("Q", [0, 9])}, {"headers": array("Q", [0, 2**63])}):
        with pytest.raises(ValueError, match="offsets: block 1 lies outside"):
            load(pool, **change)


# ---- lent memory ----

SHAPE = ((0, 112, 64), (64, 112, 36))


def load_lent(memory: bytes, table: bytearray, **change) -> tuple[bytes, bytearray]:
    """Blocks 2 and 1 of a memory of three into blocks 0 and 3 of another shape."""
    dst = bytearray(4 * 100)
    arguments = {
        "dst": dst,
        "dst_planes": planes((0, 64, 64), (256, 36, 36)),
        "dst_ids": array("I", [0, 3]),
        "src": memory,
        "src_planes": planes(*SHAPE),
        "src_ids": array("I", [2, 1]),
        "table": table,
        "ready": b"\1\1",
        "generations": array("Q", [7, 2**63 + 5]),
        "threads": 1,
        **change,
    }
    return _native.load_lent(*arguments.values()), dst


def test_load_lent():
    memory = os.urandom(3 * 112)
    table = bytearray(struct.pack("<3Q", 0, 2**63 + 5, 7))
    status, dst = load_lent(memory, table)
    assert status == bytes([_native.LOADED] * 2)
    assert block(dst, ((0, 64, 64), (256, 36, 36)), 0) == block(memory, SHAPE, 2)
    assert block(dst, ((0, 64, 64), (256, 36, 36)), 3) == block(memory, SHAPE, 1)
    assert load_lent(memory, table, ready=b"\0\1")[0] == bytes([_native.SKIPPED, _native.LOADED])
    _native.add_u64s(table, array("I", [2]))
    status, dst = load_lent(memory, table)
    assert status == bytes([_native.CHANGED, _native.LOADED])
    assert dst[:64] == bytes(64)  # nothing was copied


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"src_ids": array("I", [0, 3])}, "src_ids: block 3 lies outside"),
        ({"dst_ids": array("I", [0, 4])}, "dst_ids: block 4 lies outside"),
        ({"table": bytearray(16)}, "src_ids: block 2 has no entry"),
        ({"src_planes": planes((0, 112, 64))}, "src_planes: they do not match"),
        ({"generations": array("Q", [7])}, "generations: want 2 entries"),
        ({"ready": b""}, "ready: want 2 entries"),
    ],
)
def test_load_lent_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        load_lent(bytes(3 * 112), **{"table": bytearray(24), **change})


def test_a_generation_that_changes_during_the_copy():
    size = 64 << 20
    memory, dst = mmap.mmap(-1, size), mmap.mmap(-1, size)
    memory[:] = b"\1" * size
    for _ in range(20):  # the other thread may be late
        dst[:64] = bytes(64)
        table = bytearray(8)

        def write_again(table=table):
            while dst[0] == 0:  # until the copy, and so the first look at the table, has begun
                pass
            _native.add_u64s(table, array("I", [0]))

        writer = threading.Thread(target=write_again)
        writer.start()
        shape = planes((0, size, size))
        ids, generations = array("I", [0]), array("Q", [0])
        status = _native.load_lent(dst, shape, ids, memory, shape, ids, table, b"\1", generations, 1)
        writer.join()
        if status == bytes([_native.CHANGED]):
            return
    pytest.fail("the copy was never told as changed")


def test_tables():
    table = bytearray(struct.pack("<3Q", 1, 2**64 - 1, 3))
    _native.add_u64s(table, array("I", [1, 2, 2]))
    assert struct.unpack("<3Q", table) == (1, 0, 5)
    assert _native.load_u64s(table, array("I", [2, 0])) == struct.pack("<2Q", 5, 1)
    assert _native.load_u64s(table, b"") == b""
    for ids in (array("I", [0, 3]), b"\0\0"):
        before = bytes(table)
        with pytest.raises(ValueError):
            _native.add_u64s(table, ids)
        with pytest.raises(ValueError):
            _native.load_u64s(table, ids)
        assert table == before


def test_words():
    memory = bytearray(64)
    _native.store_u64(memory, 8, 2**64 - 1)
    assert _native.load_u64(memory, 8) == 2**64 - 1
    assert not _native.swap_u64(memory, 8, 1, 2)
    assert _native.swap_u64(memory, 8, 2**64 - 1, 2)
    assert _native.load_u64(memory, 8) == 2
    for offset in (-8, 4, 64, 2**40):
        with pytest.raises(ValueError):
            _native.load_u64(memory, offset)


def test_populate():
    memory = mmap.mmap(-1, 1 << 20)
    assert _native.populate(memory, 0, 1 << 20) in (True, False)  # kernels before 5.14 cannot
    with pytest.raises(ValueError, match="offset: the range lies outside"):
        _native.populate(memory, 4096, 1 << 20)
