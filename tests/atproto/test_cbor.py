import contextlib
import json
import random
import subprocess
import sys
from base64 import b64encode
from functools import partial
from itertools import count
from typing import Any

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.atproto.cbor import (
    MAX_SHOWN_BYTES,
    MAX_SHOWN_CHARACTERS,
    MAX_SHOWN_LEVELS,
    CborError,
    Link,
    abridged,
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
from tests.atproto import dag_cbor_oracle as oracle
from tests.atproto.dag_cbor_oracle import Cid, Pairs
from tests.profiles import scaled
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
    LINK + b"\x78\x25\x00" + CID,
    b"\xd8\x2b\x58\x25\x00" + CID,
]


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


PIECES = st.sampled_from(
    [*NOT_LINKS, LINK, LINK + b"\x58\x25\x00" + CID, b"\x58\x25\x00", CID, b"\x42" + LINK, b"\x82"]
)


CIDS = st.builds(
    lambda prefix, data: Cid(prefix + data),
    st.sampled_from([b"\1\x71\x12\x20", b"\1\x55\x12\x20"]),
    st.binary(min_size=32, max_size=32),
) | st.builds(
    lambda prefix, data: Cid(prefix + bytes([len(data)]) + data),
    st.sampled_from([b"\1\x55\0", b"\1\xb0\1\x13", b"\1\x71\x81\0", b"\0\x71\x12", b"\x12"]),
    st.binary(max_size=70),
)
KEYS = st.text(max_size=3) | st.sampled_from(["$link", "$bytes", "$type"])
ITEMS = st.recursive(
    st.sampled_from([None, False, True, 0, 23, 24, 255, 256, 2**63, 2**64 - 1, -(2**63), -(2**63) - 1, -(2**64)])
    | st.floats(allow_nan=True)
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | CIDS
    | CIDS.map(lambda cid: cid.data),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.lists(st.tuples(KEYS | inner, inner), max_size=3).map(lambda pairs: Pairs(tuple(pairs)))
    ),
    max_leaves=8,
)


@st.composite
def encodings(draw: st.DrawFn) -> bytes:
    """Draw CBOR that may break one of the rules: long numbers, unsorted or repeated keys, changed bytes."""
    wide = draw(st.none() | st.integers(0, 10))  # the number that is longer than necessary
    numbers = count()
    size = draw(st.sampled_from([1, 2, 4, 8]))
    data = oracle.encode(draw(ITEMS), lambda _: size if next(numbers) == wide else 0)
    match draw(st.sampled_from(["unchanged", "unchanged", "flip", "cut", "append"])):
        case "flip":
            at = draw(st.integers(0, len(data) - 1))
            return data[:at] + bytes([data[at] ^ 1 << draw(st.integers(0, 7))]) + data[at + 1 :]
        case "cut":
            return data[: draw(st.integers(0, len(data)))]
        case "append":
            return data + draw(st.binary(max_size=3))
    return data


DATA = encodings() | st.lists(PIECES | st.binary(max_size=4), max_size=6).map(lambda parts: b"\x81" + b"".join(parts))


def with_types(value: Any) -> Any:
    """Return a value in which 1, 1.0 and True, and links and byte strings, are different."""
    match value:
        case dict():
            return {key: with_types(inner) for key, inner in value.items()}
        case list():
            return [with_types(inner) for inner in value]
        case Cid():
            return ("Link", value.data)
        case Link():
            return ("Link", bytes(value))
        case _:
            return (type(value).__name__, repr(value))


def expected(data: bytes) -> Any:
    """Return the value according to the oracle; a `ValueError` if the bytes are not canonical."""
    try:
        return oracle.canonical_value(data)
    except ValueError as error:
        return error


@settings(max_examples=scaled(500))
@given(DATA)
def test_strict_decoders_accept_what_the_oracle_accepts_and_return_its_value(data: bytes) -> None:
    value = expected(data)
    for decoder in (decode_canonical, partial(decode_strict, make_link=Link)):
        if isinstance(value, ValueError):
            with pytest.raises(ValueError, match=r"\w"):
                decoder(data)
        else:
            assert with_types(decoder(data)) == with_types(value)


def obvious_json(value: Any) -> Any:
    """Return AT Protocol JSON; raise a `ValueError` for a value that `decode_json` leaves to `decode_canonical`."""
    match value:
        case dict():
            if {"$link", "$bytes"} & set(value):
                raise ValueError
            return {key: obvious_json(inner) for key, inner in value.items()}
        case list():
            return [obvious_json(inner) for inner in value]
        case Cid():
            return {"$link": cid_text(value.data)}
        case bytes():
            return {"$bytes": b64encode(value).decode().rstrip("=")}
        case float():
            raise ValueError
        case int() if value < -(2**63):
            raise ValueError
    return value


@settings(max_examples=scaled(500))
@given(DATA)
def test_json_is_that_of_the_value_of_the_oracle(data: bytes) -> None:
    value, found = expected(data), decode_json(data)
    if found is None:
        return
    assert not isinstance(value, ValueError)
    assert json.loads(found[1]) == obvious_json(value)


@given(ITEMS.filter(lambda item: not isinstance(item, Pairs)))
def test_json_is_returned_for_every_ordinary_object(item: Any) -> None:
    data = oracle.encode(item)
    value = expected(data)
    if isinstance(value, ValueError) or has_unusual_bytes(value):
        return
    with contextlib.suppress(ValueError):
        wanted = obvious_json(value)
        found = decode_json(data)
        assert found is not None
        assert json.loads(found[1]) == wanted


def has_unusual_bytes(value: Any) -> bool:
    """Return True if the value contains a byte string that could be a CID, or a link to a long digest."""
    match value:
        case dict():
            return any(map(has_unusual_bytes, value.values()))
        case list():
            return any(map(has_unusual_bytes, value))
        case Cid():
            return len(value.data) > 64
    return isinstance(value, bytes) and len(value) > 3


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
        (
            b"\xa1\x61a\x18\x01",
            "not strict DAG-CBOR: the number before byte 5 is not in its shortest form",
        ),
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
    shown: Any = {"a": 1}
    for _ in range(MAX_SHOWN_LEVELS - 1):
        shown = {"a": shown}
    assert abridged(shown) == shown
    assert json.dumps(abridged({"a": shown}), ensure_ascii=False).count("…") == 1
    exact = {"text": "x" * MAX_SHOWN_CHARACTERS}
    assert abridged(exact) == exact


def test_links_are_abridged_to_their_text() -> None:
    assert abridged(decode(encode({"a": cid_of(b"")}))) == {"a": {"$link": cid_text(cid_of(b""))}}


def test_byte_strings_have_their_json_form_and_need_no_other_decoder() -> None:
    data = cbor2.dumps({"a": b"\x00\x00\x17\x00\x00\x17"})
    assert decode_json(data) == ({"a": b"\x00\x00\x17\x00\x00\x17"}, b'{"a":{"$bytes":"AAAXAAAX"}}')


def test_smallest_link_is_a_link() -> None:
    smallest = b"\x01\x55\x00\x00"
    value = decode_canonical(b"\xa1\x61a\xd8\x2a\x45\x00" + smallest)
    assert isinstance(value["a"], Link)
    assert value["a"] == smallest
