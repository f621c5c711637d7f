"""Words for CBOR: why bytes are rejected, and values in short."""

import json
from typing import Any

from indexer.atproto.cbor import (
    MAX_SHOWN_BYTES,
    MAX_SHOWN_CHARACTERS,
    MAX_SHOWN_LEVELS,
    abridged,
    decode,
    encode,
    explain,
    explain_frame,
)
from indexer.atproto.cid import cid_of, cid_text


def test_rejected_frame_is_explained_object_by_object() -> None:
    header = encode({"op": 1, "t": "#commit"})
    assert explain_frame(header + encode([1]) + b"\xff") == (
        "a map with the keys 't', 'op', then a list, "
        "then bytes that are not CBOR (break code encountered where a data item was expected)"
    )
    assert explain_frame(b"") == "nothing"
    assert explain_frame(header * 1_000_000).count("then") == 2


def test_rejected_bytes_are_explained() -> None:
    words = "not strict DAG-CBOR: the number before byte 5 is not in its shortest form"
    assert words in explain(b"\xa1\x61a\x18\x01")
    assert "but not strict DAG-CBOR" in explain(b"\xf7")
    assert "not CBOR at all" in explain(b"\xff\xff")
    assert explain(b"\xa0") == ""


def test_abridged_value_is_bounded() -> None:
    value = decode(encode({"bytes": b"\1" * 100, "few": b"\1", "text": "x" * 1_000, "n": [1, None, True, "y"]}))
    assert abridged(value) == {
        "bytes": f"100 bytes: {'01' * MAX_SHOWN_BYTES}…",
        "few": "1 bytes: 01",
        "text": "x" * MAX_SHOWN_CHARACTERS + "…",
        "n": [1, None, True, "y"],
    }
    deep: Any = decode(b"\x81" * 900 + b"\x80")
    assert json.dumps(abridged(deep), ensure_ascii=False) == "[" * MAX_SHOWN_LEVELS + '"…"' + "]" * MAX_SHOWN_LEVELS
    shown: Any = {"a": 1}
    for _ in range(MAX_SHOWN_LEVELS - 1):
        shown = {"a": shown}
    assert abridged(shown) == shown
    assert json.dumps(abridged({"a": shown}), ensure_ascii=False).count("…") == 1
    exact = {"text": "x" * MAX_SHOWN_CHARACTERS}
    assert abridged(exact) == exact


def test_links_are_abridged_to_their_text() -> None:
    assert abridged(decode(encode({"a": cid_of(b"")}))) == {"a": {"$link": cid_text(cid_of(b""))}}
