"""Values of records within bounds: each block is decoded once, and the values of one commit or export are limited."""

from dataclasses import replace
from unittest.mock import patch

from indexer.atproto.cid import cid_of
from indexer.atproto.record import Problem, decode_record
from indexer.localnet import dag_cbor
from indexer.sync.plans import RecordChange
from indexer.sync.record_change import LINK_BYTES, MAX_EXPANSION, MIN_VALUE_BYTES, RecordConverter
from indexer.sync.verify import VerifiedChange
from tests.sync.signing_account import POST, STORE_ALL

REV = "3laaaaaaaaa22"


def record(size: int) -> bytes:
    return dag_cbor.encode({"$type": POST, "text": "x" * size})


def create(rkey: object, block: bytes) -> VerifiedChange:
    return VerifiedChange(f"{POST}/{rkey}".encode(), None, cid_of(block), block)


def converted(converter: RecordConverter, change: VerifiedChange) -> RecordChange:
    result = converter.convert(change)
    assert result is not None
    return result


def test_block_that_many_paths_name_is_decoded_once() -> None:
    block = record(10)
    converter = RecordConverter(STORE_ALL, REV, len(block))
    with patch("indexer.sync.record_change.decode_record", wraps=decode_record) as decode:
        changes = [converted(converter, create(number, block)) for number in range(50)]
    assert decode.call_count == 1
    assert len({id(change.value) for change in changes}) == 1


def test_values_far_larger_than_their_source_are_omitted() -> None:
    block = record(100_000)
    converter = RecordConverter(STORE_ALL, REV, len(block))
    changes = [converted(converter, create(number, block)) for number in range(100)]
    stored = [change for change in changes if change.value is not None]
    assert sum(len(change.value or "") for change in stored) <= MIN_VALUE_BYTES + MAX_EXPANSION * len(block)
    assert 16 <= len(stored) < 30
    omitted = {(change.value, change.problem, change.original) for change in changes[len(stored) :]}
    assert omitted == {(None, Problem.OMITTED, None)}
    assert {change.cid for change in changes} == {cid_of(block)}


def test_records_that_were_converted_elsewhere_count() -> None:
    converter = RecordConverter(STORE_ALL, REV, 1_000)
    items, left = converter.items_left, converter.bytes_left
    for size in (300, 20):
        converter.count_converted(2, size)
    assert (converter.items_left, converter.bytes_left, converter.bytes_converted) == (items - 4, left - 320, 320)


def test_values_of_distinct_blocks_are_never_omitted() -> None:
    """An empty byte string takes most JSON per byte."""
    blocks = [b"\x99\x03\xe8" + b"\x40" * 999 + dag_cbor.encode(str(number)) for number in range(200)]
    converter = RecordConverter(STORE_ALL, REV, sum(map(len, blocks)))
    changes = [converted(converter, create(number, block)) for number, block in enumerate(blocks)]
    assert all(change.value is not None and len(change.value) > 13 * 999 for change in changes)


def test_size_of_a_change_is_at_least_its_bytes_in_utf_8() -> None:
    for text in ("x" * 100, "ü" * 100, "語" * 100, "\U0001f600" * 100):
        change = RecordChange("create", POST, "a", REV, b"cid", text)
        assert change.size >= len(text.encode())
    assert RecordChange("create", POST, "a", REV, b"cid", original=bytes(100)).size >= 100


def test_links_are_those_of_the_stored_value_and_count_against_the_same_limit() -> None:
    """A block with many short links that many paths name cannot fill the disk with links."""
    block = dag_cbor.encode({"$type": POST, "a": [f"did:web:{number}.io" for number in range(100)]})
    policy = replace(STORE_ALL, links=True)
    converter = RecordConverter(policy, REV, len(block))
    changes = [converted(converter, create(number, block)) for number in range(200)]
    assert all(len(change.links or ()) == (0 if change.value is None else 100) for change in changes)
    links = sum(len(change.links or ()) for change in changes)
    assert 0 < LINK_BYTES * links <= MIN_VALUE_BYTES + MAX_EXPANSION * len(block)
    assert changes[-1].problem is Problem.OMITTED
    assert converted(RecordConverter(STORE_ALL, REV, len(block)), create(0, block)).links is None
