"""Jetstream's JSON events from entries of the change log, serialized once for all subscribers.

An event is stored as a complete websocket frame: a server does not mask its frames, so they are equal for everybody.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, cached_property
from importlib.resources import files
from struct import pack
from time import monotonic
from typing import Any, NamedTuple

import orjson
from backports.zstd import ZstdCompressor, ZstdDict

from indexer.atproto.cid import cid_text
from indexer.atproto.syntax import CollectionFilter
from indexer.db.change_log_reads import FeedPage, LoggedBatch, LoggedChange, StoredAccount, StoredRecord
from indexer.sync.changes import RecordKey
from indexer.sync.repo import DELETED, OUT_OF_SCOPE

_TEXT_FRAME, _BINARY_FRAME = 0x81, 0x82
_SHORT_FRAME, _LONG_FRAME = 126, 1 << 16
_UNKNOWN_ACCOUNT = StoredAccount(active=False, hosting_status=None, takedown=False, handle=None)


class LogPosition(NamedTuple):
    """A position in the change log, with what maps the numbers of changes to times.

    The time of a change is the time of its batch plus its place in the batch, in microseconds. COMMIT makes the times
    of batches so that no two changes have the same time, and that a later change has a later one.

    Attributes:
        seq: The number of the last change before the position.
        batch_seq: The number of the first change in the batch of that change.
        batch_time: The time of that batch, in microseconds since the Unix epoch.
    """

    seq: int
    batch_seq: int = 0
    batch_time: int = -1

    def after(self, change: LoggedChange) -> "LogPosition":
        """Return the position after the next change."""
        if change.batch_time == self.batch_time:
            return self._replace(seq=change.seq)
        return LogPosition(change.seq, change.seq, change.batch_time)

    @property
    def time_us(self) -> int:
        """The time of the last change before the position, in microseconds since the Unix epoch."""
        return self.batch_time + self.seq - self.batch_seq


def position_before(cursor: int, batch: LoggedBatch) -> LogPosition:
    """Return the position from which a subscriber with this cursor gets the changes at its time and later.

    Args:
        cursor: Microseconds since the Unix epoch.
        batch: The last batch that was committed at this time or earlier.
    """
    passed = min(cursor - batch.time, batch.size)
    return LogPosition(batch.first_seq + passed - 1, batch.first_seq, batch.time)


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Selects the events that a subscriber receives.

    Attributes:
        collections: The collections of commit events; None selects all. Other events have no collection.
        dids: The accounts; an empty set selects all.
        max_bytes: Events with longer JSON are left out; 0 means no limit.
        live_only: Leave out differences that a resync found.
    """

    collections: CollectionFilter | None = None
    dids: frozenset[str] = frozenset()
    max_bytes: int = 0
    live_only: bool = False

    def selects(self, change: LoggedChange) -> bool:
        """Return True if the event of a change is sent, unless it is too long."""
        return (
            (not self.dids or change.did in self.dids)
            and (self.collections is None or change.collection is None or self.collections.matches(change.collection))
            and (change.live or not self.live_only)
        )

    @property
    def selects_all(self) -> bool:
        """True if no event is left out."""
        return self == ALL_EVENTS


ALL_EVENTS = EventFilter()


class Frames(NamedTuple):
    """Consecutive websocket frames.

    Attributes:
        data: The frames.
        ends: Where each of them ends in `data`.
        sizes: The sizes of their payloads.
    """

    data: bytes
    ends: Sequence[int]
    sizes: Sequence[int]


class EventChunk:
    """The events of consecutive entries of the change log. An entry may have no event.

    Attributes:
        before: The number of the last change before the chunk.
        end: The position after the chunk.
        size: The bytes of all frames.
        made_at: When it was made, in monotonic seconds.
        skipped: The entries, if none of them was wanted, so that they were read without their events.
    """

    def __init__(
        self,
        before: int,
        end: LogPosition,
        changes: Sequence[LoggedChange],
        messages: Sequence[bytes],
        skipped: Sequence[LoggedChange] = (),
    ) -> None:
        self.before = before
        self.end = end
        self.skipped = skipped
        self._changes = changes
        self._plain = _frames(_TEXT_FRAME, messages)
        self.size = len(self._plain.data)
        self.made_at = monotonic()

    @property
    def erased(self) -> set[RecordKey]:
        """The records that were deleted here, but not in their repos: redacted, hidden, erased, or out of scope."""
        return {_key(change) for change in self._changes if change.action == "delete" and change.rev is None}

    def names(self, records: AbstractSet[RecordKey]) -> bool:
        """Return True if an event is about one of the records."""
        return any(_key(change) in records for change in self._changes)

    @cached_property
    def _compressed(self) -> Frames:
        """The same frames with compressed payloads, made when a subscriber first asks for them."""
        compressor = ZstdCompressor(zstd_dict=_dictionary())
        data, ends, sizes = self._plain
        messages = [data[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        return _frames(_BINARY_FRAME, [_compress(compressor, message) for message in messages])

    def select(self, events: EventFilter, after: int, *, compress: bool) -> tuple[bytes, int]:
        """Return the frames of the events that the filter selects, without changes up to `after`, and their number."""
        frames = self._compressed if compress else self._plain
        if events.selects_all and after <= self.before:
            return frames.data, len(frames.ends)
        max_bytes = events.max_bytes or len(frames.data)
        parts, start = [], 0
        for change, end, size in zip(self._changes, frames.ends, frames.sizes, strict=True):
            if size <= max_bytes and change.seq > after and events.selects(change):
                parts.append(frames.data[start:end])
            start = end
        return b"".join(parts), len(parts)


def _key(change: LoggedChange) -> RecordKey:
    return change.did, change.collection or "", change.rkey or ""


def encode_page(start: LogPosition, page: FeedPage) -> EventChunk:
    """Return the events of a page that follows the position `start`; none if the page was skipped."""
    position, changes, messages = start, [], []
    for number, change in enumerate(page.changes):
        position = position.after(change)
        if page.skipped:
            continue
        event = _event(change, position.time_us, page.values.get(number), page.accounts)
        if event is not None:
            changes.append(change)
            messages.append(orjson.dumps(event))
    return EventChunk(start.seq, position, changes, messages, page.changes if page.skipped else ())


def _event(
    change: LoggedChange, time_us: int, stored: StoredRecord | None, accounts: Mapping[str, StoredAccount]
) -> dict[str, Any] | None:
    """Return the event of an entry; None if it has none."""
    event: dict[str, Any] = {"did": change.did, "time_us": time_us, "kind": "commit"}
    match change.action:
        case "create" | "update":
            if stored is None or stored.value is None:
                return None
            event["commit"] = {
                "rev": stored.rev,
                "operation": change.action,
                "collection": change.collection,
                "rkey": change.rkey,
                "record": orjson.Fragment(stored.value),
                "cid": cid_text(stored.cid),
            }
        case "delete":
            event["commit"] = {
                "rev": change.rev or "",
                "operation": "delete",
                "collection": change.collection,
                "rkey": change.rkey,
            }
        case "visible" if change.did not in accounts:
            return None  # only its row was removed: such an account is inactive upstream
        case "visible" | "hidden" | "deleted" | "moved" | "identity":
            state = accounts.get(change.did, _UNKNOWN_ACCOUNT)
            # An entry `identity` of a hidden account says that it has another hosting status.
            shown = change.action == "moved" or (change.action == "identity" and state.visible)
            event["kind"] = kind = "identity" if shown else "account"
            event[kind] = _identity(change, time_us, state) if shown else _account(change, time_us, state)
        case _:
            return None
    return event


def _account(change: LoggedChange, time_us: int, state: StoredAccount) -> dict[str, Any]:
    account: dict[str, Any] = {"active": change.action == "visible", "did": change.did, "seq": change.seq}
    if change.action == "deleted":
        account["status"] = DELETED
    elif change.action != "visible" and state.takedown:
        account["status"] = "takendown"
    elif change.action != "visible" and not state.active and state.hosting_status not in {None, OUT_OF_SCOPE}:
        account["status"] = state.hosting_status
    return account | {"time": _time_text(time_us)}


def _identity(change: LoggedChange, time_us: int, state: StoredAccount) -> dict[str, Any]:
    handle = {"handle": state.handle} if state.handle else {}
    return {"did": change.did, **handle, "seq": change.seq, "time": _time_text(time_us)}


def _time_text(time_us: int) -> str:
    seconds, micros = divmod(time_us, 1_000_000)
    return datetime.fromtimestamp(seconds, UTC).strftime(f"%Y-%m-%dT%H:%M:%S.{micros // 1000:03}Z")


def _frames(kind: int, messages: Sequence[bytes]) -> Frames:
    parts: list[bytes] = []
    ends, end = [], 0
    for message in messages:
        header = _header(kind, len(message))
        parts += (header, message)
        end += len(header) + len(message)
        ends.append(end)
    return Frames(b"".join(parts), ends, [len(message) for message in messages])


def _header(kind: int, size: int) -> bytes:
    """Return the header of a final, unmasked websocket frame (RFC 6455, section 5.2)."""
    if size < _SHORT_FRAME:
        return bytes((kind, size))
    if size < _LONG_FRAME:
        return pack("!BBH", kind, _SHORT_FRAME, size)
    return pack("!BBQ", kind, _SHORT_FRAME + 1, size)


def _compress(compressor: ZstdCompressor, message: bytes) -> bytes:
    compressor.set_pledged_input_size(len(message))  # some decoders need the size in the frame
    return compressor.compress(message, ZstdCompressor.FLUSH_FRAME)


@cache
def _dictionary() -> ZstdDict:
    """Return Jetstream's dictionary, loaded when it is first needed."""
    return ZstdDict(files("indexer.readers.jetstream").joinpath("zstd_dictionary").read_bytes())
