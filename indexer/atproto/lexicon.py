"""Read lexicons, and the fields of the records that they describe (docs/sql.md#typed-views).

The reader is strict about what all fields of a record depend on: the version, the identifier, and the form of the
record. A field that it cannot read, for example one of a type of a later version, is named and has the type `ANY`. It
does not check definitions of queries, procedures and other types.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from indexer.atproto.syntax import is_nsid

STRONG_REFERENCE = "com.atproto.repo.strongRef"
MAX_FIELDS = 500
"""Fields of a record. A field has up to three columns, and a view of Postgres at most 1,600."""
UNLIMITED = 2**31 - 1
"""The maximum length of a string without one."""
MAX_REFERENCE_BYTES = 2_048
"""Longer DIDs and AT-URIs are not shown, so that a B-tree can index those that are."""

_LEXICON_VERSION = 1
_MAX_REFERENCES = 16
"""References that are followed from a field to the definition of its type."""
_MAX_SHOWN = 80
_BYTES_OF_FORMAT = {
    "at-identifier": MAX_REFERENCE_BYTES,
    "at-uri": MAX_REFERENCE_BYTES,
    "cid": 256,
    "did": MAX_REFERENCE_BYTES,
    "handle": 253,
    "language": 128,
    "nsid": 317,
    "record-key": 512,
    "tid": 13,
    "uri": 8_192,
}


class FieldKind(StrEnum):
    """The type of a field, as far as its columns depend on it."""

    TEXT = "text"
    BIGINT = "bigint"
    BOOLEAN = "boolean"
    TIMESTAMP = "timestamp"
    TEXT_ARRAY = "text_array"
    ARRAY = "array"
    OBJECT = "object"
    LINK = "link"
    STRONG_REF = "strong_ref"
    BLOB = "blob"
    ANY = "any"


_KINDS = {
    "array": FieldKind.ARRAY,
    "blob": FieldKind.BLOB,
    "boolean": FieldKind.BOOLEAN,
    "cid-link": FieldKind.LINK,
    "integer": FieldKind.BIGINT,
    **dict.fromkeys(("null", "ref"), FieldKind.ANY),
    **dict.fromkeys(("bytes", "object", "record", "union", "unknown"), FieldKind.OBJECT),
    **dict.fromkeys(("string", "token"), FieldKind.TEXT),
}
_MAIN_TYPES = {*_KINDS, "params", "permission", "permission-set", "procedure", "query", "subscription"}
"""All types of definitions: https://atproto.com/specs/lexicon."""


class RecordField(NamedTuple):
    """A field of a record."""

    name: str
    kind: FieldKind  # `ANY` if it is not known, or refers to a definition that is not known
    required: bool
    nullable: bool
    max_bytes: int  # of a string, or of each string of an array
    description: str  # that of the lexicon, or empty


@dataclass(frozen=True, slots=True)
class Lexicon:
    """A lexicon."""

    nsid: str
    text: str  # the whole document as JSON
    defs: Mapping[str, Mapping[str, Any]]  # the definitions by name
    record: Mapping[str, Any] | None  # the object that describes the records; None if there is no record type
    problems: tuple[str, ...] = ()  # the parts that cannot be read, each with the reason


def parse_lexicon(document: Any) -> Lexicon:
    """Return the lexicon in a decoded JSON document.

    Raises:
        ValueError: The document is not a lexicon; the message says why.
    """
    if not isinstance(document, dict) or "lexicon" not in document:
        raise ValueError("it has no field `lexicon`")
    version = document["lexicon"]
    if type(version) is not int or version != _LEXICON_VERSION:
        raise ValueError(f"version {_shown(version)} of the lexicon language is unknown")
    nsid = document.get("id")
    if not isinstance(nsid, str) or not is_nsid(nsid):
        raise ValueError(f"`id` is not an NSID: {_shown(nsid)}")
    defs = document.get("defs")
    if not isinstance(defs, dict) or not defs:
        raise ValueError("`defs` is not an object with definitions")
    if not _has_type(main := defs.get("main", {"type": ""})):
        raise ValueError("`defs.main` is not a definition with a type")
    if main["type"] not in _MAIN_TYPES and "main" in defs:
        raise ValueError(f"the type {_shown(main['type'])} of `defs.main` is unknown")
    typed = {name: definition for name, definition in defs.items() if _has_type(definition)}
    problems = [f"`defs.{_shown(name)}` has no type; it is ignored" for name in defs if name not in typed]
    record = None
    if main["type"] == "record":
        record = _record(main)
        problems += _problems(record)
    return Lexicon(nsid, _text_of(document), typed, record, tuple(problems))


def has_levels(document: Any, levels: int) -> bool:
    """Return True if a decoded JSON document has this many levels of containers."""
    containers = [document]
    for _ in range(levels):
        inner = [one.values() if isinstance(one, dict) else one for one in containers if isinstance(one, dict | list)]
        if not inner:
            return False
        containers = [value for values in inner for value in values]
    return True


def record_fields(lexicon: Lexicon, known: Mapping[str, Lexicon]) -> tuple[RecordField, ...]:
    """Return the fields of a lexicon with a record type, in the order of the document.

    `known` has the lexicons that the fields may refer to, by NSID.
    """
    record = lexicon.record or {}
    required, nullable = _names(record, "required"), _names(record, "nullable")
    fields = []
    for name, schema in _schemas(lexicon).items():
        kind, max_bytes = _type(schema, lexicon.nsid, {**known, lexicon.nsid: lexicon})
        text = schema.get("description")
        description = text if isinstance(text, str) else ""
        fields.append(RecordField(name, kind, name in required, name in nullable, max_bytes, description))
    return tuple(fields)


def references(lexicon: Lexicon, known: Mapping[str, Lexicon]) -> set[str]:
    """Return the NSIDs of the other lexicons that the types of the record's fields depend on, known or not."""
    found, known = set[str](), {**known, lexicon.nsid: lexicon}
    for schema in _schemas(lexicon).values():
        nsid = lexicon.nsid
        for owner, step in _steps(schema, nsid, known):
            found.add(owner)
            nsid, schema = owner, step or {}  # noqa: PLW2901 - the definition of the type
        if isinstance(items := schema.get("items"), dict):
            found.update(owner for owner, _ in _steps(items, nsid, known))
    return found - {lexicon.nsid, STRONG_REFERENCE}


def _record(main: Mapping[str, Any]) -> Mapping[str, Any]:
    record = main.get("record")
    if not isinstance(record, dict) or record.get("type") != "object":
        raise ValueError("`defs.main.record` is not of the type object")
    properties = record.get("properties", {})
    valid = isinstance(properties, dict)
    if not valid:
        raise ValueError("`defs.main.record.properties` is not an object")
    if len(properties) > MAX_FIELDS:
        raise ValueError(f"the record has {len(properties)} fields; at most {MAX_FIELDS} are supported")
    return record


def _problems(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parts of a record type that cannot be read."""
    for name, schema in record.get("properties", {}).items():
        place = f"defs.main.record.properties.{_shown(name)}"
        if problem := _problem(schema, place):
            yield problem
            continue
        if schema["type"] == "array" and (problem := _problem(schema.get("items"), f"{place}.items")):
            yield problem


def _schemas(lexicon: Lexicon) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of the fields by name; an empty one if it cannot be read."""
    properties = (lexicon.record or {}).get("properties", {})
    return {name: {} if _problem(schema, "") else schema for name, schema in properties.items()}


def _names(record: Mapping[str, Any], key: str) -> list[str]:
    names = record.get(key)
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _has_type(definition: Any) -> bool:
    return isinstance(definition, dict) and isinstance(definition.get("type"), str)


def _problem(schema: Any, place: str) -> str | None:
    """Return why the schema of a field cannot be read; None if it can."""
    type_ = schema.get("type") if isinstance(schema, dict) else None
    if not isinstance(type_, str) or type_ not in _KINDS:
        return f"`{place}` has no known type, and is shown as jsonb: {_shown(type_)}"
    if type_ == "ref" and not isinstance(schema.get("ref"), str):
        return f"`{place}.ref` is not a reference, and the field is shown as jsonb"
    return None


def _steps(
    schema: Mapping[str, Any], nsid: str, known: Mapping[str, Lexicon]
) -> Iterator[tuple[str, Mapping[str, Any] | None]]:
    """Yield the lexicon and the schema of each step from a reference to its definition; None: it is not known."""
    for _ in range(_MAX_REFERENCES):
        if schema.get("type") != "ref":
            return
        owner, _, name = str(schema.get("ref")).partition("#")
        nsid = owner or nsid
        found = known[nsid].defs.get(name or "main") if nsid in known else None
        yield nsid, found
        schema = found or {}


def _resolve(schema: Any, nsid: str, known: Mapping[str, Lexicon]) -> tuple[str, Mapping[str, Any]]:
    """Return a schema of the lexicon `nsid`, or the definition that it refers to, with the lexicon of the result.

    The result has no type if the definition is not known.
    """
    schema = schema if isinstance(schema, dict) else {}
    for owner, found in _steps(schema, nsid, known):
        nsid, schema = owner, found or {}
    return nsid, schema if schema.get("type") != "ref" else {}


def _type(schema: Mapping[str, Any], nsid: str, known: Mapping[str, Lexicon]) -> tuple[FieldKind, int]:
    """Return the kind of a field, and the maximum bytes of its strings."""
    if schema.get("type") == "ref" and schema["ref"].removesuffix("#main") == STRONG_REFERENCE:
        return FieldKind.STRONG_REF, UNLIMITED
    nsid, found = _resolve(schema, nsid, known)
    kind = _KINDS.get(found.get("type", ""), FieldKind.ANY)
    if kind is FieldKind.ARRAY:
        _, found = _resolve(found.get("items"), nsid, known)
        kind = FieldKind.TEXT_ARRAY if found.get("type") in ("string", "token") else FieldKind.ARRAY
    elif kind is FieldKind.TEXT and found.get("format") == "datetime":
        kind = FieldKind.TIMESTAMP
    return kind, _max_bytes(found)


def _max_bytes(schema: Mapping[str, Any]) -> int:
    length, format_ = schema.get("maxLength"), schema.get("format")
    limits = [UNLIMITED]
    limits += [length] if type(length) is int and length >= 0 and schema.get("type") == "string" else []
    limits += [_BYTES_OF_FORMAT[format_]] if isinstance(format_, str) and format_ in _BYTES_OF_FORMAT else []
    return min(limits)


def _text_of(document: Any) -> str:
    """Return the document as JSON that Postgres can store.

    Raises:
        ValueError: It has a character, a number or a depth that Postgres cannot store.
    """
    try:
        text = json.dumps(document, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, RecursionError) as error:  # includes UnicodeEncodeError
        raise ValueError(f"it cannot be stored as JSON: {error}") from None
    if "\\u0000" in text:
        raise ValueError("it contains the character U+0000")
    return text


def _shown(value: Any) -> str:
    return repr(value)[:_MAX_SHOWN]
