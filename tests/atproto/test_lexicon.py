import re
from typing import Any

import pytest

from indexer.atproto.lexicon import MAX_FIELDS, UNLIMITED, FieldKind, Lexicon, parse_lexicon, record_fields, references
from tests.lexicons.published import published_documents
from tests.lexicons.samples import (
    DEFS,
    DEFS_DOCUMENT,
    LIKE,
    LIKE_DOCUMENT,
    QUERY_DOCUMENT,
    REVIEW_DOCUMENT,
    copy_of,
    properties_of,
)


def with_field(schema: Any, **changes: Any) -> dict[str, Any]:
    document = copy_of(LIKE_DOCUMENT)
    document["defs"]["main"]["record"] |= {"properties": {"field": schema}, **changes}
    return document


def kind_of(schema: Any, *others: dict[str, Any]) -> tuple[FieldKind, int]:
    known = {document["id"]: parse_lexicon(document) for document in others}
    document = with_field(schema)
    document["defs"] |= {
        "loop": {"type": "ref", "ref": "#loop", "format": "cid"},
        "list": {"type": "array", "items": {"type": ["x"]}},
    }
    [field] = record_fields(parse_lexicon(document), known)
    return field.kind, field.max_bytes


INVALID: list[tuple[str, Any]] = [
    ("has no field `lexicon`", {"id": LIKE, "defs": {}}),
    ("it has no field `lexicon`", []),
    ("version 2 of the lexicon language", LIKE_DOCUMENT | {"lexicon": 2}),
    ("version True of", LIKE_DOCUMENT | {"lexicon": True}),
    ("`id` is not an NSID: 'one-two'", LIKE_DOCUMENT | {"id": "one-two"}),
    ("`id` is not an NSID: None", {"lexicon": 1, "defs": {"main": {"type": "record"}}}),
    ("`defs` is not an object with definitions", LIKE_DOCUMENT | {"defs": {}}),
    ("`defs.main` is not a definition with a type", LIKE_DOCUMENT | {"defs": {"main": {"type": 1}}}),
    ("the type 'records' of `defs.main` is unknown", LIKE_DOCUMENT | {"defs": {"main": {"type": "records"}}}),
    ("`defs.main.record` is not of the type object", LIKE_DOCUMENT | {"defs": {"main": {"type": "record"}}}),
    ("has 501 fields; at most 500", with_field(None, properties={f"f{n}": {"type": "integer"} for n in range(501)})),
    ("contains the character U+0000", LIKE_DOCUMENT | {"description": "\0"}),
    ("cannot be stored as JSON: 'utf-8' codec", LIKE_DOCUMENT | {"description": "\ud800"}),
    ("cannot be stored as JSON: Out of range", LIKE_DOCUMENT | {"number": float("nan")}),
]


@pytest.mark.parametrize(("problem", "document"), INVALID)
def test_document_that_is_no_lexicon_is_rejected_with_the_reason(problem: str, document: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        parse_lexicon(document)


ODD: list[tuple[str, FieldKind, dict[str, Any]]] = [
    ("properties.'field'` has no known type, and is shown as jsonb: 'text'", FieldKind.ANY, {"type": "text"}),
    ("properties.'field'` has no known type, and is shown as jsonb: ['x']", FieldKind.ANY, {"type": ["x"]}),
    ("properties.'field'.items` has no known type", FieldKind.ARRAY, {"type": "array"}),
    ("properties.'field'.ref` is not a reference", FieldKind.ANY, {"type": "ref"}),
    ("", FieldKind.TEXT, {"type": "string", "maxLength": -1}),
    ("", FieldKind.TEXT_ARRAY, {"type": "array", "items": {"type": "string"}, "maxLength": "1"}),
]


@pytest.mark.parametrize(("problem", "kind", "schema"), ODD)
def test_odd_field_of_a_lexicon_is_named_and_the_others_are_used(
    problem: str, kind: FieldKind, schema: dict[str, Any]
) -> None:
    lexicon = parse_lexicon(with_field(schema, properties={"field": schema, "text": {"type": "string"}}))
    assert [(field.name, field.kind) for field in record_fields(lexicon, {})] == [
        ("field", kind),
        ("text", FieldKind.TEXT),
    ]
    assert len(lexicon.problems) == bool(problem)
    assert problem in "".join(lexicon.problems)
    assert references(lexicon, {}) == set()


def test_odd_lists_of_names_and_definitions_are_ignored() -> None:
    document = with_field({"type": "string"}, required="field", nullable=[1, "field"])
    document["defs"] |= {"odd": {"type": 1}, "none": None}
    lexicon = parse_lexicon(document)
    [field] = record_fields(lexicon, {})
    assert (field.required, field.nullable) == (False, True)
    assert [problem.partition(" ")[0] for problem in lexicon.problems] == ["`defs.'odd'`", "`defs.'none'`"]
    assert parse_lexicon(LIKE_DOCUMENT).problems == ()


def test_lexicon_without_a_record_type_has_no_record() -> None:
    assert parse_lexicon(QUERY_DOCUMENT).record is None
    assert parse_lexicon(DEFS_DOCUMENT).record is None
    assert parse_lexicon(LIKE_DOCUMENT).record is not None


def test_fields_are_in_the_order_of_the_document() -> None:
    fields = record_fields(parse_lexicon(REVIEW_DOCUMENT), {DEFS: parse_lexicon(DEFS_DOCUMENT)})
    assert [field.name for field in fields] == list(properties_of(REVIEW_DOCUMENT))
    assert [field.name for field in fields if field.required] == ["title", "stars", "createdAt"]
    assert [field.name for field in fields if field.nullable] == ["note"]
    assert fields[0].description == "It's the title."


STRONG_REF = "com.atproto.repo.strongRef"
OTHER: dict[str, Any] = {
    "lexicon": 1,
    "id": "com.other.defs",
    "defs": {
        "main": {"type": "object"},
        "names": {"type": "array", "items": {"type": "ref", "ref": "#name"}},
        "name": {"type": "string", "maxLength": 5},
        "sign": {"type": "token"},
        "loop": {"type": "ref", "ref": "#loop"},
        "odd": {"type": "new-type"},
    },
}


@pytest.mark.parametrize(
    ("schema", "kind", "max_bytes"),
    [
        ({"type": "string"}, FieldKind.TEXT, UNLIMITED),
        ({"type": "string", "maxLength": 0}, FieldKind.TEXT, 0),
        ({"type": "string", "maxLength": 1}, FieldKind.TEXT, 1),
        ({"type": "string", "maxLength": 10**12}, FieldKind.TEXT, UNLIMITED),
        ({"type": "string", "format": "at-uri"}, FieldKind.TEXT, 2_048),
        ({"type": "string", "format": "did", "maxLength": 100}, FieldKind.TEXT, 100),
        ({"type": "string", "format": "datetime"}, FieldKind.TIMESTAMP, UNLIMITED),
        ({"type": "array", "items": {"type": "string", "maxLength": 64}}, FieldKind.TEXT_ARRAY, 64),
        ({"type": "array", "items": {"type": "integer"}}, FieldKind.ARRAY, UNLIMITED),
        ({"type": "array", "items": {"type": "token"}}, FieldKind.TEXT_ARRAY, UNLIMITED),
        ({"type": "ref", "ref": STRONG_REF}, FieldKind.STRONG_REF, UNLIMITED),
        ({"type": "ref", "ref": f"{STRONG_REF}#main"}, FieldKind.STRONG_REF, UNLIMITED),
        ({"type": "ref", "ref": "com.other.defs"}, FieldKind.OBJECT, UNLIMITED),
        ({"type": "ref", "ref": "com.other.defs#names"}, FieldKind.TEXT_ARRAY, 5),
        ({"type": "ref", "ref": "com.other.defs#name"}, FieldKind.TEXT, 5),
        ({"type": "ref", "ref": "com.other.defs#sign"}, FieldKind.TEXT, UNLIMITED),
        ({"type": "ref", "ref": "com.other.defs#loop"}, FieldKind.ANY, UNLIMITED),
        ({"type": "ref", "ref": "com.other.defs#odd"}, FieldKind.ANY, UNLIMITED),
        ({"type": "ref", "ref": "com.other.defs#none"}, FieldKind.ANY, UNLIMITED),
        ({"type": "ref", "ref": "com.unknown.defs#none"}, FieldKind.ANY, UNLIMITED),
        ({"type": "ref", "ref": "#none"}, FieldKind.ANY, UNLIMITED),
        ({"type": "ref", "ref": "#loop"}, FieldKind.ANY, UNLIMITED),
        ({"type": "ref", "ref": "#list"}, FieldKind.ARRAY, UNLIMITED),
        ({"type": "union", "refs": []}, FieldKind.OBJECT, UNLIMITED),
        ({"type": "blob"}, FieldKind.BLOB, UNLIMITED),
        ({"type": "cid-link"}, FieldKind.LINK, UNLIMITED),
    ],
)
def test_kind_and_maximum_length_of_a_field(schema: Any, kind: FieldKind, max_bytes: int) -> None:
    assert kind_of(schema, OTHER) == (kind, max_bytes)


def test_record_may_have_no_properties_and_no_lists_of_names() -> None:
    document = copy_of(LIKE_DOCUMENT)
    document["defs"]["main"]["record"] = {"type": "object"}
    empty = parse_lexicon(document)
    assert (record_fields(empty, {}), references(empty, {})) == ((), set())
    document["defs"]["main"]["record"] = {
        "type": "object",
        "properties": {f"f{n}": {"type": "integer", "description": n} for n in range(MAX_FIELDS)},
    }
    fields = record_fields(parse_lexicon(document), {})
    assert len(fields) == MAX_FIELDS
    assert fields[7] == ("f7", FieldKind.BIGINT, False, False, UNLIMITED, "")


def test_references_are_those_that_types_depend_on() -> None:
    def of(schema: Any, *others: Lexicon) -> set[str]:
        return references(parse_lexicon(with_field(schema)), {one.nsid: one for one in others})

    assert of({"type": "ref", "ref": STRONG_REF}) == set()
    assert of({"type": "ref", "ref": "#local"}) == set()
    assert of({"type": "union", "refs": ["com.other.defs"]}) == set()
    assert of({"type": "string", "items": 20}) == set(), "only the items of an array are checked"
    assert of({"type": "array", "items": {"type": "ref", "ref": "com.other.defs#name"}}) == {"com.other.defs"}
    chain = OTHER | {"id": "com.more.defs", "defs": {"a": {"type": "ref", "ref": "com.other.defs#names"}}}
    known = parse_lexicon(chain), parse_lexicon(OTHER)
    assert of({"type": "ref", "ref": "com.more.defs#a"}, *known) == {"com.more.defs", "com.other.defs"}


@pytest.mark.proof("clients")  # the published lexicons need npm
def test_every_type_in_published_lexicons_is_known() -> None:
    known = {nsid: parse_lexicon(document) for nsid, document in published_documents().items()}
    kinds = [field.kind for lexicon in known.values() for field in record_fields(lexicon, known)]
    assert len(kinds) > 50
    assert FieldKind.ANY not in kinds
