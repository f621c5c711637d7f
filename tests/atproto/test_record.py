import json
import struct
from base64 import b32decode, b64decode, b64encode
from typing import Any
from unittest.mock import patch

import asyncpg
import cbor2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from indexer.atproto.cbor import count_items
from indexer.atproto.cid import RAW, cid_text
from indexer.atproto.limits import DEFAULT_LIMITS, Limits
from indexer.atproto.record import (
    MIN_ITEMS,
    UNCOUNTED_BYTES,
    ConvertedRecord,
    ItemBudget,
    Problem,
    Value,
    decode_record,
)
from indexer.demo import dag_cbor

NSID = "com.example.thing"


def decode(value: Any) -> Value:
    block = value if isinstance(value, bytes) else dag_cbor.encode(value)
    return decode_record(block, NSID, DEFAULT_LIMITS)


NOT_DAG_CBOR = f"ff a1616118 a161611801 a1616161ff a1616163eda080 a10102 fb7ff8{bytes(6).hex()} a1616cd82a43000102"


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        (b"", Problem.NOT_DAG_CBOR),
        *[(bytes.fromhex(text), Problem.NOT_DAG_CBOR) for text in NOT_DAG_CBOR.split()],
        (b"\xa1\x61l\xd8\x2a\x58\x23\x00\x12\x20" + bytes(32), Problem.NOT_DAG_CBOR),
        (b"\x81" * 300 + b"\x00", Problem.TOO_DEEP),
        (b"\x81" * 100_000 + b"\x00", Problem.TOO_DEEP),
    ],
)
def test_record_that_json_or_jsonb_cannot_represent_keeps_its_bytes(block: bytes, problem: Problem) -> None:
    assert decode(block) == (None, problem, block)


@pytest.mark.parametrize(
    ("value", "found", "problem"),
    [
        ({"text": "a\0b", "more": 1}, {"text": "a\ufffdb", "more": 1}, Problem.NUL),
        (
            {"a\0b": 1, "deep": [{"x": ["\\\0\\u0000"]}]},
            {"a\ufffdb": 1, "deep": [{"x": ["\\\ufffd\\u0000"]}]},
            Problem.NUL,
        ),
        ({"a": {"$link": "b"}, "more": [{"$bytes": 1}, 2]}, {"a": None, "more": [None, 2]}, Problem.RESERVED_KEY),
        ({"a": {"$link": "b", "c": 1}, "text": "\0"}, {"a": None, "text": "\ufffd"}, Problem.RESERVED_KEY),
    ],
)
def test_odd_part_of_a_record_hides_nothing_beside_it(value: Any, found: Any, problem: Problem) -> None:
    block = dag_cbor.encode({"$type": NSID, **value})
    decoded = decode(block)
    assert (decoded.problem, decoded.original) == (problem, block)
    assert json.loads(decoded.json or "") == {"$type": NSID, **found}
    assert decode(b"\xa1\x65$link\x01") == ("null", Problem.RESERVED_KEY, b"\xa1\x65$link\x01")


@pytest.mark.parametrize("number", [b"\xfb\x3f\xf8" + bytes(6), b"\xfb\x80" + bytes(7), b"\x3b" + b"\xff" * 8])
def test_number_outside_the_data_model_is_stored_with_its_bytes(number: bytes) -> None:
    block = b"\xa1\x61n" + number
    value = decode(block)
    assert (value.problem, value.original) == (Problem.NUMBER, block)
    assert value.json is not None
    assert json.loads(value.json)["n"] == cbor2.loads(number)


def test_record_of_an_unexpected_type_keeps_its_value() -> None:
    usual: list[Any] = [{"$type": NSID, **more} for more in ({}, {"text": "\\u0000"}, {"n": [2**63 - 1, -(2**63)]})]
    for problem, values in {
        None: usual,
        Problem.NO_TYPE: [{}, {"$type": 7}],
        Problem.OTHER_TYPE: [{"$type": "com.example.other"}],
        Problem.NOT_A_MAP: [[1], "text", None],
    }.items():
        for value in values:
            decoded = decode(value)
            assert (decoded.problem, decoded.original) == (problem, None)
            assert decoded.json is not None
            assert json.loads(decoded.json) == value


@pytest.mark.parametrize("last", [b"\x00", b"\xfb\x3f\xf8" + bytes(6)])
def test_record_whose_json_exceeds_the_limit_keeps_its_bytes(last: bytes) -> None:
    block = b"\x82\x79\x03\xe8" + b"\x01" * 1_000 + last
    assert len(decode_record(block, NSID, Limits(record_json_bytes=6_010)).json or "") > 6_000
    assert decode_record(block, NSID, Limits(record_json_bytes=6_000)) == (None, Problem.TOO_LARGE, block)


def test_record_with_too_many_items_or_levels_keeps_its_bytes_and_is_not_decoded() -> None:
    flat, deep = b"\x9a\x00\x0f\x42\x40" + b"\x40" * 1_000_000, b"\x84" + (b"\x81" * 251 + b"\x00") * 4 + bytes(500)
    with patch("indexer.atproto.record.decode_json", side_effect=AssertionError("decoded")):
        assert decode(flat) == (None, Problem.TOO_MANY_ITEMS, flat)
        assert decode(deep) == (None, Problem.TOO_DEEP, deep)


def test_empty_container_is_no_level() -> None:
    for empty in (b"\x80", b"\xa0"):
        block = b"\x82\xfb\x3f\xf8" + bytes(6) + b"\x81" * 249 + empty
        assert decode(block).problem is Problem.NUMBER


def test_items_of_one_commit_have_a_common_limit() -> None:
    block = dag_cbor.encode(["x"] * 4_000)
    budget = ItemBudget(0)
    problems = [decode_record(block, NSID, DEFAULT_LIMITS, budget).problem for _ in range(6)]
    assert problems == [Problem.NOT_A_MAP] * 4 + [Problem.TOO_MANY_ITEMS] * 2
    unusual = b"\x82\xfb\x3f\xf8" + bytes(6) + dag_cbor.encode(["x"] * 900)
    budget = ItemBudget(0)
    problems = [decode_record(unusual, NSID, DEFAULT_LIMITS, budget).problem for _ in range(6)]
    assert problems == [Problem.NUMBER] * 3 + [Problem.TOO_MANY_ITEMS] * 3


def test_budget_may_be_spent_to_the_last_item() -> None:
    """Items that were counted before are spent up to one more than allowed."""
    budget = ItemBudget(0)
    for known, problem, left in (
        (10, None, MIN_ITEMS - 10),
        (11, Problem.TOO_MANY_ITEMS, MIN_ITEMS - 21),
        (5_000, Problem.TOO_MANY_ITEMS, MIN_ITEMS - 32),
    ):
        assert budget.spend(b"", 10, 1, known) is problem
        assert budget.left == left
    budget = ItemBudget(8)
    budget.subtract(MIN_ITEMS)
    budget.subtract(1)
    for left, problem in ((1, None), (0, Problem.TOO_MANY_ITEMS)):
        assert budget.left == left
        assert budget.spend(b"\x01", 100, 1) is problem
        assert budget.left == 0


def test_items_of_small_records_are_not_counted() -> None:
    budget = ItemBudget(0)
    budget.subtract(MIN_ITEMS)
    largest = dag_cbor.encode(["x" * (UNCOUNTED_BYTES - 4)])
    assert len(largest) == UNCOUNTED_BYTES
    assert decode_record(largest, NSID, DEFAULT_LIMITS, budget).problem is Problem.NOT_A_MAP
    larger = dag_cbor.encode(["x" * (UNCOUNTED_BYTES - 3)])
    assert decode_record(larger, NSID, DEFAULT_LIMITS, budget).problem is Problem.TOO_MANY_ITEMS


def test_record_that_was_converted_before_counts_and_is_not_converted_again() -> None:
    block = dag_cbor.encode({"$type": NSID, "text": "x" * 2_000})
    budget = ItemBudget(0)
    value = decode_record(block, NSID, DEFAULT_LIMITS, budget, ConvertedRecord("{}", 7, Problem.NO_TYPE))
    assert value == Value("{}", Problem.NO_TYPE, None)
    assert budget.left == MIN_ITEMS - 7


def test_record_of_the_maximum_size_is_converted() -> None:
    block = dag_cbor.encode({"$type": NSID, "text": "x" * 100})
    value = decode_record(block, NSID, Limits(record_bytes=len(block)))
    assert value.json is not None
    size = len(value.json)
    assert decode_record(block, NSID, Limits(record_json_bytes=size)) == value
    assert decode_record(block, NSID, Limits(record_bytes=len(block) - 1)) == (None, Problem.TOO_LARGE, block)
    assert decode_record(block, NSID, Limits(record_json_bytes=size - 1)) == (None, Problem.TOO_LARGE, block)


LINK = RAW + bytes(32)


def unusual(**fields: Any) -> bytes:
    """Return a record with a byte string that is a CID, which is left to the strict decoder."""
    return cbor2.dumps({"b": LINK, **fields}, canonical=True)


def test_unusual_record_has_the_same_json_as_others() -> None:
    block = unusual(l=cbor2.CBORTag(42, b"\0" + LINK), s=b"\x00\x00\x17", p=b"\x00", t="é")
    link, data = cid_text(LINK), b64encode(LINK).decode()
    text = (
        f'{{"b":{{"$bytes":"{data}"}},"l":{{"$link":"{link}"}},"p":{{"$bytes":"AA"}},"s":{{"$bytes":"AAAX"}},"t":"é"}}'
    )
    assert decode(block) == (text, Problem.NO_TYPE, None)
    for limit, value in (
        (len(text.encode()), Value(text, Problem.NO_TYPE, None)),
        (len(text.encode()) - 1, Value(None, Problem.TOO_LARGE, block)),
    ):
        assert decode_record(block, NSID, Limits(record_json_bytes=limit)) == value
    ascii_block = unusual(t="e")
    size = len(decode(ascii_block).json or "")
    assert decode_record(ascii_block, NSID, Limits(record_json_bytes=size)).problem is Problem.NO_TYPE


def test_unusual_record_has_the_same_problems_as_others() -> None:
    assert decode(unusual(**{"$type": NSID})).problem is None
    assert decode(unusual(**{"$type": "a.b.c"})).problem is Problem.OTHER_TYPE
    assert decode(unusual(t="\0"))[1:] == (Problem.NUL, unusual(t="\0"))
    assert decode(unusual(**{"$link": 1, "$bytes": 2})).problem is Problem.RESERVED_KEY
    assert decode(unusual(t="$link and $bytes")).problem is Problem.NO_TYPE
    assert decode(unusual(n=-(1 << 63))).problem is Problem.NO_TYPE
    assert decode(unusual(n=-(1 << 63) - 1)).problem is Problem.NUMBER
    assert decode(unusual(n=-(1 << 63) - 1, t="\0")).problem is Problem.NUL  # a text has changed
    assert decode(unusual(n=-(1 << 63) - 1, t="\0", **{"$link": 1})).problem is Problem.RESERVED_KEY


@pytest.mark.parametrize("backslashes", range(6))
def test_only_an_escape_of_nul_counts_as_nul(backslashes: int) -> None:
    text = "\\" * backslashes
    assert decode({"$type": NSID, "a": f"{text}u0000", "b": f"{text}\\u0000"}).problem is None
    assert decode({"$type": NSID, "a": f"{text}\0"}).problem is Problem.NUL


@given(st.binary(max_size=300))
def test_arbitrary_bytes_give_a_value_or_keep_their_bytes(block: bytes) -> None:
    value = decode(block)
    assert value.json is not None or value.original == block


TEXTS = st.text(max_size=8) | st.sampled_from(["\0", "\\u0000", "\\", '"', "\ufffe", "\U0010ffff", "$link", "$bytes"])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False, width=64)
    | TEXTS
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


def cbor_list(items: list[bytes]) -> bytes:
    """Return the DAG-CBOR of a list with these encoded items."""
    head = dag_cbor.encode([None] * len(items))[: -len(items) or None]
    return head + b"".join(items)


def cbor_map(entries: dict[str, bytes]) -> bytes:
    """Return the DAG-CBOR of a map with these encoded values."""
    items = sorted((dag_cbor.encode(key), value) for key, value in entries.items())
    head = bytearray(cbor_list([b""] * len(items)))
    head[0] += 0x20  # major type 5 instead of 4
    return bytes(head) + b"".join(key + value for key, value in items)


def encode(value: Any) -> bytes:
    """Return the DAG-CBOR of a value that may contain floats, which the encoder of the local network rejects."""
    match value:
        case float():
            return b"\xfb" + struct.pack(">d", value)
        case list():
            return cbor_list(list(map(encode, value)))
        case dict():
            return cbor_map({key: encode(item) for key, item in value.items()})
        case _:
            return dag_cbor.encode(value)


def from_json(value: Any) -> bytes:
    """Return the DAG-CBOR of AT Protocol JSON."""
    match value:
        case {"$link": str(text), **rest} if not rest:
            return b"\xd8\x2a" + cbor2.dumps(b"\0" + b32decode(text[1:].upper() + "=" * (-len(text[1:]) % 8)))
        case {"$bytes": str(text), **rest} if not rest:
            return cbor2.dumps(b64decode(text + "=="))
        case list():
            return cbor_list(list(map(from_json, value)))
        case dict():
            return cbor_map({key: from_json(item) for key, item in value.items()})
        case _:
            return dag_cbor.encode(value)


def restored(value: Value, stored: str | None) -> bytes:
    """Return the block that follows from the columns of a record."""
    return value.original or from_json(json.loads(stored or "null"))


@given(VALUES)
def test_block_can_be_restored_from_json_or_is_stored_itself(value: Any) -> None:
    block = encode(value)
    decoded = decode(block)
    assert restored(decoded, decoded.json) == block
    assert decoded.json is not None or decoded.original == block


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(VALUES, min_size=1, max_size=20))
def test_block_can_be_restored_from_jsonb(postgres: Any, values: list[Any]) -> None:
    blocks = [encode(value) for value in values]
    decoded = [decode(block) for block in blocks]

    async def through_jsonb() -> list[str | None]:
        connection = await asyncpg.connect(postgres.dsn)
        try:
            rows = await connection.fetch(
                "select value::jsonb::text from unnest($1::text[]) with ordinality as t (value, n) order by n",
                [value.json for value in decoded],
            )
        finally:
            await connection.close()
        return [row["value"] for row in rows]

    assert list(map(restored, decoded, postgres.run(through_jsonb()))) == blocks


@given(VALUES)
def test_count_of_items_is_that_of_the_decoded_value(value: Any) -> None:
    def count(value: Any) -> int:
        if isinstance(value, dict):
            return 1 + len(value) + sum(map(count, value.values()))
        return 1 + sum(map(count, value)) if isinstance(value, list) else 1

    block = encode(value)
    assert count_items(block, 1_000_000, 250) == (count(value), False)
    assert count_items(block, 3, 250) == (min(4, count(value)), False)
