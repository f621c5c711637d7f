"""The events that clients of tap get, as tap's own code makes them."""

import json
from typing import Any

import pytest

from indexer.atproto.cid import cid_text, parse_cid
from indexer.db.change_log_reads import LoggedChange, StoredAccount, StoredRecord
from indexer.readers.events import event_of
from indexer.readers.tap.channel import acknowledged_seq
from indexer.readers.tap.events import MAX_LEVELS, account_event, encode, is_accepted

CID = "bafyreifepiu23okq5zuyvyhsoiazv2icw2van3s7ko6d3ixl5jx2yj2yhu"
BLOB_CID = "bafkreifepiu23okq5zuyvyhsoiazv2icw2van3s7ko6d3ixl5jx2yj2yhu"
POST = "app.bsky.feed.post"
LONGEST_LINK = b"\x01\x55\x13\x4b" + b"x" * 75
LONG_LINK = b"\x01\x55\x13\x4c" + b"x" * 76
"""A CID that a record may contain: the product accepts 100 bytes."""
ACTIVE = StoredAccount("ada.test", True, None, False)
BLOB = {"$type": "blob", "ref": {"$link": BLOB_CID}, "mimeType": "image/png", "size": 5}


def put(action: str = "create", *, live: bool = True) -> LoggedChange:
    return LoggedChange(7, "did:plc:a", POST, "one", action, CID, "3laaaaaaaaa22", live, 0)


def record_event(change: LoggedChange, record: StoredRecord | None) -> bytes:
    event = event_of(change, record, None)
    assert event is not None
    return encode(event)


def test_record_event_has_the_fields_of_tap_in_their_order() -> None:
    value = b'{"text":"hello","$type":"app.bsky.feed.post"}'
    event = record_event(put(live=False), StoredRecord(parse_cid(CID), "3laaaaaaaaa22", value))
    assert event == (
        b'{"id":7,"type":"record","record":{"live":false,"did":"did:plc:a","rev":"3laaaaaaaaa22",'
        b'"collection":"app.bsky.feed.post","rkey":"one","action":"create","record":' + value
        + b',"cid":"' + CID.encode() + b'"}}'
    )  # fmt: skip


def test_delete_has_neither_record_nor_cid() -> None:
    event = record_event(put("delete"), StoredRecord(parse_cid(CID), "3laaaaaaaaa33", b"{}"))
    assert json.loads(event)["record"].keys() == {"live", "did", "rev", "collection", "rkey", "action"}


def test_record_that_was_written_again_comes_with_its_present_value_and_cid() -> None:
    event = record_event(put(), StoredRecord(parse_cid(BLOB_CID), "3lbbbbbbbbb22", b'{"$type":"x"}'))
    record = json.loads(event)["record"]
    assert (record["cid"], record["rev"], record["record"]) == (BLOB_CID, "3lbbbbbbbbb22", {"$type": "x"})


def test_record_that_was_deleted_since_gives_no_event() -> None:
    assert event_of(put("update"), None, None) is None


@pytest.mark.parametrize("value", [None, b'{"$type":"x","number":1.5}'])
def test_record_without_a_value_that_clients_accept_comes_without_record(value: bytes | None) -> None:
    event = record_event(put(), StoredRecord(parse_cid(CID), "3laaaaaaaaa22", value))
    assert json.loads(event)["record"].keys() >= {"cid", "action"}
    assert "record" not in json.loads(event)["record"]


def levels(count: int) -> Any:
    """Return a value with this number of levels, the record included."""
    value: Any = 5
    for _ in range(count - 1):
        value = [value]
    return {"x": value}


@pytest.mark.parametrize(
    ("value", "accepted"),
    [
        ({}, True),
        ({"$type": POST, "list": [1, "x", None, True, {"$link": CID}, {"$bytes": "AAA"}]}, True),
        ({"image": BLOB}, True),
        ({"image": BLOB | {"ref": {"$link": cid_text(b"\x01\x55\x13\x40" + b"x" * 64)}}}, True),
        ([], False),
        ({"$link": CID}, False),
        ({"n": 2**53 - 1}, True),
        ({"n": 2**53}, False),
        ({"n": [-(2**53)]}, False),
        ({"n": 1.0}, False),
        ({"__proto__": 1}, False),
        ({"é" * 4_096: 1}, True),
        ({"é" * 4_096 + "x": 1}, False),
        ({"x": {"$type": ""}}, False),
        ({"x": {"$type": 5}}, False),
        ({"x": {"$type": None}}, False),
        ({"x": {"$type": "blob"}}, False),
        ({"x": BLOB | {"size": -1}}, False),
        ({"x": BLOB | {"size": True}}, False),
        ({"x": BLOB | {"size": 2**53}}, False),
        ({"x": BLOB | {"mimeType": "png"}}, False),
        ({"x": BLOB | {"more": 1}}, False),
        ({"x": BLOB | {"ref": {"$link": CID}}}, False),
        ({"x": BLOB | {"ref": BLOB_CID}}, False),
        ({"v": {"$link": cid_text(LONGEST_LINK)}}, True),
        ({"v": {"$link": cid_text(LONG_LINK)}}, False),
        (levels(MAX_LEVELS - 2), True),
        (levels(MAX_LEVELS - 1), False),
    ],
)
def test_values_that_strict_clients_refuse_are_recognized(*, value: Any, accepted: bool) -> None:
    """`tests/feed_clients/test_tap_values.py` compares with the client itself."""
    assert is_accepted(value) is accepted


@pytest.mark.parametrize(
    ("account", "expected"),
    [
        (StoredAccount("ada.test", True, None, False), ("ada.test", True, "active")),
        (StoredAccount(None, True, "active", False), ("handle.invalid", True, "active")),
        (StoredAccount("ada.test", True, "active", True), ("ada.test", False, "takendown")),
        (StoredAccount("ada.test", False, "suspended", False), ("ada.test", False, "suspended")),
        (StoredAccount("ada.test", False, "deleted", True), ("ada.test", False, "deleted")),
        (StoredAccount("ada.test", False, None, False), ("ada.test", False, "deactivated")),
        (StoredAccount("ada.test", False, "throttled", False), ("ada.test", False, "deactivated")),
        (StoredAccount("ada.test", False, "active", False), ("ada.test", False, "deactivated")),
    ],
)
def test_identity_event_has_one_of_the_statuses_of_tap(account: StoredAccount, expected: tuple[str, bool, str]) -> None:
    change = LoggedChange(7, "did:plc:a", None, None, "identity", None, None, True, 0)
    handle, active, status = expected
    event = account_event(change, account)
    assert event is not None
    assert json.loads(encode(event)) == {
        "id": 7,
        "type": "identity",
        "identity": {"did": "did:plc:a", "handle": handle, "is_active": active, "status": status},
    }


def test_deletion_of_an_account_that_is_forgotten_is_delivered() -> None:
    deleted = LoggedChange(7, "did:plc:a", None, None, "deleted", None, None, True, 0)
    event = account_event(deleted, None)
    assert event is not None
    assert json.loads(encode(event))["identity"]["status"] == "deleted"
    assert account_event(deleted._replace(action="identity"), None) is None


def test_account_that_is_not_tracked_has_no_event_but_its_deletion() -> None:
    deleted = LoggedChange(7, "did:plc:a", None, None, "deleted", None, None, True, 0)
    untracked = StoredAccount("ada.test", False, None, False, tracked=False)
    event = account_event(deleted, untracked)
    assert event is not None
    assert (event.active, event.status) == (False, "deleted")
    assert account_event(deleted._replace(action="hidden"), untracked) is None


def test_entry_of_the_past_comes_with_the_present_state() -> None:
    event = account_event(LoggedChange(7, "did:plc:a", None, None, "hidden", None, None, True, 0), ACTIVE)
    assert event is not None
    assert event.active


@pytest.mark.parametrize(
    "message",
    ['{"type":"ack"}', '{"type":"ack","id":true}', '{"type":"ack","id":1e30}', '{"id":1}', "[]", "x", "\ud800"],
)
def test_other_messages_acknowledge_nothing(message: str) -> None:
    assert acknowledged_seq(message) is None
