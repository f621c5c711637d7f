"""Events as tap sends them."""

import re
from collections.abc import Mapping
from typing import Any

import orjson

from indexer.atproto.cid import cid_text
from indexer.db.change_log_reads import LoggedChange, StoredAccount
from indexer.readers.events import FeedEvent, event_of
from indexer.sync.identity import INVALID_HANDLE
from indexer.sync.repo import DELETED

ACTIVE, TAKEN_DOWN, DEACTIVATED = "active", "takendown", "deactivated"
STATUSES = frozenset({ACTIVE, TAKEN_DOWN, "suspended", DEACTIVATED, DELETED})
"""The statuses that clients of tap accept."""
MAX_INTEGER = 2**53 - 1
"""Clients of tap refuse larger numbers."""
MAX_CID_CHARACTERS = 128
"""`@atproto/lex-data` refuses longer CIDs since 0.1.8."""
MAX_KEY_BYTES = 8_192
"""Tap itself (`atdata` in indigo) leaves out values with longer keys."""
MAX_LEVELS = 32
"""Levels of an event that the guide to data validation recommends (https://atproto.com/guides/data-validation)."""

_LEVELS_OF_VALUE = MAX_LEVELS - 2  # the event and its field `record` are around it
_SPECIAL_KEYS = frozenset({"$link", "$bytes"})
_BLOB_KEYS = frozenset({"$type", "ref", "mimeType", "size"})
_RAW_CID = re.compile("bafk[q-z2-7]").match  # the first bytes of any CIDv1 with the codec raw, 01 55, in base32


def account_event(change: LoggedChange, account: StoredAccount | None) -> FeedEvent | None:
    """Return the event of a change of an account with its present state.

    None if it is not tracked, unless it was deleted.
    """
    is_tracked = account is not None and account.tracked
    if not is_tracked and change.action != DELETED:
        return None
    return event_of(change._replace(action="identity") if is_tracked else change, None, account)


def encode(event: FeedEvent) -> bytes:
    """Return the JSON of an event, without a value of a record that clients refuse."""
    change = event.change
    if event.kind != "commit":
        status = ACTIVE if event.active else event.status if event.status in STATUSES - {ACTIVE} else DEACTIVATED
        handle = event.handle or INVALID_HANDLE
        identity = {"did": change.did, "handle": handle, "is_active": event.active, "status": status}
        return orjson.dumps({"id": change.seq, "type": "identity", "identity": identity})
    body: dict[str, Any] = {
        "live": change.live,
        "did": change.did,
        "rev": event.rev,
        "collection": change.collection,
        "rkey": change.rkey,
        "action": change.action,
    }
    if (record := event.record) is not None:
        if record.value is not None and is_accepted(orjson.loads(record.value)):
            body["record"] = orjson.Fragment(record.value)
        body["cid"] = cid_text(record.cid)
    return orjson.dumps({"id": change.seq, "type": "record", "record": body})


def is_accepted(value: Any) -> bool:
    """Return True if strict clients accept this value of a record.

    The client of tap never acknowledges an event that it refuses. So the value is left out, as tap does.
    """
    return isinstance(value, dict) and _SPECIAL_KEYS.isdisjoint(value) and _is_accepted(value, 1)


def _is_accepted(item: Any, level: int) -> bool:
    """Return True if strict clients accept a part of a value, at this level of it."""
    if isinstance(item, int):
        return abs(item) <= MAX_INTEGER
    if not isinstance(item, dict | list):
        return not isinstance(item, float)
    if level > _LEVELS_OF_VALUE or (isinstance(item, dict) and not _is_accepted_map(item)):
        return False
    return all(_is_accepted(child, level + 1) for child in (item.values() if isinstance(item, dict) else item))


def _is_accepted_map(item: Mapping[str, Any]) -> bool:
    if "__proto__" in item or any(len(key.encode()) > MAX_KEY_BYTES for key in item):
        return False
    if "$link" in item:  # links and bytes were written from a decoded record, so they are valid
        return len(item["$link"]) <= MAX_CID_CHARACTERS
    type_ = item.get("$type", "none")
    return _is_blob(item) if type_ == "blob" else isinstance(type_, str) and type_ != ""


def _is_blob(item: Mapping[str, Any]) -> bool:
    size, mime_type, reference = item.get("size"), item.get("mimeType"), item.get("ref")
    return (
        item.keys() == _BLOB_KEYS
        and isinstance(mime_type, str)
        and "/" in mime_type
        and isinstance(size, int)
        and not isinstance(size, bool)
        and 0 <= size <= MAX_INTEGER
        and isinstance(reference, dict)
        and _RAW_CID(str(reference.get("$link"))) is not None
    )
