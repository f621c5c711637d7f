"""Convert records to AT Protocol JSON that `jsonb` can store (docs/protocol.md#record-json).

Any bytes are accepted: an invalid record keeps its path and its CID, and `problem` says what is unusual about it. If
the JSON does not represent the whole record, its bytes are stored too.
"""

import json
from base64 import b64encode
from typing import Any, NamedTuple

import orjson

from indexer.atproto.cbor import CborError, Link, decode_canonical, decode_json
from indexer.atproto.cid import cid_text
from indexer.atproto.limits import Limits
from indexer.reasons import DescribedEnum

MAX_DEPTH = 250
"""Levels of nesting up to which a record is stored as JSON. orjson fails at 254."""
_RESERVED_KEYS = frozenset({"$link", "$bytes"})


class Problem(DescribedEnum):
    """Why the stored value of a record is null or differs from the record."""

    MISSING = "missing", "The block of the record was not in the export; no value."
    NOT_STORED = "not-stored", "`INDEXER_STORE_VALUES` is off; no value. Only the view reports it."
    NOT_DAG_CBOR = "not-dag-cbor", "The record is not strict DAG-CBOR; no value, the bytes are stored."
    TOO_LARGE = "too-large", "The record exceeds the limit; no value, the bytes are stored."
    TOO_DEEP = "too-deep", "The record is nested deeper than JSON parsers follow; no value, the bytes are stored."
    NUL = "nul-character", "A string contains U+0000, which jsonb cannot hold; no value, the bytes are stored."
    RESERVED_KEY = "reserved-key", "A map looks like a link or bytes in JSON; no value, the bytes are stored."
    NUMBER = "number", "A float, or an integer over 64 bits; the value is as near as JSON gets, the bytes are stored."
    NOT_A_MAP = "not-a-map", "The record is not a map; the value is unchanged."
    NO_TYPE = "no-type", "The record has no `$type`; the value is unchanged."
    OTHER_TYPE = "other-type", "The `$type` is not the collection; the value is unchanged."


class Value(NamedTuple):
    """The value of a record, as it is stored.

    Attributes:
        json: AT Protocol JSON as text; None if JSON or `jsonb` cannot represent the record.
        problem: What is unusual about the record.
        original: The DAG-CBOR of the record, if `json` does not represent all of it.
    """

    json: str | None
    problem: Problem | None
    original: bytes | None


def decode_record(block: bytes, collection: str, limits: Limits) -> Value:
    """Return the value to store for a record of `collection`. No bytes cause an error."""
    if len(block) > limits.record_bytes:
        return Value(None, Problem.TOO_LARGE, block)
    try:
        value = decode_json(block)
        text = orjson.dumps(value).decode()
    except (CborError, TypeError):
        return _decode_unusual(block)
    if "\\u0000" in text and _has_nul(value):
        return Value(None, Problem.NUL, block)
    return Value(text, _shape_problem(value, collection), None)


def _shape_problem(value: Any, collection: str) -> Problem | None:
    if not isinstance(value, dict):
        return Problem.NOT_A_MAP
    type_ = value.get("$type")
    if type_ == collection:
        return None
    return Problem.OTHER_TYPE if isinstance(type_, str) else Problem.NO_TYPE


def _decode_unusual(block: bytes) -> Value:
    """Return the value of a record that the fast decoder or the JSON encoder rejected.

    It contains a float, a reserved key or a large integer, is nested deeply, or is not canonical DAG-CBOR.
    """
    try:
        value = decode_canonical(block)
    except CborError:
        return Value(None, Problem.NOT_DAG_CBOR, block)
    try:
        plain = _to_json(value, 0)
    except _ReservedKeyError:
        return Value(None, Problem.RESERVED_KEY, block)
    except RecursionError:
        return Value(None, Problem.TOO_DEEP, block)
    text = json.dumps(plain, ensure_ascii=False, separators=(",", ":"))
    if "\\u0000" in text and _has_nul(plain):
        return Value(None, Problem.NUL, block)
    return Value(text, Problem.NUMBER, block)


class _ReservedKeyError(Exception):
    pass


def _to_json(value: Any, depth: int) -> Any:
    """Return the value with links and byte strings in their JSON form, as `decode_json` does.

    Raises:
        _ReservedKeyError: A map contains the key of a link or of a byte string.
        RecursionError: The value has more than `MAX_DEPTH` levels.
    """
    if depth > MAX_DEPTH:
        raise RecursionError
    match value:
        case Link():
            return {"$link": cid_text(value)}
        case bytes():
            return {"$bytes": b64encode(value).decode().rstrip("=")}
        case dict():
            if not _RESERVED_KEYS.isdisjoint(value):
                raise _ReservedKeyError
            return {key: _to_json(item, depth + 1) for key, item in value.items()}
        case list():
            return [_to_json(item, depth + 1) for item in value]
        case _:
            return value


def _has_nul(value: Any) -> bool:
    """Return True if a text or a key contains U+0000. The value has at most 254 levels, so recursion is safe."""
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, dict):
        return any("\0" in key or _has_nul(item) for key, item in value.items())
    return isinstance(value, list) and any(map(_has_nul, value))
