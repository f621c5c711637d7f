import contextlib
import json
import random
import subprocess
import sys
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.atproto.cbor import (
    MAX_SHOWN_BYTES,
    MAX_SHOWN_CHARACTERS,
    MAX_SHOWN_LEVELS,
    CborError,
    Link,
    abridged,
    decode,
    decode_canonical,
    decode_json,
    decode_pair,
    encode,
    explain,
    explain_frame,
)
from indexer.atproto.cid import cid_of
from tests.vectors import vectors

DASL_FILES = (
    "cid",
    "concat",
    "floats",
    "indefinite",
    "integer_range",
    "map_keys",
    "numeric_reduction",
    "short_form",
    "simple",
    "tags",
    "utf8",
)
APPLICABLE_TAGS = {"dag-cbor", "basic"}

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=10) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=6), inner, max_size=5),
    max_leaves=15,
)


def is_canonical(data: bytes) -> bool:
    try:
        decode_canonical(data)
    except CborError:
        return False
    return True


@pytest.mark.parametrize("name", DASL_FILES)
def test_strict_decoder_accepts_and_rejects_the_published_conformance_cases(name: str) -> None:
    cases = json.loads(vectors(f"cbor/dasl-testing/{name}.json").read_text())
    assert cases
    wrong = []
    for case in cases:
        tags = set(case["tags"])
        if not tags & APPLICABLE_TAGS or case["type"] == "invalid_out":
            continue
        if case["name"] == "negative zero float64":
            continue  # accepted like any other float; `decode_json` rejects all floats
        if is_canonical(bytes.fromhex(case["data"])) is not (case["type"] == "roundtrip"):
            wrong.append((case["name"], case["type"], case["data"]))
    assert wrong == []


def test_strict_decoder_accepts_and_rejects_the_published_codec_fixtures() -> None:
    folder = vectors("cbor/codec-fixtures")
    valid = list(folder.glob("fixtures/*/*.dag-cbor"))
    assert len(valid) > 50
    with_cid_v0 = {"cid-QmRgutAxd8t7oGkSm4wmeuByG6M51wcTso6cubDdQtuEfL", "cid-arrayof"}
    for path in valid:
        data = path.read_bytes()
        if path.parent.name not in with_cid_v0 and not path.parent.name.startswith("dagpb"):
            assert is_canonical(data), path
    invalid = [
        case
        for path in folder.glob("negative-fixtures/dag-cbor/decode/*.json")
        for case in json.loads(path.read_text())
        if "dagpb" not in path.name
    ]
    assert invalid
    assert [case for case in invalid if is_canonical(bytes.fromhex(case["hex"]))] == []


@given(VALUES)
def test_both_decoders_return_the_value_that_another_library_encoded(value: Any) -> None:
    data = cbor2.dumps(value, canonical=True)
    if not is_canonical(data):  # cbor2 sorts the keys of a map in another order
        return
    assert decode(data) == decode_canonical(data) == value


def test_links_and_byte_strings_are_told_apart() -> None:
    cid = cid_of(b"x")
    linked = bytes.fromhex("a1616c d82a5825 00".replace(" ", "")) + cid
    plain = bytes.fromhex("a1616c5824") + cid
    assert decode_canonical(linked) == decode_canonical(plain) == {"l": cid}
    assert isinstance(decode_canonical(linked)["l"], Link)
    assert not isinstance(decode_canonical(plain)["l"], Link)
    assert set(decode_json(linked)["l"]) == {"$link"}
    assert set(decode_json(plain)["l"]) == {"$bytes"}
    assert encode({"l": cid}) == linked


@pytest.mark.parametrize("count", [0, 1, 3])
def test_frame_consists_of_two_objects(count: int) -> None:
    with pytest.raises(CborError):
        decode_pair(b"\xa0" * count)
    assert decode_pair(b"\xa0\xa0") == ({}, {})


BOMBS = [
    b"\x81" * 100_000,
    b"\x81" * 100_000 + b"\x00",
    b"\xa1\x61a" * 50_000,
    b"\xd8\x2a" * 50_000,
    b"\x9b" + b"\xff" * 8,
    b"\xbb" + b"\xff" * 8,
    b"\x5b\x00\x00\x7f" + b"\xff" * 5,
    b"\x7b\x00\x00\x7f" + b"\xff" * 5,
    b"\x9a\x7f\xff\xff\xff" + b"\x80" * 10,
]


@pytest.mark.parametrize("bomb", BOMBS)
def test_deep_nesting_and_false_lengths_are_rejected(bomb: bytes) -> None:
    for decoder in (decode, decode_pair):
        with pytest.raises(CborError):
            decoder(bomb)
    explain(bomb)
    explain_frame(bomb)


def test_strict_decoder_accepts_deep_nesting() -> None:
    """It does not recurse. Callers reject such a value because of its type."""
    assert isinstance(decode_canonical(b"\x81" * 100_000 + b"\x00"), list)


SMALL_STACK = """
import threading
from indexer.atproto.cbor import CborError, decode, decode_pair
def reject(bomb):
    for decoder in (decode, decode_pair):
        try:
            decoder(bomb)
        except CborError:
            rejected.append(bomb)
rejected = []
threading.stack_size(1 << 20)
for bomb in (b"\\x81" * 100_000, b"\\xa1\\x61a" * 50_000):
    thread = threading.Thread(target=reject, args=(bomb,))
    thread.start()
    thread.join()
print(len(rejected))
"""


def test_deep_nesting_is_rejected_in_a_thread_with_a_small_stack() -> None:
    """In a separate process, because a stack overflow would end it."""
    done = subprocess.run([sys.executable, "-c", SMALL_STACK], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "4"), done.stderr


LINK = b"\xd8\x2a"
CID = b"\x01\x71\x12\x20" + bytes(range(32))
NOT_LINKS = [
    LINK + b"\x40",
    LINK + b"\x41\x00",
    LINK + b"\x43\x00\x01\x02",
    LINK + b"\x58\x24" + CID,
    LINK + b"\x58\x23\x00" + CID[2:],  # CIDv0
    LINK + b"\x58\x24\x00" + CID[:-1],
    LINK + b"\x58\x26\x00" + CID + b"\x00",
    LINK + b"\x58\x86\x00\x01\x71\x13\x81\x01" + bytes(128),
    LINK + b"\x61a",
]


@pytest.mark.parametrize("data", NOT_LINKS)
def test_link_without_a_valid_cid_is_rejected(data: bytes) -> None:
    for decoder in (decode_canonical, decode_json):
        with pytest.raises(CborError):
            decoder(b"\xa1\x61l" + data)


@pytest.mark.parametrize(
    "prefix", [b"\x01\x55\x12\x20", b"\x01\x71\x1b\x20", b"\x01\xb0\x01\x12\x20", b"\x01\x55\x00\x05"]
)
def test_link_may_contain_any_form_of_cid_v1(prefix: bytes) -> None:
    cid = prefix + bytes(prefix[-1])
    linked = cbor2.dumps(cbor2.CBORTag(42, b"\x00" + cid))
    assert decode_canonical(linked) == cid
    assert list(decode_json(linked)) == ["$link"]


PIECES = st.sampled_from(
    [*NOT_LINKS, LINK, LINK + b"\x58\x25\x00" + CID, b"\x58\x25\x00", CID, b"\x42" + LINK, b"\x82"]
)


@given(st.lists(PIECES | st.binary(max_size=4), max_size=6).map(b"".join))
def test_json_is_made_only_of_bytes_that_the_strict_decoder_accepts(data: bytes) -> None:
    array = b"\x81" + data
    try:
        decode_json(array)
    except CborError:
        return
    assert is_canonical(array)


def test_rejected_frame_is_explained_object_by_object() -> None:
    header = encode({"op": 1, "t": "#commit"})
    assert explain_frame(header + encode([1]) + b"\xff") == (
        "a map with the keys 't', 'op', then a list, "
        "then bytes that are not CBOR (break code encountered where a data item was expected)"
    )
    assert explain_frame(b"") == "nothing"
    assert explain_frame(header * 1_000_000).count("then") == 2


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_no_other_error(data: bytes) -> None:
    for decoder in (decode, decode_pair, decode_canonical, decode_json, explain, explain_frame):
        with contextlib.suppress(CborError):
            decoder(data)


@given(VALUES, st.randoms())
def test_flipped_bit_raises_no_other_error(value: Any, source: random.Random) -> None:
    data = bytearray(cbor2.dumps(value, canonical=True))
    data[source.randrange(len(data))] ^= 1 << source.randrange(8)
    for decoder in (decode, decode_pair, decode_canonical, decode_json, explain, explain_frame):
        with contextlib.suppress(CborError):
            decoder(bytes(data))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xa1\x61a\x18\x01", "CBOR (a map with the keys 'a'), but not strict DAG-CBOR"),
        (b"\xf7", "but not strict DAG-CBOR"),
        (b"\xff\xff", "not CBOR at all"),
        (b"\xa0", ""),
    ],
)
def test_rejected_bytes_are_explained(data: bytes, words: str) -> None:
    assert words in explain(data)
    assert bool(explain(data)) is bool(words)


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
