"""Offers and tickets: how a prompt's KV is named to another engine."""

import base64
import binascii
import os
from typing import Any

from google.protobuf.message import DecodeError

from kvferry import wire
from kvferry.attachment import Attachment, wire_request_id
from kvferry.v1 import engine_pb2 as pb

TICKET_BYTES_MAX = 64 << 10
# The daemon's own default, for the ticket's text where the user sets none.
LIFETIME_MS = 120_000


def make_offer(
    request: Any, attachment: Attachment, space_id: bytes, block_tokens: int, lifetime_ms: int, instance: str
) -> tuple[pb.Offer, str] | None:
    """The offer of a request's prompt and the ticket for it; None where no block of it is full."""
    blocks = min(request.num_prompt_tokens // block_tokens, len(request.block_hashes))
    blocks = min(blocks, attachment.welcome.load_blocks_max or blocks)
    if blocks == 0:
        return None
    hashes = request.block_hashes[:blocks]
    offer = pb.Offer(
        offer_id=os.urandom(16),
        secret=os.urandom(16),
        space_id=space_id,
        request_id=wire_request_id(request.request_id),
        hashes=b"".join(hashes),
        tokens=request.num_prompt_tokens,
        lifetime_ms=lifetime_ms,
    )
    ticket = pb.Ticket(
        wire_version=wire.VERSION,
        addresses=[attachment.welcome.peer_address],
        offer_id=offer.offer_id,
        secret=offer.secret,
        epoch=attachment.epoch,
        space_id=space_id,
        tail_hash=hashes[-1],
        blocks=blocks,
        tokens=request.num_prompt_tokens,
        lifetime_ms=lifetime_ms or LIFETIME_MS,
        instance=instance,
    )
    return offer, base64.b64encode(ticket.SerializeToString()).decode()


def read_ticket(params: dict[str, Any], space_id: bytes, hashes: list[bytes], tokens: int) -> tuple[bytes, pb.Ticket | None, str]:
    """The ticket's bytes and content where it fits the request, and what became of it, for a metric label."""
    text = params.get("kvferry_ticket")
    if text is None:
        return b"", None, "absent"
    if not isinstance(text, str) or len(text) > 2 * TICKET_BYTES_MAX:
        return b"", None, "malformed"
    try:
        raw = base64.b64decode(text, validate=True)
        ticket = pb.Ticket.FromString(raw)
    except (binascii.Error, DecodeError, ValueError):
        return b"", None, "malformed"
    if len(raw) > TICKET_BYTES_MAX or len(ticket.offer_id) != 16 or len(ticket.secret) != 16 or not ticket.addresses:
        return b"", None, "malformed"
    if ticket.space_id != space_id:
        return b"", None, "other_space"
    if not 1 <= ticket.blocks <= len(hashes) or hashes[ticket.blocks - 1] != ticket.tail_hash:
        return b"", None, "other_prompt"
    return raw, ticket, "accepted"
