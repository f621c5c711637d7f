"""Hand-written lexicons for the tests."""

import json
from typing import Any

from indexer.atproto.lexicon import Lexicon, parse_lexicon

REVIEW = "com.example.review"
DEFS = "com.example.defs"
LIKE = "app.bsky.feed.like"
AUTHOR = "did:plc:" + "a" * 24
CID = "bafyreidfayvfuwqa7qlnopdjiqrxzs6blmoeu4rujcjtnci5beludirz2a"

LIKE_DOCUMENT: dict[str, Any] = {
    "lexicon": 1,
    "id": LIKE,
    "defs": {
        "main": {
            "type": "record",
            "description": "A like.",
            "key": "tid",
            "record": {
                "type": "object",
                "required": ["subject", "createdAt"],
                "properties": {
                    "subject": {"type": "ref", "ref": "com.atproto.repo.strongRef"},
                    "createdAt": {"type": "string", "format": "datetime", "description": "When it was made."},
                    "via": {"type": "ref", "ref": "com.atproto.repo.strongRef"},
                },
            },
        }
    },
}

REVIEW_DOCUMENT: dict[str, Any] = {
    "lexicon": 1,
    "id": REVIEW,
    "defs": {
        "main": {
            "type": "record",
            "key": "any",
            "record": {
                "type": "object",
                "required": ["title", "stars", "createdAt"],
                "nullable": ["note"],
                "properties": {
                    "title": {"type": "string", "maxLength": 20, "description": "It's the title."},
                    "stars": {"type": "integer", "minimum": 0},
                    "public": {"type": "boolean"},
                    "createdAt": {"type": "string", "format": "datetime"},
                    "tags": {"type": "array", "items": {"type": "string", "maxLength": 10}},
                    "scores": {"type": "array", "items": {"type": "integer"}},
                    "place": {"type": "union", "refs": ["#cafe", "com.example.defs#bar"]},
                    "details": {"type": "object", "properties": {}},
                    "kind": {"type": "ref", "ref": "com.example.defs#kind"},
                    "mystery": {"type": "ref", "ref": "com.elsewhere.defs#unknown"},
                    "subject": {"type": "ref", "ref": "com.atproto.repo.strongRef"},
                    "photo": {"type": "blob", "accept": ["image/*"]},
                    "previous": {"type": "cid-link"},
                    "secret": {"type": "bytes"},
                    "note": {"type": "string"},
                    "uri": {"type": "string", "format": "uri"},
                    "fooBar": {"type": "string"},
                    "foo_bar": {"type": "string"},
                    "a ∧ \"b'": {"type": "string"},
                },
            },
        },
        "cafe": {"type": "object", "properties": {}},
    },
}

DEFS_DOCUMENT: dict[str, Any] = {
    "lexicon": 1,
    "id": DEFS,
    "defs": {"kind": {"type": "string", "knownValues": ["a", "b"]}, "bar": {"type": "object", "properties": {}}},
}

QUERY_DOCUMENT: dict[str, Any] = {"lexicon": 1, "id": "com.example.getReviews", "defs": {"main": {"type": "query"}}}

REVIEW_VALUE: dict[str, Any] = {
    "$type": REVIEW,
    "title": "Grüße",
    "stars": 5,
    "public": True,
    "createdAt": "2024-02-29T12:00:00.5+02:00",
    "tags": ["a", "b"],
    "scores": [1, 2],
    "place": {"$type": "com.example.review#cafe"},
    "details": {"x": 1},
    "kind": "a",
    "mystery": [1],
    "subject": {"uri": f"at://{AUTHOR}/app.bsky.feed.post/1", "cid": CID},
    "photo": {"$type": "blob", "ref": {"$link": CID}, "mimeType": "image/png", "size": 1234},
    "previous": {"$link": CID},
    "secret": {"$bytes": "AQI"},
    "note": None,
    "uri": "https://example.com",
    "fooBar": "1",
    "foo_bar": "2",
    "a ∧ \"b'": "3",
}


def copy_of(document: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a document that a test may change."""
    copied: dict[str, Any] = json.loads(json.dumps(document))
    return copied


def properties_of(document: dict[str, Any]) -> dict[str, Any]:
    """Return the properties of the record, which a test may change."""
    properties: dict[str, Any] = document["defs"]["main"]["record"]["properties"]
    return properties


def sourced(*documents: dict[str, Any]) -> dict[str, tuple[Lexicon, str]]:
    """Return lexicons with a source, by NSID."""
    return {document["id"]: (parse_lexicon(document), "test.json") for document in documents}
