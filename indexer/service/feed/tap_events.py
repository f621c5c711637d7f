"""Events as tap sends them, from entries of the change log and what is stored now.

An event of a record has the present value of the record. If the record was written again since, the value belongs to a
later entry, whose event follows. If it was deleted since, no value is left: the event of the deletion follows.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from indexer.atproto.cid import cid_text, parse_cid
from indexer.sync.feed_delivery import LoggedChange, StoredAccount, StoredRecord
from indexer.sync.repo_state import DELETED
from indexer.sync.stored_identity import INVALID_HANDLE

ACTIVE, TAKEN_DOWN, DEACTIVATED = "active", "takendown", "deactivated"
STATUSES = frozenset({ACTIVE, TAKEN_DOWN, "suspended", DEACTIVATED, DELETED})
"""The statuses that clients of tap accept."""
MAX_INTEGER = 2**53 - 1
"""Clients of tap refuse larger numbers."""

_BLOB_KEYS = frozenset({"$type", "ref", "mimeType", "size"})
_RAW_CID = bytes([1, 0x55, 0x12, 0x20])


def record_event(change: LoggedChange, record: StoredRecord | None) -> bytes | None:
    """Return the event of a change of a record; None if the record was deleted since."""
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
        if record.value is not None and is_data_model(orjson.loads(record.value)):
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


def is_data_model(value: Any) -> bool:
    """Return True if a record value is one of the AT Protocol data model, as strict clients check it.

    The client of tap never acknowledges an event with another value. So such values are left out, as tap does.
    """
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            if not _is_map(item):
                return False
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
        elif isinstance(item, float) or (isinstance(item, int) and abs(item) > MAX_INTEGER):
            return False
    return isinstance(value, dict)


def _is_map(item: Mapping[str, Any]) -> bool:
    if "__proto__" in item:
        return False
    if "$link" in item or "$bytes" in item or "$type" not in item:
        return True  # links and bytes were written from a decoded record, so they are valid
    type_ = item["$type"]
    return _is_blob(item) if type_ == "blob" else isinstance(type_, str) and type_ != ""


def _is_blob(item: Mapping[str, Any]) -> bool:
    size, mime_type, reference = item.get("size"), item.get("mimeType"), item.get("ref")
    return (
        item.keys() <= _BLOB_KEYS
        and isinstance(mime_type, str)
        and "/" in mime_type
        and isinstance(size, int)
        and not isinstance(size, bool)
        and size >= 0
        and isinstance(reference, dict)
        and _is_raw_cid(reference.get("$link"))
    )


def _is_raw_cid(text: Any) -> bool:
    try:
        return isinstance(text, str) and parse_cid(text).startswith(_RAW_CID)
    except ValueError:
        return False
