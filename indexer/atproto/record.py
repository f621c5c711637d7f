"""Convert records to AT Protocol JSON that `jsonb` can store (docs/protocol.md#record-json).

Any bytes are accepted: an invalid record keeps its path and its CID, and `problem` says what is unusual about it. If
the JSON does not represent the whole record, its bytes are stored too.
"""

import json
from base64 import b64encode
from typing import Any, NamedTuple

from indexer.atproto.cbor import (
    MAX_LEVELS,
    CborError,
    Link,
    count_items,
    decode_canonical,
    decode_json,
    has_unusual_number,
)
from indexer.atproto.cid import cid_text
from indexer.atproto.limits import Limits
from indexer.reasons import DescribedEnum

MIN_ITEMS = 16_384
"""Items that the records of even a small commit or export may have."""
BYTES_PER_ITEM = 4
"""Bytes of a commit or an export for each further item. Posts have about 12 bytes per item."""
UNCOUNTED_BYTES = 1_024
"""A record of at most this size is converted without counting its items."""
UNUSUAL_COST = 4
"""Items that an item of an unusual record counts as: converting it takes longer by this factor."""
_RESERVED_KEYS = frozenset({"$link", "$bytes"})


class Problem(DescribedEnum):
    """Why the stored value of a record is null or differs from the record."""

    MISSING = "missing", "The block of the record was not in the export; no value."
    NOT_STORED = "not-stored", "`INDEXER_STORE_VALUES` is off; no value. Only the view reports it."
    NOT_DAG_CBOR = "not-dag-cbor", "The record is not strict DAG-CBOR; no value, bytes stored."
    TOO_LARGE = "too-large", "The record or its JSON exceeds its limit; no value, bytes stored."
    OMITTED = "omitted", "Many paths name one large block; no value, no bytes for this path."
    TOO_MANY_ITEMS = (
        "too-many-items",
        "The record, its commit or its export has too many items; no value, bytes stored.",
    )
    TOO_DEEP = "too-deep", "The record is nested too deep for JSON parsers; no value, bytes stored."
    NUL = "nul-character", "U+0000, which jsonb cannot hold, is U+FFFD; bytes stored."
    RESERVED_KEY = "reserved-key", "A map would look like a link or bytes in JSON; it is null, bytes stored."
    NUMBER = "number", "A float, or an integer over 64 bits; nearest JSON value, bytes stored."
    NOT_A_MAP = "not-a-map", "The record is not a map; the value is unchanged."
    NO_TYPE = "no-type", "The record has no `$type`; the value is unchanged."
    OTHER_TYPE = "other-type", "The `$type` is not the collection; the value is unchanged."


class Value(NamedTuple):
    """The value of a record, as it is stored."""

    json: str | None  # AT Protocol JSON; None if JSON or `jsonb` cannot represent the record
    problem: Problem | None  # None if the record is ordinary
    original: bytes | None  # the DAG-CBOR of the record, if `json` does not represent all of it


class ConvertedRecord(NamedTuple):
    """A record that the native core has converted. It has no problem except that of its shape."""

    json: str  # AT Protocol JSON, within `Limits.record_json_bytes`
    items: int  # as `count_items` counts them
    problem: Problem | None  # `NOT_A_MAP`, `NO_TYPE`, `OTHER_TYPE` or None


class ItemBudget:
    """The number of items that the records of one commit or export may still have.

    Converting records takes time and memory per item, not per byte.
    """

    def __init__(self, source_bytes: int) -> None:
        self._left = MIN_ITEMS + source_bytes // BYTES_PER_ITEM

    @property
    def left(self) -> int:
        """The number of items that are left."""
        return max(0, self._left)

    def subtract(self, items: int) -> None:
        """Subtract items that were counted elsewhere."""
        self._left -= items

    def spend(self, block: bytes, max_items: int, cost: int, known: int | None = None) -> Problem | None:
        """Count the items of a record, each as `cost`; return why it is not to be converted, or None.

        `known` is the number of its items, if the record was counted before and has at most `MAX_LEVELS` levels.
        """
        allowed = min(max_items, self.left // cost)
        if known is None:
            items, too_deep = count_items(block, allowed, MAX_LEVELS)
        else:
            items, too_deep = min(known, allowed + 1), False
        self._left -= cost * items
        if too_deep:
            return Problem.TOO_DEEP
        return Problem.TOO_MANY_ITEMS if items > allowed else None


def decode_record(
    block: bytes,
    collection: str,
    limits: Limits,
    budget: ItemBudget | None = None,
    converted: ConvertedRecord | None = None,
) -> Value:
    """Return the value to store for a record of `collection`. No bytes cause an error.

    `budget` is that of its commit or export; None if the record is alone. A result of the native core (`converted`) is
    not computed again.
    """
    if len(block) > limits.record_bytes:
        return Value(None, Problem.TOO_LARGE, block)
    budget = budget or ItemBudget(len(block))
    known = converted.items if converted else None
    if len(block) > UNCOUNTED_BYTES and (problem := budget.spend(block, limits.record_items, 1, known)):
        return Value(None, problem, block)
    if converted is not None:
        return Value(converted.json, converted.problem, None)
    decoded, problem = decode_json(block), None
    if decoded is None:
        if too_many := budget.spend(block, limits.record_items, UNUSUAL_COST):
            return Value(None, too_many, block)
        try:
            value, encoded, problem = _decode_unusual(block)
        except CborError:
            return Value(None, Problem.NOT_DAG_CBOR, block)
    else:
        value, encoded = decoded
    if len(encoded) > limits.record_json_bytes:
        return Value(None, Problem.TOO_LARGE, block)
    text = encoded.decode()
    if (replaced := _without_nul(text)) != text:
        return Value(replaced, problem if problem is Problem.RESERVED_KEY else Problem.NUL, block)
    if problem is not None:
        return Value(text, problem, block)
    return Value(text, _shape_problem(value, collection), None)


def _shape_problem(value: Any, collection: str) -> Problem | None:
    if not isinstance(value, dict):
        return Problem.NOT_A_MAP
    type_ = value.get("$type")
    if type_ == collection:
        return None
    return Problem.OTHER_TYPE if isinstance(type_, str) else Problem.NO_TYPE


def _decode_unusual(block: bytes) -> tuple[Any, bytes, Problem | None]:
    """Return the value and the JSON of a record that `decode_json` leaves to the strict decoder, and its problem."""
    value, problem = decode_canonical(block), None
    if has_unusual_number(value):
        problem = Problem.NUMBER
    if (stripped := _without_reserved_keys(value)) != value:
        value, problem = stripped, Problem.RESERVED_KEY
    text = json.dumps(value, ensure_ascii=False, check_circular=False, separators=(",", ":"), default=_bytes_to_json)
    return value, text.encode(), problem


def _bytes_to_json(value: bytes) -> dict[str, str]:
    """Return the JSON form of a link or a byte string, as `decode_json` does."""
    if isinstance(value, Link):
        return {"$link": cid_text(value)}
    return {"$bytes": b64encode(value).decode().rstrip("=")}


def _without_reserved_keys(value: Any) -> Any:
    """Return the value with null in place of the maps that would look like a link or a byte string in JSON.

    The value has at most `MAX_LEVELS` levels.
    """
    if isinstance(value, dict):
        if not _RESERVED_KEYS.isdisjoint(value):
            return None
        return {key: _without_reserved_keys(member) for key, member in value.items()}
    return [_without_reserved_keys(item) for item in value] if isinstance(value, list) else value


def _without_nul(text: str) -> str:
    """Return JSON with U+FFFD in place of U+0000 in texts and keys. It contains no unescaped U+0001."""
    if "\\u0000" not in text:
        return text
    return text.replace("\\\\", "\1").replace("\\u0000", "\\ufffd").replace("\1", "\\\\")
