"""Jetstream's JSON events, in both versions, serialized once for all subscribers of a version.

An event is sent as a complete websocket frame: a server does not mask its frames, so they are equal for everybody.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from struct import pack
from time import monotonic
from typing import Any, NamedTuple

import orjson
from backports.zstd import ZstdCompressor, ZstdDict

from indexer.atproto.cid import cid_text
from indexer.atproto.syntax import CollectionFilter
from indexer.db.change_log_reads import FeedPage, LoggedBatch, LoggedChange
from indexer.readers.events import KINDS, FeedEvent, Kind, event_of
from indexer.sync.changes import RecordKey

_TEXT_FRAME, _BINARY_FRAME = 0x81, 0x82
_SHORT_FRAME, _LONG_FRAME = 126, 1 << 16
SUBSCRIBE_EVENTS = "network.bsky.jetstream.subscribeEvents"
EVENT_BYTES = 1_700
"""Approximate memory of an event, or of a chunk, besides the value of its record and the data of its frames."""
_DEFAULT_KINDS = frozenset[Kind]({"commit", "identity", "account"})

Wire = Callable[[FeedEvent], dict[str, Any] | None]
"""Returns the message of an event, to be sent as JSON; None if this version has none."""


class LogPosition(NamedTuple):
    """A position in the change log, with what maps the numbers of changes to times.

    The time of a change is the time of its batch plus its place in the batch, in microseconds. COMMIT makes the times
    of batches so that no two changes have the same time, and that a later change has a later one.
    """

    seq: int  # the number of the last change before the position
    batch_seq: int = 0  # the number of the first change in the batch of that change
    batch_time: int = -1  # the time of that batch, in microseconds since the Unix epoch

    def after(self, change: LoggedChange) -> "LogPosition":
        """Return the position after the next change."""
        if change.batch_time == self.batch_time:
            return self._replace(seq=change.seq)
        return LogPosition(change.seq, change.seq, change.batch_time)

    @property
    def time_us(self) -> int:
        """The time of the last change before the position, in microseconds since the Unix epoch."""
        return self.batch_time + self.seq - self.batch_seq


def position_before(passed: int, batch: LoggedBatch) -> LogPosition:
    """Return the position after the first `passed` changes of a batch; after all of them if it has fewer."""
    return LogPosition(batch.first_seq + min(passed, batch.size) - 1, batch.first_seq, batch.time)


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Selects the events that a subscriber receives."""

    collections: CollectionFilter | None = None  # of commit events; None selects all. Other events have no collection
    dids: frozenset[str] = frozenset()  # the accounts; an empty set selects all
    max_bytes: int = 0  # events with longer messages are left out; 0 means no limit
    live_only: bool = False  # leave out differences that a resync found
    kinds: frozenset[Kind] = _DEFAULT_KINDS

    def selects(self, event: FeedEvent) -> bool:
        """Return True if an event is sent, unless it is too long."""
        return self.may_select(event.change) and event.kind in self.kinds

    def may_select(self, change: LoggedChange) -> bool:
        """Return True if the event of a change may be sent. Its kind may depend on the account."""
        return (
            (not self.dids or change.did in self.dids)
            and (self.collections is None or change.collection is None or self.collections.matches(change.collection))
            and (change.live or not self.live_only)
            and not self.kinds.isdisjoint(KINDS.get(change.action, ()))
        )

    @property
    def selects_all(self) -> bool:
        """True if no event is left out."""
        return self == ALL_EVENTS


ALL_EVENTS = EventFilter()


class Frames(NamedTuple):
    """Consecutive websocket frames."""

    data: bytes
    events: Sequence[FeedEvent]
    ends: Sequence[int]  # where each of them ends in `data`
    sizes: Sequence[int]  # the sizes of their messages, as a subscriber limits them
    usual: bool  # `ALL_EVENTS` selects all of them


class EventChunk:
    """The events of consecutive entries of the change log. An entry may have no event.

    Attributes:
        before: The number of the last change before the chunk.
        end: The position after the chunk.
        size: Its memory in bytes, approximately. It grows when frames are made.
        on_growth: Called then.
        made_at: When it was made, in monotonic seconds.
        skipped: The entries, if none of them was wanted, so that they were read without their events.
    """

    def __init__(
        self, before: int, end: LogPosition, events: Sequence[FeedEvent], skipped: Sequence[LoggedChange] = ()
    ) -> None:
        self.before = before
        self.end = end
        self.skipped = skipped
        self._events = events
        self._frames: dict[tuple[Wire, bool], Frames] = {}
        values = [event.record.value for event in events if event.record and event.record.value]
        self.size = (1 + len(events) + len(skipped)) * EVENT_BYTES + sum(map(len, values))
        self.on_growth: Callable[[], None] = lambda: None
        self.made_at = monotonic()

    @property
    def erased(self) -> set[RecordKey]:
        """The records that were deleted here, but not in their repos: redacted, hidden, erased, or out of scope."""
        changes = [event.change for event in self._events]
        return {_key(change) for change in changes if change.action == "delete" and change.rev is None}

    def names(self, records: AbstractSet[RecordKey]) -> bool:
        """Return True if an event is about one of the records."""
        return any(_key(event.change) in records for event in self._events)

    def select(self, events: EventFilter, after: int, wire: Wire, *, compress: bool) -> tuple[bytes, int]:
        """Return the frames of the events that the filter selects, without changes up to `after`, and their number."""
        frames = self._frames_of(wire, compress=compress)
        if frames.usual and events.selects_all and after <= self.before:
            return frames.data, len(frames.ends)
        max_bytes = events.max_bytes or max(frames.sizes, default=0)
        parts, start = [], 0
        for event, end, size in zip(frames.events, frames.ends, frames.sizes, strict=True):
            if size <= max_bytes and event.change.seq > after and events.selects(event):
                parts.append(frames.data[start:end])
            start = end
        return b"".join(parts), len(parts)

    def _frames_of(self, wire: Wire, *, compress: bool) -> Frames:
        """Return the frames, made when a subscriber of this version and compression first asks for them."""
        if (made := self._frames.get((wire, compress))) is not None:
            return made
        if compress:
            plain = self._frames_of(wire, compress=False)
            payloads = [plain.data[end - size : end] for end, size in zip(plain.ends, plain.sizes, strict=True)]
            events, texts = list(plain.events), payloads
        else:
            encoded = [(event, message) for event in self._events if (message := wire(event)) is not None]
            events, texts = [event for event, _ in encoded], [orjson.dumps(message) for _, message in encoded]
        parts, ends, sizes, end = list[bytes](), list[int](), list[int](), 0
        for text in texts:
            header, payload = message_frame(text, compress=compress)
            parts += (header, payload)
            end += len(header) + len(payload)
            ends.append(end)
            # The limit is that of the message as it is sent; in the second version, that of its JSON.
            sizes.append(len(payload if wire is v1_message else text))
        usual = all(event.kind in _DEFAULT_KINDS for event in events)
        made = self._frames[wire, compress] = Frames(b"".join(parts), events, ends, sizes, usual)
        self.size += end
        self.on_growth()
        return made


def _key(change: LoggedChange) -> RecordKey:
    return change.did, change.collection or "", change.rkey or ""


def encode_page(start: LogPosition, page: FeedPage) -> EventChunk:
    """Return the events of a page that follows the position `start`; none if the page was skipped."""
    position, events = start, []
    for number, change in enumerate(page.changes):
        position = position.after(change)
        if not page.skipped:
            account = page.accounts.get(change.did)
            events.append(event_of(change, page.values.get(number), account, position.time_us))
    return EventChunk(start.seq, position, list(filter(None, events)), page.changes if page.skipped else ())


def v1_message(event: FeedEvent) -> dict[str, Any] | None:
    """Return the message of an event on the stream `/subscribe`."""
    kind, change = event.kind, event.change
    body = _body(event, "" if kind == "commit" else f"{_time_text(event.time_us)[:-4]}Z")
    if body is None or kind == "sync":
        return None
    return {"did": change.did, "time_us": event.time_us, "cursor": change.seq, "kind": kind, kind: body}


def v2_message(event: FeedEvent) -> dict[str, Any] | None:
    """Return the message of an event on the stream `SUBSCRIBE_EVENTS`."""
    time = _time_text(event.time_us)
    if (body := _body(event, time)) is None:
        return None
    common = {"seq": event.change.seq, "did": event.change.did, "time": time, "witnessedAt": time}
    return v2_payload(event.kind, common | (body if event.kind == "commit" else {event.kind: body}))


def v2_payload(fragment: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the message of this type with these fields."""
    return {"$type": "message", "payload": {"$type": f"{SUBSCRIBE_EVENTS}#{fragment}", **fields}}


def _body(event: FeedEvent, time: str) -> dict[str, Any] | None:
    """Return the object that both versions have; None for a record without a value."""
    change, record = event.change, event.record
    if event.kind == "commit":
        path = {"rev": event.rev, "operation": change.action, "collection": change.collection, "rkey": change.rkey}
        if record is None:
            return path
        value = record.value
        return None if value is None else {**path, "record": orjson.Fragment(value), "cid": cid_text(record.cid)}
    position: dict[str, Any] = {"did": change.did, "seq": change.seq, "time": time}
    match event.kind:
        case "identity":
            return position | ({"handle": event.handle} if event.handle else {})
        case "account":
            return position | {"active": event.active} | ({"status": event.status} if event.status else {})
        case "sync":  # the log does not have the commit
            return position | {"rev": event.rev, "blocks": {"$bytes": ""}}


def _time_text(time_us: int) -> str:
    seconds, micros = divmod(time_us, 1_000_000)
    return datetime.fromtimestamp(seconds, UTC).strftime(f"%Y-%m-%dT%H:%M:%S.{micros:06}Z")


def message_frame(text: bytes, *, compress: bool) -> tuple[bytes, bytes]:
    """Return the header and the payload of the frame of a message."""
    if not compress:
        return _header(_TEXT_FRAME, len(text)), text
    compressor = _compressor()
    compressor.set_pledged_input_size(len(text))  # some decoders need the size in the frame
    payload = compressor.compress(text, ZstdCompressor.FLUSH_FRAME)
    return _header(_BINARY_FRAME, len(payload)), payload


def _header(kind: int, size: int) -> bytes:
    """Return the header of a final, unmasked websocket frame (RFC 6455, section 5.2)."""
    if size < _SHORT_FRAME:
        return bytes((kind, size))
    if size < _LONG_FRAME:
        return pack("!BBH", kind, _SHORT_FRAME, size)
    return pack("!BBQ", kind, _SHORT_FRAME + 1, size)


@cache
def _compressor() -> ZstdCompressor:
    return ZstdCompressor(zstd_dict=dictionary())


@cache
def dictionary() -> ZstdDict:
    """Return Jetstream's dictionary, loaded when it is first needed."""
    return ZstdDict(files("indexer.readers.jetstream").joinpath("zstd_dictionary").read_bytes())
