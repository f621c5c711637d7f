"""Events as tap sends them, from entries of the change log and what is stored now.

An event of a record has the present value of the record. If the record was written again since, the value belongs to a
later entry, whose event follows. If it was deleted since, no value is left: the event of the deletion follows.
"""

import re
from collections.abc import Mapping
from typing import Any

import orjson

from indexer.atproto.cid import cid_text
from indexer.db.change_log_reads import LoggedChange, StoredAccount, StoredRecord
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


def record_event(change: LoggedChange, record: StoredRecord | None) -> bytes | None:
    """Return the event of a change of a record, without a value that clients refuse; None if it was deleted since."""
    event: dict[str, Any] = {
        "live": change.live,
        "did": change.did,
        "rev": change.rev or "",
        "collection": change.collection,
        "rkey": change.rkey,
        "action": change.action,
    }
    if change.action != "delete":
        if record is None:
            return None
        event["rev"] = record.rev
        if record.value is not None and is_accepted(orjson.loads(record.value)):
            event["record"] = orjson.Fragment(record.value)
        event["cid"] = cid_text(record.cid)
    return orjson.dumps({"id": change.seq, "type": "record", "record": event})


def identity_event(change: LoggedChange, account: StoredAccount | None) -> bytes | None:
    """Return the event of a change of an account; None if nothing is stored about it, unless it was deleted."""
    if account is None:
        if change.action != "deleted":
            return None
        account = StoredAccount(None, active=False, hosting_status=DELETED, takedown=False)
    status = _status(account)
    event = {
        "did": change.did,
        "handle": account.handle or INVALID_HANDLE,
        "is_active": status == ACTIVE,
        "status": status,
    }
    return orjson.dumps({"id": change.seq, "type": "identity", "identity": event})


def _status(account: StoredAccount) -> str:
    """Return the status as one of `STATUSES`; `deactivated` for other reasons why an account is not active."""
    if account.active:
        return TAKEN_DOWN if account.takedown else ACTIVE
    return account.hosting_status if account.hosting_status in STATUSES - {ACTIVE} else DEACTIVATED


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
