"""Jetstream's events: their JSON, their frames, their times, and what filters select."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
from backports.zstd import ZstdDict, decompress
from websockets.frames import Opcode
from websockets.protocol import CLIENT, Protocol

from indexer.atproto.cid import cid_of, cid_text
from indexer.atproto.syntax import CollectionFilter
from indexer.db.change_log_reads import FeedPage, LoggedBatch, LoggedChange, StoredAccount, StoredRecord
from indexer.readers.events import Kind
from indexer.readers.jetstream import events
from indexer.readers.jetstream.events import (
    ALL_EVENTS,
    EventChunk,
    EventFilter,
    LogPosition,
    Wire,
    encode_page,
    position_before,
    v1_message,
    v2_message,
)

ADA, BOB = "did:plc:ada", "did:plc:bob"
POST, LIKE = "app.bsky.feed.post", "app.bsky.feed.like"
REV = "3l3qo2vutsw2b"
CID = cid_of(b"\xa0")
TIME = 1_725_911_162_329_308
EVERY_KIND = EventFilter(kinds=frozenset({"commit", "identity", "account", "sync"}))
ACTIVE = StoredAccount(active=True, hosting_status=None, takedown=False, handle="ada.test")


def record_change(
    seq: int, action: str = "create", did: str = ADA, collection: str = POST, **other: Any
) -> LoggedChange:
    cid = None if action == "delete" else cid_text(CID)
    change = LoggedChange(seq, did, collection, f"key{seq}", action, cid, REV, live=True, batch_time=TIME)
    return change._replace(**other)


def repo_change(seq: int, action: str) -> LoggedChange:
    return LoggedChange(seq, ADA, None, None, action, None, REV, live=True, batch_time=TIME)


def value(text: str = '{"$type": "app.bsky.feed.post"}') -> StoredRecord:
    return StoredRecord(CID, REV, text.encode())


def encode(
    changes: Sequence[LoggedChange],
    values: Mapping[int, StoredRecord] | None = None,
    account: StoredAccount | None = ACTIVE,
    start: LogPosition | None = None,
) -> EventChunk:
    """Return the chunk of a page; by default, all records have a value."""
    values = dict.fromkeys(range(len(changes)), value()) if values is None else values
    accounts = {ADA: account} if account else {}
    return encode_page(start or LogPosition(changes[0].seq - 1), FeedPage(changes, values, accounts))


def read_frames(data: bytes) -> list[tuple[Opcode, bytes]]:
    """Return the frames as an independent implementation of the websocket protocol reads them."""
    client = Protocol(CLIENT)
    client.receive_data(data)
    return [(frame.opcode, bytes(frame.data)) for frame in client.events_received()]  # type: ignore[union-attr]


def sent(chunk: EventChunk, events: EventFilter = ALL_EVENTS, after: int = 0, wire: Wire = v1_message) -> list[Any]:
    data, count = chunk.select(events, after, wire, compress=False)
    frames = read_frames(data)
    assert len(frames) == count
    assert all(opcode is Opcode.TEXT for opcode, _ in frames)
    return [orjson.loads(text) for _, text in frames]


def test_commit_events_have_the_form_of_jetstream() -> None:
    create, update, delete = sent(encode([record_change(7), record_change(8, "update"), record_change(9, "delete")]))
    commit = {
        "rev": REV,
        "operation": "create",
        "collection": POST,
        "rkey": "key7",
        "record": {"$type": POST},
        "cid": cid_text(CID),
    }
    assert create == {"did": ADA, "time_us": TIME, "cursor": 7, "kind": "commit", "commit": commit}
    assert list(create) == ["did", "time_us", "cursor", "kind", "commit"]
    assert list(create["commit"]) == list(commit)
    assert update["commit"] == commit | {"operation": "update", "rkey": "key8"}
    assert delete == {
        "did": ADA,
        "time_us": TIME + 2,
        "cursor": 9,
        "kind": "commit",
        "commit": {"rev": REV, "operation": "delete", "collection": POST, "rkey": "key9"},
    }


@pytest.mark.parametrize(
    ("action", "account", "expected"),
    [
        ("visible", ACTIVE, {"active": True}),
        ("visible", ACTIVE._replace(takedown=True), {"active": False, "status": "takendown"}),
        (
            "hidden",
            ACTIVE._replace(active=False, takedown=True, hosting_status="suspended"),
            {"active": False, "status": "suspended"},
        ),
        ("hidden", ACTIVE._replace(active=False, hosting_status="out-of-scope"), {"active": False}),
        ("deleted", ACTIVE, {"active": False, "status": "deleted"}),
        ("hidden", ACTIVE, {"active": False}),
        ("hidden", ACTIVE._replace(takedown=True), {"active": False, "status": "takendown"}),
        ("hidden", ACTIVE._replace(active=False), {"active": False}),
        (
            "hidden",
            ACTIVE._replace(active=False, hosting_status="deactivated"),
            {"active": False, "status": "deactivated"},
        ),
        ("deleted", ACTIVE._replace(active=False), {"active": False, "status": "deleted"}),
        (
            "identity",
            ACTIVE._replace(active=False, hosting_status="suspended"),
            {"active": False, "status": "suspended"},
        ),
    ],
)
def test_account_events_have_the_form_of_jetstream(
    action: str, account: StoredAccount, expected: dict[str, object]
) -> None:
    [event] = sent(encode([repo_change(5, action)], account=account))
    common = {"did": ADA, "seq": 5, "time": "2024-09-09T19:46:02.329Z"}
    assert event == {"did": ADA, "time_us": TIME, "cursor": 5, "kind": "account", "account": expected | common}


def test_account_whose_row_was_removed_is_not_sent_as_active() -> None:
    events = sent(encode([repo_change(5, "deleted"), repo_change(6, "visible")], account=None))
    assert [event["account"]["active"] for event in events] == [False]


@pytest.mark.parametrize("action", ["moved", "identity"])
@pytest.mark.parametrize(("handle", "expected"), [("ada.test", {"handle": "ada.test"}), (None, {})])
def test_identity_events_have_the_form_of_jetstream(action: str, handle: str | None, expected: dict[str, str]) -> None:
    [event] = sent(encode([repo_change(5, action)], account=ACTIVE._replace(handle=handle)))
    identity = {"did": ADA, "seq": 5, "time": "2024-09-09T19:46:02.329Z"} | expected
    assert event == {"did": ADA, "time_us": TIME, "cursor": 5, "kind": "identity", "identity": identity}


def test_entries_without_an_event_move_the_position() -> None:
    """The value of the second record is not stored."""
    changes = [record_change(6), record_change(7), repo_change(8, "completed")]
    chunk = encode(changes, values={1: StoredRecord(CID, REV, None)})
    assert sent(chunk) == second_wire(chunk) == []
    assert (chunk.before, chunk.end.seq) == (5, 8)


def test_times_increase_strictly_within_and_across_batches() -> None:
    batches = [(1, 3, TIME), (4, 1, TIME + 3), (5, 2, TIME + 500)]
    changes = [
        record_change(seq, batch_time=time) for first, size, time in batches for seq in range(first, first + size)
    ]
    times = [event["time_us"] for event in sent(encode(changes))]
    assert times == [TIME, TIME + 1, TIME + 2, TIME + 3, TIME + 500, TIME + 501]
    for split in range(1, len(changes)):
        first = encode(changes[:split])
        second = encode(changes[split:], start=first.end)
        assert [event["time_us"] for event in sent(first) + sent(second)] == times
        assert first.end.time_us == times[split - 1]


@pytest.mark.parametrize(
    ("cursor", "expected"), [(TIME, 41), (TIME + 1, 42), (TIME + 2, 43), (TIME + 3, 44), (TIME + 99, 44)]
)
def test_cursor_repeats_the_event_of_its_time(cursor: int, expected: int) -> None:
    batch = LoggedBatch(first_seq=41, size=3, time=TIME)
    changes = [record_change(seq) for seq in (41, 42, 43)]
    changes.append(record_change(44, batch_time=TIME + 1_000))
    position = position_before(cursor - TIME, batch)
    rest = [change for change in changes if change.seq > position.seq]
    assert rest[0].seq == expected
    everything = {event["commit"]["rkey"]: event["time_us"] for event in sent(encode(changes))}
    for event in sent(encode(rest, start=position)):
        assert event["time_us"] == everything[event["commit"]["rkey"]]
        assert event["time_us"] >= cursor or cursor > TIME + 2


@pytest.mark.parametrize("size", [1, 125, 126, 65_535, 65_536, 200_000])
def test_frames_of_all_sizes_are_read_by_another_implementation(size: int) -> None:
    text = orjson.dumps({"text": "x" * size}).decode()
    events = sent(encode([record_change(1), record_change(2)], {0: value(text), 1: value(text)}))
    assert [len(event["commit"]["record"]["text"]) for event in events] == [size, size]


def test_filters_select_by_collection_account_size_and_origin() -> None:
    changes = [
        record_change(1),
        record_change(2, collection=LIKE),
        record_change(3, did=BOB),
        record_change(4, live=False),
        repo_change(5, "hidden"),
    ]
    values = dict.fromkeys(range(5), value()) | {2: value('{"text": "' + "x" * 1_000 + '"}')}
    chunk = encode(changes, values)

    def selected(events: EventFilter, after: int = 0) -> list[int]:
        numbers = {event["time_us"]: number for number, event in enumerate(sent(chunk), 1)}
        return [numbers[event["time_us"]] for event in sent(chunk, events, after)]

    assert selected(ALL_EVENTS) == [1, 2, 3, 4, 5]
    assert selected(ALL_EVENTS, after=3) == [4, 5]
    assert selected(EventFilter(CollectionFilter([POST]))) == [1, 3, 4, 5], "account events have no collection"
    assert selected(EventFilter(CollectionFilter([LIKE])), after=2) == [5]
    assert selected(EventFilter(dids=frozenset({BOB}))) == [3]
    assert selected(EventFilter(max_bytes=500)) == [1, 2, 4, 5]
    assert selected(EventFilter(live_only=True)) == [1, 2, 3, 5]


def second_wire(chunk: EventChunk, events: EventFilter = EVERY_KIND) -> list[Any]:
    """Return the payloads of the messages on the second wire."""
    messages = sent(chunk, events, wire=v2_message)
    assert all(message.keys() == {"$type", "payload"} and message["$type"] == "message" for message in messages)
    return [message["payload"] for message in messages]


def test_events_of_the_second_wire_have_the_form_of_its_lexicon() -> None:
    changes = [record_change(7), record_change(8, "delete"), repo_change(9, "moved"), repo_change(10, "snapshot")]
    create, delete, identity, sync = second_wire(encode(changes))
    name = "network.bsky.jetstream.subscribeEvents"

    def common(seq: int) -> dict[str, object]:
        time = f"2024-09-09T19:46:02.{329_308 + seq - 7}Z"
        return {"seq": seq, "did": ADA, "time": time, "witnessedAt": time}

    commit = {"rev": REV, "collection": POST}
    put = {"operation": "create", "rkey": "key7", "record": {"$type": POST}, "cid": cid_text(CID)}
    assert create == {"$type": f"{name}#commit"} | common(7) | commit | put
    assert delete == {"$type": f"{name}#commit"} | common(8) | commit | {"operation": "delete", "rkey": "key8"}
    inner = {"seq": 9, "did": ADA, "time": identity["time"], "handle": "ada.test"}
    assert identity == {"$type": f"{name}#identity"} | common(9) | {"identity": inner}
    inner = {"seq": 10, "did": ADA, "time": sync["time"], "rev": REV, "blocks": {"$bytes": ""}}
    assert sync == {"$type": f"{name}#sync"} | common(10) | {"sync": inner}
    [account] = second_wire(encode([repo_change(5, "hidden")], account=ACTIVE._replace(takedown=True)))
    inner = {"seq": 5, "did": ADA, "time": account["time"], "active": False, "status": "takendown"}
    assert account["account"] == inner


def test_sync_is_only_sent_on_request_and_of_accounts_that_are_shown() -> None:
    """Of a hidden account, no records would follow."""
    changes = [repo_change(4, "snapshot"), record_change(5)]
    chunk = encode(changes)
    assert [payload["seq"] for payload in second_wire(chunk)] == [4, 5]
    assert [payload["seq"] for payload in second_wire(chunk, ALL_EVENTS)] == [5]
    assert [event["cursor"] for event in sent(chunk, EVERY_KIND)] == [5], "never on the first wire"
    for account in (ACTIVE._replace(takedown=True), ACTIVE._replace(active=False), None):
        assert [payload["seq"] for payload in second_wire(encode(changes, account=account))] == [5]


def test_kinds_select_events_and_entries_that_may_have_them() -> None:
    changes = [record_change(1), repo_change(2, "identity"), repo_change(3, "visible"), repo_change(4, "snapshot")]
    hidden = encode([repo_change(2, "identity")], account=ACTIVE._replace(takedown=True))
    kinds: tuple[Kind, ...] = ("commit", "identity", "account", "sync")
    for number, kind in enumerate(kinds, 1):
        only = EventFilter(kinds=frozenset({kind}))
        assert [payload["seq"] for payload in second_wire(encode(changes), only)] == [number]
        may = [change.seq for change in (*changes, repo_change(5, "completed")) if only.may_select(change)]
        assert may == [number] if kind != "account" else may == [2, 3]
        assert len(second_wire(hidden, only)) == (kind == "account")


def test_size_limit_of_the_second_wire_is_that_of_the_json() -> None:
    chunk = encode([record_change(1), record_change(2)], {0: value(), 1: value('{"text": "' + "x" * 1_000 + '"}')})
    sizes = [len(text) for _, text in read_frames(chunk.select(ALL_EVENTS, 0, v2_message, compress=False)[0])]
    for limit, count in ((sizes[0] - 1, 0), (sizes[0], 1), (sizes[1] - 1, 1), (sizes[1], 2)):
        for compress in (False, True):
            assert chunk.select(EventFilter(max_bytes=limit), 0, v2_message, compress=compress)[1] == count


def test_compressed_events_need_the_dictionary_of_jetstream() -> None:
    chunk = encode([record_change(1), record_change(2, "delete")])
    dictionary = ZstdDict(Path(events.__file__).with_name("zstd_dictionary").read_bytes())
    assert dictionary.dict_id == 1_612_007_021
    frames = read_frames(chunk.select(ALL_EVENTS, 0, v1_message, compress=True)[0])
    assert [opcode for opcode, _ in frames] == [Opcode.BINARY, Opcode.BINARY]
    assert [orjson.loads(decompress(data, dictionary)) for _, data in frames] == sent(chunk)
    small = EventFilter(max_bytes=min(len(data) for _, data in frames))
    assert chunk.select(small, 0, v1_message, compress=True)[1] == 1, "the limit is that of the message as it is sent"
