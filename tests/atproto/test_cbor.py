"""The decoders of DAG-CBOR, on published cases and on what another library encodes."""

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
    CborError,
    Link,
    count_items,
    decode,
    decode_canonical,
    decode_json,
    decode_pair,
    encode,
    explain,
    explain_frame,
)
from indexer.atproto.cid import cid_of, cid_text
from indexer.atproto.strict_cbor import decode_strict
from tests.atproto.generated_cbor import CID, LINK, NOT_LINKS
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


def json_bytes(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


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
    assert decode_json(linked) == ({"l": cid}, json_bytes({"l": {"$link": cid_text(cid)}}))
    assert decode_json(plain) is None
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


def test_diagnosis_of_a_rejected_frame_compiles_no_regular_expression() -> None:
    """One of 10 kB takes a minute."""
    frame = cbor2.dumps(cbor2.CBORTag(35, "(?i)[ -\uffff]"))
    assert explain_frame(frame) == "a str"
    assert explain(frame).startswith("CBOR (a str), but not strict DAG-CBOR")


def test_strict_decoder_accepts_deep_nesting() -> None:
    """It does not recurse then. Callers reject such a value because of its type."""
    assert isinstance(decode_canonical(b"\x81" * 100_000 + b"\x00"), list)


SMALL_STACK = """
import threading
from indexer.atproto.cbor import CborError, decode, decode_canonical, decode_json, decode_pair
def reject(bomb):
    for decoder in (decode, decode_pair):
        try:
            decoder(bomb)
        except CborError:
            rejected.append(bomb)
def accept(nested):
    decode_json(nested + b"\\xfb" + bytes(8))
    accepted.append(type(decode_canonical(nested + b"\\x00")))
def in_thread(target, argument):
    thread = threading.Thread(target=target, args=(argument,))
    thread.start()
    thread.join()
rejected, accepted = [], []
threading.stack_size(1 << 20)
for level in (b"\\x81", b"\\xa1\\x61a"):
    in_thread(reject, level * 50_000)
    for levels in (400, 900, 990, 50_000):
        in_thread(accept, level * levels)
print(len(rejected), len(accepted))
"""


def test_error_says_only_what_is_wrong() -> None:
    with pytest.raises(CborError) as caught:
        decode(b"\xd8\x2b\x01")
    assert str(caught.value) == "Non-42 tags are not supported"


def test_deep_nesting_does_not_overflow_the_small_stack_of_a_thread() -> None:
    """In a separate process, because a stack overflow would end it."""
    done = subprocess.run([sys.executable, "-c", SMALL_STACK], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "4 8"), done.stderr


@pytest.mark.parametrize(
    "value",
    [
        *(number + step for number in (0, 24, 1 << 8, 1 << 16, 1 << 32, 1 << 63) for step in (-1, 0, 1)),
        *(-1 - number for number in (23, 24, 255, 256, 65_535, 65_536, (1 << 32) - 1, 1 << 32, (1 << 64) - 1)),
        (1 << 64) - 1,
        [1, [2, [], 3], {}, 4],
        {"b": {"a": [1], "c": {}}, "d": {"": 1, "a": -2}},
        [None, True, False, 1.5, -0.0, "", "text", b"", b"bytes"],
    ],
)
def test_strict_decoder_returns_the_value_that_another_library_encoded(value: Any) -> None:
    data = cbor2.dumps(value, canonical=True) if not isinstance(value, list) else cbor2.dumps(value)
    assert decode_strict(data, Link) == value
    assert decode_canonical(data) == value


def test_strict_decoder_makes_links_of_their_cids() -> None:
    link = decode_strict(b"\x81" + LINK + b"\x58\x25\x00" + CID, Link)[0]
    assert isinstance(link, Link)
    assert link == CID


def test_strict_decoder_names_the_byte_after_which_the_data_ends() -> None:
    for data, last in ((b"", 0), (b"\x82\x01", 2), (b"\x63ab", 3), (b"\x19\x01", 2)):
        with pytest.raises(ValueError, match=f"the data ends after byte {last}, inside an object"):
            decode_strict(data, Link)


@pytest.mark.parametrize(
    ("data", "items", "levels"),
    [
        (b"\x01", 1, 0),
        (b"\x18\x20", 1, 0),
        (b"\x1b" + bytes(7) + b"\x01", 1, 0),
        (b"\x63abc", 1, 0),
        (b"\x58\x03abc", 1, 0),
        (b"\xf6", 1, 0),
        (b"\x80", 1, 0),
        (b"\xa0", 1, 0),
        (b"\x82\x01\x02", 3, 1),
        (b"\xa2\x61a\x01\x61b\x02", 5, 1),
        (b"\xd8\x2a\x43\x00\x01\x02", 2, 0),
        (b"\x83\xd8\x2a\x40\x01\x02", 5, 1),
        (b"\x82\x81\x81\x81\x01\x02", 6, 4),
        (b"\xa1\x61a\x82\x01\xa1\x61b\x80", 7, 3),
    ],
)
def test_items_of_the_first_objects_are_counted(data: bytes, items: int, levels: int) -> None:
    rest = b"\x01\x02\x81\x03"
    assert count_items(data + rest, 100, levels) == (items, False)
    assert count_items(data + rest, 100, levels, objects=2) == (items + 1, False)
    assert count_items(data * 3, 100, levels, objects=3) == (3 * items, False)
    assert count_items(data + rest, items, levels) == (items, False)
    if items > 1:
        assert count_items(data, items - 2, levels) == (items - 1, False)
    if levels:
        assert count_items(data + rest, 100, levels - 1)[1]


@pytest.mark.parametrize(
    ("data", "items"),
    [(b"", 0), (b"\x1c", 1), (b"\x5f", 1), (b"\xff", 1), (b"\x82", 1), (b"\x82\x01", 2), (b"\x19", 1), (b"\x63a", 1)],
)
def test_counting_ends_at_bytes_that_no_decoder_accepts(data: bytes, items: int) -> None:
    assert count_items(data, 100, 8) == (items, False)


@pytest.mark.parametrize("data", NOT_LINKS)
def test_link_without_a_valid_cid_is_rejected(data: bytes) -> None:
    with pytest.raises(CborError):
        decode_canonical(b"\xa1\x61l" + data)
    assert decode_json(b"\xa1\x61l" + data) is None


@pytest.mark.parametrize(
    "prefix", [b"\x01\x55\x12\x20", b"\x01\x71\x1b\x20", b"\x01\xb0\x01\x12\x20", b"\x01\x55\x00\x05"]
)
def test_link_may_contain_any_form_of_cid_v1(prefix: bytes) -> None:
    cid = prefix + bytes(prefix[-1])
    linked = cbor2.dumps(cbor2.CBORTag(42, b"\x00" + cid))
    assert type(decode_canonical(linked)) is Link
    assert decode_canonical(linked) == cid
    assert decode_json(linked) == (cid, json_bytes({"$link": cid_text(cid)}))


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


def test_byte_strings_have_their_json_form_and_need_no_other_decoder() -> None:
    data = cbor2.dumps({"a": b"\x00\x00\x17\x00\x00\x17"})
    assert decode_json(data) == ({"a": b"\x00\x00\x17\x00\x00\x17"}, b'{"a":{"$bytes":"AAAXAAAX"}}')


def test_smallest_link_is_a_link() -> None:
    smallest = b"\x01\x55\x00\x00"
    value = decode_canonical(b"\xa1\x61a\xd8\x2a\x45\x00" + smallest)
    assert isinstance(value["a"], Link)
    assert value["a"] == smallest
