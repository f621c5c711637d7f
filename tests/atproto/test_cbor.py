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
    SHOWN_BYTES,
    SHOWN_CHARACTERS,
    SHOWN_LEVELS,
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

DASL = (
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
ALLOWED_HERE = {"dag-cbor", "basic"}

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=10) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=6), inner, max_size=5),
    max_leaves=15,
)


def strict(data: bytes) -> bool:
    try:
        decode_canonical(data)
    except CborError:
        return False
    return True


@pytest.mark.parametrize("name", DASL)
def test_the_strict_reader_against_the_published_cases(name: str) -> None:
    cases = json.loads(vectors(f"cbor/dasl-testing/{name}.json").read_text())
    assert cases
    wrong = []
    for case in cases:
        tags = set(case["tags"])
        if not tags & ALLOWED_HERE or case["type"] == "invalid_out":
            continue
        if case["name"] == "negative zero float64":
            continue  # a float like any other, which no commit, node or JSON value may hold here
        if strict(bytes.fromhex(case["data"])) is not (case["type"] == "roundtrip"):
            wrong.append((case["name"], case["type"], case["data"]))
    assert wrong == []


def test_published_dag_cbor_is_read_and_its_negatives_are_not() -> None:
    folder = vectors("cbor/codec-fixtures")
    good = list(folder.glob("fixtures/*/*.dag-cbor"))
    assert len(good) > 50
    foreign = {"cid-QmRgutAxd8t7oGkSm4wmeuByG6M51wcTso6cubDdQtuEfL", "cid-arrayof"}  # CIDs of version 0
    for path in good:
        data = path.read_bytes()
        if path.parent.name not in foreign and not path.parent.name.startswith("dagpb"):
            assert strict(data), path
    bad = [
        case
        for path in folder.glob("negative-fixtures/dag-cbor/decode/*.json")
        for case in json.loads(path.read_text())
        if "dagpb" not in path.name
    ]
    assert bad
    assert [case for case in bad if strict(bytes.fromhex(case["hex"]))] == []


@given(VALUES)
def test_what_is_written_canonically_is_read_by_all_alike(value: Any) -> None:
    data = cbor2.dumps(value, canonical=True)
    if not strict(data):  # cbor2's canonical order of keys is another one
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
def test_a_frame_is_two_objects(count: int) -> None:
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
def test_bombs_and_lies_are_refused(bomb: bytes) -> None:
    for reader in (decode, decode_pair):
        with pytest.raises(CborError):
            reader(bomb)
    explain(bomb)
    explain_frame(bomb)


def test_depth_is_no_matter_for_the_strict_reader() -> None:
    """It keeps no stack; what is deep and no commit, node or header is refused for what it is."""
    assert isinstance(decode_canonical(b"\x81" * 100_000 + b"\x00"), list)


SMALL_STACK = """
import threading
from indexer.atproto.cbor import CborError, decode, decode_pair
def refuse(bomb):
    for reader in (decode, decode_pair):
        try:
            reader(bomb)
        except CborError:
            refused.append(bomb)
refused = []
threading.stack_size(1 << 20)
for bomb in (b"\\x81" * 100_000, b"\\xa1\\x61a" * 50_000):
    thread = threading.Thread(target=refuse, args=(bomb,))
    thread.start()
    thread.join()
print(len(refused))
"""


def test_a_thread_with_little_stack_survives_a_bomb() -> None:
    """In a process of its own, for an overflow would end it."""
    done = subprocess.run([sys.executable, "-c", SMALL_STACK], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "4"), done.stderr


LINK = b"\xd8\x2a"
CID = b"\x01\x71\x12\x20" + bytes(range(32))
NOT_LINKS = [
    LINK + b"\x40",
    LINK + b"\x41\x00",
    LINK + b"\x43\x00\x01\x02",
    LINK + b"\x58\x24" + CID,
    LINK + b"\x58\x23\x00" + CID[2:],  # version 0
    LINK + b"\x58\x24\x00" + CID[:-1],
    LINK + b"\x58\x26\x00" + CID + b"\x00",
    LINK + b"\x58\x86\x00\x01\x71\x13\x81\x01" + bytes(128),
    LINK + b"\x61a",
]


@pytest.mark.parametrize("data", NOT_LINKS)
def test_a_link_holds_a_cid_and_nothing_else(data: bytes) -> None:
    for reader in (decode_canonical, decode_json):
        with pytest.raises(CborError):
            reader(b"\xa1\x61l" + data)


@pytest.mark.parametrize(
    "kind", [b"\x01\x55\x12\x20", b"\x01\x71\x1b\x20", b"\x01\xb0\x01\x12\x20", b"\x01\x55\x00\x05"]
)
def test_a_link_may_be_of_any_kind(kind: bytes) -> None:
    cid = kind + bytes(kind[-1])
    linked = cbor2.dumps(cbor2.CBORTag(42, b"\x00" + cid))
    assert decode_canonical(linked) == cid
    assert list(decode_json(linked)) == ["$link"]


PIECES = st.sampled_from(
    [*NOT_LINKS, LINK, LINK + b"\x58\x25\x00" + CID, b"\x58\x25\x00", CID, b"\x42" + LINK, b"\x82"]
)


@given(st.lists(PIECES | st.binary(max_size=4), max_size=6).map(b"".join))
def test_json_is_made_only_of_what_the_strict_reader_takes(data: bytes) -> None:
    array = b"\x81" + data
    try:
        decode_json(array)
    except CborError:
        return
    assert strict(array)


def test_a_refused_frame_is_told_object_by_object() -> None:
    header = encode({"op": 1, "t": "#commit"})
    assert explain_frame(header + encode([1]) + b"\xff") == (
        "a map with the keys 't', 'op', then a list, "
        "then bytes that are not CBOR (break code encountered where a data item was expected)"
    )
    assert explain_frame(b"") == "nothing"
    assert explain_frame(header * 1_000_000).count("then") == 2


@given(st.binary(max_size=200))
def test_no_bytes_break_a_reader(data: bytes) -> None:
    for reader in (decode, decode_pair, decode_canonical, decode_json, explain, explain_frame):
        with contextlib.suppress(CborError):
            reader(data)


@given(VALUES, st.randoms())
def test_no_change_of_good_bytes_breaks_a_reader(value: Any, source: random.Random) -> None:
    data = bytearray(cbor2.dumps(value, canonical=True))
    data[source.randrange(len(data))] ^= 1 << source.randrange(8)
    for reader in (decode, decode_pair, decode_canonical, decode_json, explain, explain_frame):
        with contextlib.suppress(CborError):
            reader(bytes(data))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xa1\x61a\x18\x01", "CBOR (a map with the keys 'a'), but not strict DAG-CBOR"),
        (b"\xf7", "but not strict DAG-CBOR"),
        (b"\xff\xff", "not CBOR at all"),
        (b"\xa0", ""),
    ],
)
def test_what_is_wrong_is_said_in_words(data: bytes, words: str) -> None:
    assert words in explain(data)
    assert bool(explain(data)) is bool(words)


def test_what_is_shown_of_a_value_is_bounded() -> None:
    value = decode(encode({"bytes": b"\1" * 100, "few": b"\1", "text": "x" * 1_000, "n": [1, None, True, "y"]}))
    assert abridged(value) == {
        "bytes": f"100 bytes: {'01' * SHOWN_BYTES}…",
        "few": "1 bytes: 01",
        "text": "x" * SHOWN_CHARACTERS + "…",
        "n": [1, None, True, "y"],
    }
    deep: Any = decode(b"\x81" * 900 + b"\x80")
    assert json.dumps(abridged(deep), ensure_ascii=False) == "[" * SHOWN_LEVELS + '"…"' + "]" * SHOWN_LEVELS
