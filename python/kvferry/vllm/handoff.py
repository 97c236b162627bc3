"""Offers and tickets: how a prompt's KV is named to another engine."""

import base64
import binascii
import os
import re
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from kvferry import wire
from kvferry.attachment import Attachment, wire_request_id
from kvferry.memory import GenerationTable
from kvferry.v1 import engine_pb2 as pb
from kvferry.vllm.config import Config
from kvferry.vllm.holds import Hold

# The id of a rank's KV memory, the same on every rank.
REGION = 1
TICKET_BYTES_MAX = 64 << 10
PEERS_MAX = 4
# The daemon's own default, for the ticket's text where the user sets none.
LIFETIME_MS = 120_000
# By the words for them in a request's parameters.
RETENTIONS = {"none": pb.RETENTION_NONE, "short": pb.RETENTION_SHORT, "normal": pb.RETENTION_NORMAL, "long": pb.RETENTION_LONG}
_ANY_EPOCH = bytes(16)
_HEX = re.compile("[0-9a-fA-F]{32}")
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}")
_ADDRESS_LENGTH_MAX = 256


@dataclass(frozen=True)
class Transfer:
    """What a router gives to both legs before the prompt is computed."""

    id: bytes
    secret: bytes
    address: str  # of the Peer service of the node that computes; only the decode leg has it


def is_address(text: Any) -> bool:
    return isinstance(text, str) and len(text) <= _ADDRESS_LENGTH_MAX and _ADDRESS.fullmatch(text) is not None


def read_transfer(params: dict[str, Any], decodes: bool) -> tuple[Transfer | None, str]:
    """And what became of it, for a metric label."""
    given = params.get("kvferry_transfer")
    if given is None:
        return None, "absent"
    if not isinstance(given, dict):
        return None, "malformed"
    name, secret, address = given.get("id", ""), given.get("secret", ""), given.get("address", "")
    if not all(isinstance(t, str) and _HEX.fullmatch(t) for t in (name, secret)) or (decodes and not is_address(address)):
        return None, "malformed"
    return Transfer(bytes.fromhex(name), bytes.fromhex(secret), address if decodes else ""), "accepted"


def read_peers(params: dict[str, Any]) -> tuple[list[str], str]:
    """Nodes that may have more of a prompt, and what became of them, for a metric label."""
    given = params.get("kvferry_peers")
    if given is None:
        return [], "absent"
    if not isinstance(given, list) or not 1 <= len(given) <= PEERS_MAX or not all(is_address(p) for p in given):
        return [], "malformed"
    return given, "accepted"


def read_retention(params: dict[str, Any]) -> tuple[str, str]:
    """How long a request wants its blocks kept, one of RETENTIONS or empty, and what became of that, for a metric label."""
    given = params.get("kvferry_retention")
    if given is None:
        return "", "absent"
    if not isinstance(given, str) or given not in RETENTIONS:
        return "", "malformed"
    return given, given


def transfer_ticket(
    transfer: Transfer, space_id: bytes, hashes: list[bytes], tokens: int, blocks_max: int
) -> tuple[bytes, pb.Ticket | None, str]:
    """The ticket of a prompt that is being computed: the other engine makes the same blocks of it."""
    blocks = min(len(hashes), blocks_max or len(hashes))
    if blocks == 0:
        return b"", None, "other_prompt"
    ticket = pb.Ticket(
        wire_version=wire.VERSION,
        addresses=[transfer.address],
        offer_id=transfer.id,
        secret=transfer.secret,
        epoch=_ANY_EPOCH,
        space_id=space_id,
        tail_hash=hashes[blocks - 1],
        blocks=blocks,
        tokens=tokens,
        lifetime_ms=LIFETIME_MS,
    )
    return ticket.SerializeToString(), ticket, "accepted"


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


@dataclass
class OpenOffer:
    """An offer whose prompt is still being computed."""

    attachment: Attachment
    offer_id: bytes

    def alive(self) -> bool:
        return not self.attachment.lost

    def end(self, reason: str) -> None:
        if self.alive():
            self.attachment.send(pb.SessionRequest(end_offer=pb.EndOffer(offer_id=self.offer_id, reason=reason)))


class Offers:
    """Registers prompts of this engine with the daemon. table: where its KV memory is lent."""

    def __init__(self, config: Config, block_tokens: int, instance: str, table: GenerationTable | None):
        self._config = config
        self._block_tokens = block_tokens
        self._instance = instance
        self._table = table

    def _offer(self, request: Any, attachment: Attachment, space_id: bytes, transfer: Transfer | None) -> pb.Offer | None:
        blocks = min(request.num_prompt_tokens // self._block_tokens, len(request.block_hashes))
        blocks = min(blocks, attachment.welcome.load_blocks_max or blocks)
        if blocks == 0:
            return None
        return pb.Offer(
            offer_id=transfer.id if transfer else os.urandom(16),
            secret=transfer.secret if transfer else os.urandom(16),
            space_id=space_id,
            request_id=wire_request_id(request.request_id),
            hashes=b"".join(request.block_hashes[:blocks]),
            tokens=request.num_prompt_tokens,
            lifetime_ms=self._config.offer_lifetime_ms,
        )

    def begin(self, request: Any, transfer: Transfer, attachment: Attachment, space_id: bytes) -> OpenOffer | None:
        """Offers a prompt before it is computed; its blocks can be had as they are stored."""
        offer = self._offer(request, attachment, space_id, transfer)
        if offer is None:
            return None
        offer.open_ended = True
        return OpenOffer(attachment, offer.offer_id) if attachment.send(pb.SessionRequest(offer=offer)) else None

    def finish(
        self,
        request: Any,
        block_ids: list[int],
        transfer: Transfer | None,
        opened: OpenOffer | None,
        attachment: Attachment,
        space_id: bytes,
    ) -> tuple[str, Hold | None] | None:
        """Offers a prompt that is computed. block_ids: its blocks, where they may be lent.

        Returns the ticket, and what its blocks are to be kept for; None where nothing was offered.
        """
        offer = self._offer(request, attachment, space_id, transfer)
        if offer is None or attachment.draining:  # which takes no offers, and would not say when one is served
            return None
        if transfer is not None and (opened is None or opened.attachment is not attachment):
            # The daemon was not there when the prompt arrived, or is another: a ticket of a transfer, which names no epoch, is good for open offers only.
            opened = self.begin(request, transfer, attachment, space_id)
        message = pb.SessionRequest(offer=offer)
        if opened is not None:
            message = pb.SessionRequest(complete_offer=pb.CompleteOffer(offer_id=offer.offer_id))
        said = getattr(message, message.WhichOneof("message"))
        blocks = len(offer.hashes) // wire.HASH_BYTES
        lent = self._table is not None and self._config.spill_ms > 0 and len(block_ids) >= blocks
        if lent:
            assert self._table is not None
            said.region = REGION
            said.block_ids.extend(block_ids[:blocks])
            said.generations.extend(self._table.values(block_ids[:blocks]))
        if not attachment.send(message):
            return None
        return self._ticket(offer, attachment), Hold([], offer.offer_id, attachment.epoch) if lent else None

    def _ticket(self, offer: pb.Offer, attachment: Attachment) -> str:
        ticket = pb.Ticket(
            wire_version=wire.VERSION,
            addresses=[attachment.welcome.peer_address],
            offer_id=offer.offer_id,
            secret=offer.secret,
            epoch=attachment.epoch,
            space_id=offer.space_id,
            tail_hash=offer.hashes[-wire.HASH_BYTES :],
            blocks=len(offer.hashes) // wire.HASH_BYTES,
            tokens=offer.tokens,
            lifetime_ms=self._config.offer_lifetime_ms or LIFETIME_MS,
            instance=self._instance,
        )
        return base64.b64encode(ticket.SerializeToString()).decode()
