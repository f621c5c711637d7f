"""Values of records within bounds: each block is decoded once, and the values of one commit or export are limited."""

from dataclasses import replace
from unittest.mock import patch

from indexer.atproto.cid import cid_of
from indexer.atproto.record import ConvertedRecord, Problem, decode_record
from indexer.atproto.syntax import CollectionFilter
from indexer.demo import dag_cbor
from indexer.sync.changes import MAX_EXPANSION, MIN_VALUE_BYTES, RecordChange, RecordConverter
from indexer.sync.scope import Scope
from indexer.sync.verify import VerifiedChange
from tests.sync.signing_account import POST, STORE_ALL

DID, REV = "did:plc:ada", "3laaaaaaaaa22"


def record(size: int) -> bytes:
    return dag_cbor.encode({"$type": POST, "text": "x" * size})


def create(rkey: object, block: bytes) -> VerifiedChange:
    return VerifiedChange(f"{POST}/{rkey}".encode(), None, cid_of(block), block)


def converted(converter: RecordConverter, change: VerifiedChange) -> RecordChange:
    result = converter.convert(change)
    assert result is not None
    return result


def test_block_that_many_paths_of_a_collection_name_is_decoded_once_until_values_are_forgotten() -> None:
    block = record(10)
    converter = RecordConverter(STORE_ALL, DID, REV, len(block))
    with patch("indexer.sync.changes.decode_record", wraps=decode_record) as decode:
        changes = [converted(converter, create(number, block)) for number in range(50)]
        assert decode.call_count == 1
        assert len({id(change.value) for change in changes}) == 1
        other = converted(converter, VerifiedChange(b"a.b.c/a", None, cid_of(block), block))
        assert (decode.call_count, other.problem) == (2, Problem.OTHER_TYPE)
        converter.forget_values()
        converted(converter, create(2, block))
        assert decode.call_count == 3


def test_values_far_larger_than_their_source_are_omitted() -> None:
    block = record(100_000)
    converter = RecordConverter(STORE_ALL, DID, REV, len(block))
    changes = [converted(converter, create(number, block)) for number in range(100)]
    stored = [change for change in changes if change.value is not None]
    assert sum(len(change.value or "") for change in stored) <= MIN_VALUE_BYTES + MAX_EXPANSION * len(block)
    assert 16 <= len(stored) < 30
    omitted = {(change.value, change.problem, change.original) for change in changes[len(stored) :]}
    assert omitted == {(None, Problem.OMITTED, None)}
    assert {(change.cid, change.rev) for change in changes} == {(cid_of(block), REV)}


def test_block_is_not_decoded_for_values_that_are_omitted_anyway() -> None:
    """Each collection needs a decoding of its own, as the type of a record may differ from its collection."""
    block = record(100_000)
    converter = RecordConverter(STORE_ALL, DID, REV, len(block))
    paths = [f"com.example.c{number}/r".encode() for number in range(100)]
    with patch("indexer.sync.changes.decode_record", wraps=decode_record) as decode:
        changes = [converted(converter, VerifiedChange(path, None, cid_of(block), block)) for path in paths]
    stored = [change for change in changes if change.problem is not Problem.OMITTED]
    assert 16 <= len(stored) < 30
    assert decode.call_count == len(stored) + 1


def test_records_that_were_converted_elsewhere_count() -> None:
    converter = RecordConverter(STORE_ALL, DID, REV, 1_000)
    items, left = converter.items.left, converter.bytes_left
    for size in (300, 20):
        converter.count_converted(2, size)
    assert (converter.items.left, converter.bytes_left, converter.bytes_converted) == (items - 4, left - 320, 320)


def test_values_of_distinct_blocks_are_never_omitted() -> None:
    """An empty byte string takes most JSON per byte."""
    blocks = [b"\x99\x03\xe8" + b"\x40" * 999 + dag_cbor.encode(str(number)) for number in range(200)]
    converter = RecordConverter(STORE_ALL, DID, REV, sum(map(len, blocks)))
    changes = [converted(converter, create(number, block)) for number, block in enumerate(blocks)]
    assert all(change.value is not None and len(change.value) > 13 * 999 for change in changes)


def test_size_of_a_change_is_at_least_its_bytes_in_utf_8() -> None:
    for text in ("x" * 100, "ü" * 100, "語" * 100, "\U0001f600" * 100):
        change = RecordChange("create", POST, "a", REV, b"cid", text)
        assert change.size >= len(text.encode())
    assert RecordChange("create", POST, "a", REV, b"cid", original=bytes(100)).size >= 100


PATH = f"{POST}/a".encode()
OLD = cid_of(b"old")


def test_change_has_the_action_the_rev_and_the_cid() -> None:
    block = record(10)
    cid = cid_of(block)
    converter = RecordConverter(STORE_ALL, DID, REV, 1_000)
    value = '{"text":"xxxxxxxxxx","$type":"app.bsky.feed.post"}'
    create, update = VerifiedChange(PATH, None, cid, block), VerifiedChange(PATH, OLD, cid, block)
    assert converter.convert(create) == RecordChange("create", POST, "a", REV, cid, value)
    assert converter.convert(update) == RecordChange("update", POST, "a", REV, cid, value)
    assert converter.convert(VerifiedChange(PATH, OLD, None, None)) == RecordChange("delete", POST, "a", REV)
    missing = RecordChange("update", POST, "a", REV, cid, problem=Problem.MISSING)
    assert converter.convert(VerifiedChange(PATH, OLD, cid, None)) == missing
    without_values = RecordConverter(replace(STORE_ALL, store_values=False), DID, REV, 1_000)
    assert without_values.convert(create) == RecordChange("create", POST, "a", REV, cid)
    assert converter.convert(VerifiedChange(b"no path", None, cid, block)) is None
    assert converter.convert(VerifiedChange(b"a.b.c/\xff", None, cid, block)) is None


def test_record_with_a_problem_keeps_its_bytes_unless_it_is_omitted() -> None:
    block = dag_cbor.encode({"$type": POST, "text": "\0" + "x" * 100})
    change = VerifiedChange(PATH, None, cid_of(block), block)
    value = f'{{"text":"\\ufffd{"x" * 100}","$type":"{POST}"}}'
    expected = RecordChange("create", POST, "a", REV, cid_of(block), value, Problem.NUL, block)
    assert RecordConverter(STORE_ALL, DID, REV, 1_000).convert(change) == expected
    converter = RecordConverter(STORE_ALL, DID, REV, 1_000)
    converter.count_converted(0, converter.bytes_left)
    assert converter.convert(change) == expected._replace(value=None, problem=Problem.OMITTED, original=None)


def test_items_of_records_are_counted() -> None:
    block = dag_cbor.encode({"$type": POST, "a": ["x"] * 1_000})
    converter = RecordConverter(STORE_ALL, DID, REV, 1_000)
    left = converter.items.left
    converted(converter, create(1, block))
    assert converter.items.left == left - 1_005


def test_records_of_other_collections_are_not_converted() -> None:
    policy = replace(STORE_ALL, scope=Scope(collections=CollectionFilter(["a.b.*"])))
    block = record(10)
    converter = RecordConverter(policy, DID, REV, 1_000)
    assert converter.convert(create("a", block)) is None
    assert converter.convert(VerifiedChange(PATH, cid_of(block), None, None)) is None
    assert converter.convert(VerifiedChange(b"a.b.c/a", None, cid_of(block), block)) is not None


def test_removed_records_are_not_converted() -> None:
    """Neither a redacted or hidden record of the account, nor one of a redacted collection; also no deletion of one."""
    collections = CollectionFilter(["*"], ["a.b.c"])
    policy = replace(STORE_ALL, scope=Scope(collections=collections, removed={DID: frozenset({PATH})}))
    block = record(10)
    converter, other = (RecordConverter(policy, did, REV, 1_000) for did in (DID, "did:plc:bob"))
    for path in (PATH, b"a.b.c/a"):
        assert converter.convert(VerifiedChange(path, None, cid_of(block), block)) is None
        assert converter.convert(VerifiedChange(path, cid_of(block), None, None)) is None
    assert converter.convert(VerifiedChange(PATH + b"b", None, cid_of(block), block)) is not None
    assert other.convert(VerifiedChange(PATH, None, cid_of(block), block)) is not None


def test_record_that_the_native_core_converted_is_not_converted_again() -> None:
    block = record(10)
    change = VerifiedChange(PATH, None, cid_of(block), block, ConvertedRecord("{}", 1, Problem.NO_TYPE))
    expected = RecordChange("create", POST, "a", REV, cid_of(block), "{}", Problem.NO_TYPE)
    assert RecordConverter(STORE_ALL, DID, REV, 1_000).convert(change) == expected


def test_values_up_to_the_maximum_of_bytes_are_stored() -> None:
    block = dag_cbor.encode({"$type": POST, "a": "a"})
    size = converted(RecordConverter(STORE_ALL, DID, REV, 1_000), create(1, block)).size
    for left, stored in ((0, True), (-1, False)):
        converter = RecordConverter(STORE_ALL, DID, REV, 1_000)
        assert converter.bytes_left == MIN_VALUE_BYTES + 1_000 * MAX_EXPANSION
        converter.count_converted(0, converter.bytes_left - size - left)
        assert (converted(converter, create(1, block)).value is not None) is stored
        assert converter.bytes_left == 0
