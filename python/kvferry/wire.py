"""The formats of WIRE.md that a connector reads and writes besides gRPC: operation words and the descriptor socket."""

import struct

VERSION = 1
HASH_BYTES = 32

# States of an operation word.
FREE, PENDING, COMMITTED, REVOKED, FAILED = range(5)
WORD_STRIDE = 64
QUIET_OFFSET = 16
ALL_QUIET = (1 << 64) - 1
OPERATION_MAX = (1 << 56) - 1

# What a descriptor is, where it is not a region's id.
ENTRY_PIDFD = 0xFFFFFFFF
ENTRY_POOL = 0xFFFFFFFE
ENTRY_WORDS = 0xFFFFFFFD
ENTRY_GENERATIONS = 0xFFFFFFFC
ENTRY_DAEMON = 0xFFFFFFFB
ENTRY_LENT = 0xFFFFFFFA

# A plane for the C helper: base, stride, bytes.
PLANE = struct.Struct("<3Q")

_MAGIC = 0x4446564B
_ENTRIES = 15
_REQUEST = struct.Struct("<IHH16s15I")
_ANSWER = struct.Struct("<IHHIH10x15I")
ANSWER_BYTES_MAX = _ANSWER.size + 256


class WireError(Exception):
    """The other side sent what WIRE.md does not allow, or refused what was sent."""


def word(operation: int, state: int) -> int:
    return operation << 8 | state


def pack_descriptors(token: bytes, entries: list[int]) -> bytes:
    """The packet that goes with the descriptors; entries says what each one is. Without any it asks for lent memory."""
    if len(token) != 16 or len(entries) > _ENTRIES:
        raise WireError(f"want a token of 16 bytes and at most {_ENTRIES} descriptors")
    return _REQUEST.pack(_MAGIC, VERSION, len(entries), token, *entries, *[0] * (_ENTRIES - len(entries)))


def unpack_descriptors(packet: bytes) -> list[int]:
    """What each descriptor that came with the daemon's answer is."""
    if len(packet) < _ANSWER.size:
        raise WireError(f"descriptor socket: an answer of {len(packet)} bytes")
    magic, version, count, code, length, *entries = _ANSWER.unpack_from(packet)
    if magic != _MAGIC or version != VERSION or count > _ENTRIES:
        raise WireError("descriptor socket: not an answer of this version")
    if code != 0:
        text = packet[_ANSWER.size : _ANSWER.size + length].decode("utf-8", "replace")
        raise WireError(f"descriptor socket: refused with code {code}: {text}")
    return entries[:count]
