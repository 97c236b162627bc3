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
        super().__init__(
            welcome=SimpleNamespace(load_blocks_max=most, peer_address="10.0.0.1:7400"),
            epoch=b"e" * 16,
            lost=False,
            draining=False,
            sent=[],
        )

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


def test_nothing_is_offered_to_a_daemon_that_is_about_to_stop():
    attached = Attached()
    attached.draining = True
    assert offers(Table()).finish(request(), list(range(7)), None, None, attached, SPACE) is None and not attached.sent


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


def test_blocks_are_lent_where_there_is_a_table():
    attached = Attached()
    _, hold = offers(Table()).finish(request(), [9, 8, 7, 6, 5, 4, 3], None, None, attached, SPACE)
    offer = attached.sent[0].offer
    assert (offer.region, offer.block_ids, offer.generations) == (1, [9, 8, 7, 6, 5, 4], [109, 108, 107, 106, 105, 104])
    assert (hold.offer_id, hold.epoch) == (offer.offer_id, b"e" * 16)
    for table, blocks, fields in ((None, range(7), {}), (Table(), range(5), {}), (Table(), range(7), {"spill_ms": 0})):
        _, hold = offers(table, **fields).finish(request(), list(blocks), None, None, attached, SPACE)
        assert hold is None and not attached.sent[-1].offer.block_ids


def test_an_open_offer_is_completed_where_it_was_begun():
    transfer, attached, other = Transfer(b"i" * 16, b"s" * 16, ""), Attached(), Attached()
    opened = offers().begin(request(), transfer, attached, SPACE)
    assert attached.sent[0].offer.open_ended and attached.sent[0].offer.offer_id == transfer.id
    assert offers().begin(request(tokens=15), transfer, attached, SPACE) is None
    text, _ = offers().finish(request(), [], transfer, opened, attached, SPACE)
    assert attached.sent[-1].complete_offer == pb.CompleteOffer(offer_id=transfer.id)
    assert read_ticket({"kvferry_ticket": text}, SPACE, HASHES, 100)[1].secret == transfer.secret
    offers().finish(request(), [], transfer, opened, other, SPACE)
    assert other.sent[0].offer.offer_id == transfer.id and other.sent[0].offer.open_ended
    assert other.sent[1].complete_offer.offer_id == transfer.id
    opened.end("aborted")
    assert attached.sent[-1].end_offer == pb.EndOffer(offer_id=transfer.id, reason="aborted")


ID, SECRET = "0f" * 16, "A1" * 16


@pytest.mark.parametrize(
    ("given", "decodes", "want"),
    [
        (None, True, "absent"),
        ({"id": ID, "secret": SECRET}, False, "accepted"),
        ({"id": ID, "secret": SECRET, "address": 7}, False, "accepted"),
        ({"id": ID, "secret": SECRET, "address": "[fe80::1]:7400"}, True, "accepted"),
        ({"id": ID, "secret": SECRET}, True, "malformed"),
        ({"id": ID[2:], "secret": SECRET}, False, "malformed"),
        ({"id": ID, "secret": "zz" * 16}, False, "malformed"),
        ({"id": ID + "\n", "secret": SECRET}, False, "malformed"),
        ({"id": None, "secret": SECRET}, False, "malformed"),
        ({"secret": SECRET}, False, "malformed"),
        ("text", False, "malformed"),
        ([ID, SECRET], False, "malformed"),
    ],
)
def test_transfers_are_read(given, decodes, want):
    transfer, result = read_transfer({"kvferry_transfer": given} if given is not None else {}, decodes)
    assert result == want and (transfer is not None) == (want == "accepted")
    if transfer is not None:
        assert (transfer.id, transfer.secret) == (b"\x0f" * 16, b"\xa1" * 16)


def test_a_transfers_ticket_is_believed():
    raw, ticket, result = transfer_ticket(Transfer(b"i" * 16, b"s" * 16, "h:1"), SPACE, HASHES[:6], 100, 0)
    text = base64.b64encode(raw).decode()
    assert result == "accepted" and read_ticket({"kvferry_ticket": text}, SPACE, HASHES, 100)[1] == ticket
    assert ticket.epoch == bytes(16) and ticket.blocks == 6
    assert transfer_ticket(Transfer(b"i" * 16, b"s" * 16, "h:1"), SPACE, HASHES, 100, 2)[1].blocks == 2
    assert transfer_ticket(Transfer(b"i" * 16, b"s" * 16, "h:1"), SPACE, [], 15, 0) == (b"", None, "other_prompt")


@pytest.mark.parametrize(
    ("given", "want"),
    [
        (None, "absent"),
        (["a:1"], "accepted"),
        (["a:1", "b-2.c:65535", "10.0.0.1:7400", "[::1]:7400"], "accepted"),
        ([], "malformed"),
        (["a:1"] * 5, "malformed"),
        ("a:1", "malformed"),
        ([7], "malformed"),
        (["a"], "malformed"),
        (["a:1", ""], "malformed"),
        (["a" * 300 + ":1"], "malformed"),
        (["http://a:1"], "malformed"),
    ],
)
def test_peers_are_read(given, want):
    peers, result = read_peers({"kvferry_peers": given} if given is not None else {})
    assert result == want and peers == (given if want == "accepted" else [])


def test_addresses():
    assert is_address("a:1") and not is_address("a:1\n") and not is_address("a b:1") and not is_address(None)
