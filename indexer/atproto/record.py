"""A record's bytes as AT Protocol JSON that Postgres can hold, losing nothing (spec §6.2, §6.5).

One bad record never spoils others: whatever the bytes are, the record keeps its path and CID, and `problem` says
what is unusual about it. Where `json` doesn't hold all of it, `original` keeps the bytes.
"""

import json
from base64 import b32encode, b64encode
from enum import StrEnum
from typing import Any, NamedTuple

import orjson

from indexer.atproto.cbor import CborError, Link, decode_canonical, decode_json
from indexer.atproto.limits import Limits


class Problem(StrEnum):
    """What is unusual about a record's value."""

    MISSING = "missing"  # its block was not in the export
    NOT_STORED = "not-stored"  # values are not kept here (`INDEXER_STORE_VALUES`): said by the view alone, for no value
    NOT_DAG_CBOR = "not-dag-cbor"  # not strict DAG-CBOR: no JSON, the bytes are kept
    TOO_LARGE = "too-large"  # over the limit: no JSON, the bytes are kept
    TOO_DEEP = "too-deep"  # nested deeper than JSON readers follow: no JSON, the bytes are kept
    NUL = "nul-character"  # U+0000 in a text, which jsonb can't hold: no JSON, the bytes are kept
    RESERVED_KEY = "reserved-key"  # a map that JSON would take for a link or bytes: no JSON, the bytes are kept
    NUMBER = "number"  # a float, or an integer over 64 bits: JSON as near as it gets, and the bytes are kept
    NOT_A_MAP = "not-a-map"  # JSON as it is
    NO_TYPE = "no-type"  # a map without a `$type`: JSON as it is
    OTHER_TYPE = "other-type"  # its `$type` is not its collection: JSON as it is


class Value(NamedTuple):
    """`json` is AT Protocol JSON text or None, `original` the record's DAG-CBOR where it has to be kept."""

    json: str | None
    problem: Problem | None
    original: bytes | None


def decode_record(block: bytes, collection: str, limits: Limits) -> Value:
    """The value to store for a record of `collection`. Never raises for any bytes."""
    if len(block) > limits.record_bytes:
        return Value(None, Problem.TOO_LARGE, block)
    try:
        value = decode_json(block)
        text = orjson.dumps(value).decode()
    except (CborError, TypeError):
        return _unusual(block)
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


def _unusual(block: bytes) -> Value:
    """What the fast decoder or the JSON writer refused: floats, reserved keys, huge integers, depth, bad bytes."""
    try:
        value = decode_canonical(block)
    except CborError:
        return Value(None, Problem.NOT_DAG_CBOR, block)
    try:
        plain = _plain(value, 0)
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


def _plain(value: Any, depth: int) -> Any:
    """Links and byte strings in their JSON form, as the fast decoder gives them."""
    if depth > _DEPTH:
        raise RecursionError
    match value:
        case Link():
            return {"$link": "b" + b32encode(value).decode().rstrip("=").lower()}
        case bytes():
            return {"$bytes": b64encode(value).decode().rstrip("=")}
        case dict():
            if not _RESERVED.isdisjoint(value):
                raise _ReservedKeyError
            return {key: _plain(item, depth + 1) for key, item in value.items()}
        case list():
            return [_plain(item, depth + 1) for item in value]
        case _:
            return value


def _has_nul(value: Any) -> bool:
    """Whether any text or key holds U+0000; `value` is no deeper than JSON writers follow."""
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, dict):
        return any("\0" in key or _has_nul(item) for key, item in value.items())
    return isinstance(value, list) and any(map(_has_nul, value))


_DEPTH = 250  # orjson gives up at 254
_RESERVED = frozenset({"$link", "$bytes"})
