"""Bluesky's own client of tap accepts every event that the feed sends, whatever records contain."""

import json
import random
from typing import Any

import pytest

from indexer.atproto.cid import cid_of
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.record import decode_record
from indexer.db.change_log_reads import LoggedChange, StoredRecord
from indexer.readers.events import event_of
from indexer.readers.tap.events import encode as encode_event
from tests.feed_clients.link_records import encode, link
from tests.feed_clients.node_process import needs_clients, node_process
from tests.waiting import until

pytestmark = [pytest.mark.proof("clients"), needs_clients]
THING = "com.example.thing"
RANDOM_VALUES = 300
PUT = LoggedChange(7, "did:plc:" + "a" * 24, THING, "r", "create", None, "3laaaaaaaaa22", live=True, batch_time=0)


def nested(levels: int) -> Any:
    return [nested(levels - 1)] if levels else 1


RAW = link(b"x" * 32)
BLOB = {"$type": "blob", "ref": RAW, "mimeType": "a/b", "size": 5}
SENT = [
    *(link(b"x" * size, function=0x13) for size in (0, 32, 75)),
    *(link(b"x" * 32, codec=1 << bits, function=1 << bits) for bits in (8, 30, 35, 62)),
    *(nested(levels) for levels in (1, 29)),
    list(range(60_000)), [RAW] * 100, "x" * 900_000, b"", b"x" * 100_000, "\u2028\ud7ff\ufeff",
    {"": 1}, {"k" * 8_192: 1}, {"constructor": 1, "toString": 1, "valueOf": 1, "then": 1}, {"asCID": 1, "/": b"x"},
    {"version": 1, "code": 85, "multihash": {"code": 18, "digest": b"x"}, "bytes": b"x"},
    {"cid": "bafkreifepiu23okq5zuyvyhsoiazv2icw2van3s7ko6d3ixl5jx2yj2yhu", "mimeType": "a/b"},
    BLOB, BLOB | {"ref": link(b"x" * 64, function=0x13)}, 2**53 - 1, 1 - 2**53, True, None,
]  # fmt: skip
OMITTED = [
    link(b"x" * 76, function=0x13),
    [{"v": link(b"x" * 96, function=0x13)}],
    nested(30),
    nested(200),
    {"k" * 8_193: 1},
    {"__proto__": 1},
    2**53,
    {"$type": None},
    {"$type": ""},
    BLOB | {"ref": link(b"x" * 32, codec=0x71)},
    BLOB | {"size": 2**53},
    BLOB | {"more": 1},
]


def random_value(rng: random.Random, levels: int) -> Any:
    kind = rng.randrange(12 if levels else 8)
    if kind >= 10:
        return [random_value(rng, levels - 1) for _ in range(rng.randrange(4))]
    if kind >= 8:
        keys = ["$type", "ref", "size", "mimeType", "cid", "a", "b", "__proto__", "x" * 9_000]
        chosen = rng.sample(keys, rng.randrange(6))
        return {key: rng.choice([BLOB.get(key, 1), random_value(rng, levels - 1)]) for key in chosen}
    digest = rng.randbytes(rng.choice([0, 20, 32, 64, 76, 90]))
    return [
        None, rng.random() < 0.5, rng.choice([-1, 1]) * rng.randrange(1 << rng.randrange(1, 64)),
        rng.choice(["blob", "a/b", "", "é\u2028"]), rng.randbytes(5),
        link(digest, function=rng.randrange(1, 1 << 20)), link(digest, codec=rng.randrange(1, 1 << 20)), BLOB,
    ][kind]  # fmt: skip


async def sent(values: list[Any]) -> list[tuple[str | None, bool]]:
    """Return why the client refuses the event of each record, and whether the event has its value."""
    with_value = []
    async with node_process("tap_parse.mjs") as client:
        for value in values:
            block = encode({"$type": THING, "v": value})
            stored = decode_record(block, THING, DEFAULT_LIMITS)
            json_ = stored.json.encode() if stored.json is not None else None
            event = event_of(PUT, StoredRecord(cid_of(block), PUT.rev or "", json_), None)
            assert event is not None
            message = encode_event(event)
            client.send(message.decode())
            with_value.append("record" in json.loads(message)["record"])
        await until(lambda: len(client.lines) == len(values))
        return [(line["refused"], has_value) for line, has_value in zip(client.lines, with_value, strict=True)]


async def test_client_accepts_every_value_that_is_sent_and_the_events_without_those_that_it_refuses() -> None:
    assert await sent(SENT) == [(None, True)] * len(SENT)
    assert await sent(OMITTED) == [(None, False)] * len(OMITTED)


async def test_client_accepts_the_events_of_random_records() -> None:
    rng = random.Random(1)
    found = await sent([random_value(rng, 4) for _ in range(RANDOM_VALUES)])
    assert [refused for refused, _ in found if refused] == []
    assert {has_value for _, has_value in found} == {True, False}
