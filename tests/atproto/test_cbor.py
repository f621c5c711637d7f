"""The decoders of DAG-CBOR, on published cases and on what another library encodes."""

import contextlib
import json
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
    count_items,
    decode,
    decode_canonical,
    decode_json,
    decode_pair,
    encode,
)
from indexer.atproto.cid import cid_of, cid_text
from tests.atproto.generated_cbor import DATA, NOT_LINKS


def json_bytes(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def test_links_and_byte_strings_are_told_apart() -> None:
    cid = cid_of(b"x")
    linked = bytes.fromhex("a1616c d82a5825 00".replace(" ", "")) + cid
    plain = bytes.fromhex("a1616c5824") + cid
    assert decode_canonical(linked) == decode_canonical(plain) == {"l": cid}
    assert isinstance(decode_canonical(linked)["l"], Link)
    assert not isinstance(decode_canonical(plain)["l"], Link)
    assert decode_json(linked) == ({"l": cid}, json_bytes({"l": {"$link": cid_text(cid)}}))
    assert decode_json(plain) is None
    value = b"\x00\x00\x17" * 2
    assert decode_json(b"\x46" + value) == (value, b'{"$bytes":"AAAXAAAX"}')
    assert encode({"l": cid}) == linked


def test_frame_consists_of_two_objects() -> None:
    assert decode_pair(b"\xa0\xa0") == ({}, {})
    for count in (0, 1, 3):
        with pytest.raises(CborError):
            decode_pair(b"\xa0" * count)


def test_error_says_what_is_wrong() -> None:
    with pytest.raises(CborError) as caught:
        decode(b"\xd8\x2b\x01")
    assert str(caught.value) == "Non-42 tags are not supported"
    for data, last in ((b"", 0), (b"\x82\x01", 2), (b"\x63ab", 3), (b"\x19\x01", 2)):
        with pytest.raises(ValueError, match=f"the data ends after byte {last}, inside an object"):
            decode_canonical(data)


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
    try:
        decode_canonical(nested + b"\\x00")
    except CborError:
        too_deep.append(nested)
    else:
        accepted.append(nested)
def in_thread(target, argument):
    thread = threading.Thread(target=target, args=(argument,))
    thread.start()
    thread.join()
rejected, accepted, too_deep = [], [], []
threading.stack_size(1 << 20)
for level in (b"\\x81", b"\\xa1\\x61a"):
    in_thread(reject, level * 50_000)
    for levels in (249, 250, 251, 990, 50_000):
        in_thread(accept, level * levels)
print(len(rejected), len(accepted), len(too_deep))
"""


def test_deep_nesting_does_not_overflow_the_small_stack_of_a_thread() -> None:
    """In a separate process, because a stack overflow would end it."""
    done = subprocess.run([sys.executable, "-c", SMALL_STACK], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "4 4 6"), done.stderr


@pytest.mark.parametrize(
    "value",
    [
        [number + step for number in (0, 24, 1 << 8, 1 << 16, 1 << 32, 1 << 63) for step in (-1, 0, 1)],
        [-1 - number for number in (23, 24, 255, 256, 65_535, 65_536, (1 << 32) - 1, 1 << 32, (1 << 64) - 1)],
        [(1 << 64) - 1, [1, [2, [], 3], {}, 4], {"b": {"a": [1], "c": {}}, "d": {"": 1, "a": -2}}],
        [None, True, False, 1.5, -0.0, "", "text", b"", b"bytes"],
    ],
)
def test_strict_decoder_returns_the_values_that_another_library_encoded(value: list[Any]) -> None:
    assert decode_canonical(cbor2.dumps(value)) == value


@pytest.mark.parametrize(
    ("text", "items", "levels"),
    [
        *[(text, 1, 0) for text in ("01", "1820", "1b0000000000000001", "63616263", "5803616263", "f6", "80", "a0")],
        ("820102", 3, 1),
        ("a2616101616202", 5, 1),
        ("d82a43000102", 2, 0),
        ("83d82a400102", 5, 1),
        ("828181810102", 6, 4),
        ("a161618201a1616280", 7, 3),
    ],
)
def test_items_of_the_first_objects_are_counted(text: str, items: int, levels: int) -> None:
    data, rest = bytes.fromhex(text), b"\x01\x02\x81\x03"
    assert count_items(data + rest, 100, levels) == (items, False)
    assert count_items(data + rest, 100, levels, objects=2) == (items + 1, False)
    assert count_items(data * 3, 100, levels, objects=3) == (3 * items, False)
    assert count_items(data + rest, items, levels) == (items, False)
    if items > 1:
        assert count_items(data, items - 2, levels) == (items - 1, False)
    if levels:
        assert count_items(data + rest, 100, levels - 1)[1]


def test_counting_ends_at_bytes_that_no_decoder_accepts() -> None:
    for text, items in (("", 0), ("1c", 1), ("5f", 1), ("ff", 1), ("82", 1), ("8201", 2), ("19", 1), ("6361", 1)):
        assert count_items(bytes.fromhex(text), 100, 8) == (items, False), text


@pytest.mark.parametrize("data", NOT_LINKS)
def test_link_without_a_valid_cid_is_rejected(data: bytes) -> None:
    with pytest.raises(CborError):
        decode_canonical(b"\xa1\x61l" + data)
    assert decode_json(b"\xa1\x61l" + data) is None


@pytest.mark.parametrize("prefix", ["01551220", "01711b20", "01b0011220", "01550005", "01550000"])
def test_link_may_contain_any_form_of_cid_v1(prefix: str) -> None:
    cid = bytes.fromhex(prefix) + bytes(int(prefix[-2:], 16))
    linked = cbor2.dumps(cbor2.CBORTag(42, b"\x00" + cid))
    assert type(decode_canonical(linked)) is Link
    assert decode_canonical(linked) == cid
    assert decode_json(linked) == (cid, json_bytes({"$link": cid_text(cid)}))


@given(DATA | st.binary(max_size=200))
def test_arbitrary_bytes_raise_no_other_error(data: bytes) -> None:
    for decoder in (decode, decode_pair, decode_canonical, decode_json):
        with contextlib.suppress(CborError):
            decoder(data)


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
