"""Tickets, and which of them are believed."""

import base64
from types import SimpleNamespace

import pytest

from kvferry.v1 import engine_pb2 as pb
from kvferry.vllm.config import Config
from kvferry.vllm.handoff import Offers, Transfer, is_address, read_peers, read_ticket, read_transfer, transfer_ticket

SPACE = bytes(range(32))
HASHES = [bytes([n]) * 32 for n in range(1, 9)]


class Attached(SimpleNamespace):
    """An attachment that notes what is sent."""

    def __init__(self, most: int = 1000):
        super().__init__(welcome=SimpleNamespace(load_blocks_max=most, peer_address="10.0.0.1:7400"), epoch=b"e" * 16, lost=False, sent=[])

    def send(self, message) -> bool:
        self.sent.append(message)
        return not self.lost


class Table:
    def values(self, block_ids):
        return [100 + b for b in block_ids]


def request(tokens: int = 100):
    return SimpleNamespace(request_id="r", num_prompt_tokens=tokens, block_hashes=HASHES)


def offers(table=None, **fields) -> Offers:
    return Offers(Config(**fields), 16, "instance", table)


def made(tokens: int = 100, most: int = 1000):
    attached = Attached(most)
    out = offers().finish(request(tokens), [], None, None, attached, SPACE)
    return None if out is None else (attached.sent[0].offer, out[0])


def test_offer_and_ticket_agree():
    offer, text = made()
    raw, ticket, result = read_ticket({"kvferry_ticket": text}, SPACE, HASHES, 100)
    assert result == "accepted" and pb.Ticket.FromString(raw) == ticket
    assert (ticket.offer_id, ticket.secret) == (offer.offer_id, offer.secret)
    assert ticket.blocks == 6 and ticket.tokens == 100 and ticket.tail_hash == HASHES[5] and offer.hashes == b"".join(HASHES[:6])
    assert list(ticket.addresses) == ["10.0.0.1:7400"] and ticket.lifetime_ms == 120_000


def test_offer_is_bounded():
    assert made(tokens=15) is None
    assert made(most=2)[0].hashes == b"".join(HASHES[:2])


def changed(**fields) -> str:
    ticket = pb.Ticket.FromString(base64.b64decode(made()[1]))
    for name, value in fields.items():
        if name == "addresses":
            del ticket.addresses[:]
        else:
            setattr(ticket, name, value)
    return base64.b64encode(ticket.SerializeToString()).decode()


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (None, "absent"),
        (7, "malformed"),
        ("!", "malformed"),
        ("A" * 200_000, "malformed"),
        (base64.b64encode(b"\xff" * 50).decode(), "malformed"),
        (changed(secret=b"short"), "malformed"),
        (changed(offer_id=b""), "malformed"),
        (changed(addresses=[]), "malformed"),
        (changed(space_id=bytes(32)), "other_space"),
        (changed(tail_hash=bytes(32)), "other_prompt"),
        (changed(blocks=0), "other_prompt"),
        (changed(blocks=9), "other_prompt"),
        (changed(blocks=2**31), "other_prompt"),
    ],
)
def test_ticket_is_not_believed(text, want):
    assert read_ticket({"kvferry_ticket": text}, SPACE, HASHES, 100) == (b"", None, want)
