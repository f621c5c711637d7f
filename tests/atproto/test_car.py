import contextlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.atproto.car import CarReader, read_header, split_car
from indexer.atproto.cid import DAG_CBOR, RAW, cid_of
from indexer.atproto.limits import DEFAULT_LIMITS, Limits
from indexer.demo import dag_cbor
from indexer.demo.local_repo import car, car_header, car_section
from indexer.errors import UpstreamError
from indexer.reasons import Rejection
from tests.profiles import scaled

MAX_BYTES = 10**8
CarContents = tuple[list[bytes], dict[bytes, bytes]]
"""The roots of a CAR file, and its blocks by CID."""

blocks_strategy = st.lists(st.binary(max_size=300), min_size=1, max_size=8, unique=True)


def split(data: bytes) -> CarContents:
    return split_car(data, DEFAULT_LIMITS, max_bytes=MAX_BYTES)


def read(data: bytes, cuts: list[int], limits: Limits = DEFAULT_LIMITS) -> CarContents:
    """Read a CAR file with `CarReader`, in chunks that are cut at these offsets."""
    reader, start = CarReader(limits), 0
    blocks: dict[bytes, bytes] = {}
    for stop in [*sorted(cuts), len(data)]:
        blocks |= reader.feed(data[start:stop])
        start = stop
    reader.close()
    return reader.roots, blocks


def read_at_once(data: bytes) -> CarContents:
    return read(data, [])


def read_in_two_chunks(data: bytes) -> CarContents:
    return read(data, [len(data) // 2])


def car_of(blocks: list[bytes]) -> bytes:
    return car({cid_of(block): block for block in blocks})


def result_or_reason(parse: Callable[..., object], *arguments: object) -> object:
    try:
        return parse(*arguments)
    except UpstreamError as error:
        return error.reason


@given(blocks_strategy, st.data())
def test_reader_finds_the_same_blocks_wherever_the_chunks_are_cut(blocks: list[bytes], data: st.DataObject) -> None:
    file = car_of(blocks)
    cuts = data.draw(st.lists(st.integers(0, len(file)), max_size=6))
    assert read(file, cuts) == split(file) == ([cid_of(blocks[0])], {cid_of(block): block for block in blocks})


@given(blocks_strategy, st.data())
def test_truncated_file_is_rejected_unless_it_ends_between_two_blocks(blocks: list[bytes], data: st.DataObject) -> None:
    file = car_of(blocks)
    ends = {len(car_header(cid_of(blocks[0])))}
    for block in blocks:
        ends.add(max(ends) + len(car_section(cid_of(block), block)))
    end = data.draw(st.integers(0, len(file) - 1))
    for parse in (split, read_at_once):
        if end in ends:
            assert len(parse(file[:end])[1]) < len(blocks)
        else:
            with pytest.raises(UpstreamError) as caught:
                parse(file[:end])
            assert caught.value.reason is Rejection.CAR_MALFORMED


@given(blocks_strategy, st.data())
def test_flipped_bit_never_gives_a_block_that_does_not_match_its_cid(blocks: list[bytes], data: st.DataObject) -> None:
    file = bytearray(car_of(blocks))
    file[data.draw(st.integers(0, len(file) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    for parse in (split, read_at_once):
        try:
            _, found = parse(bytes(file))
        except UpstreamError:
            continue
        assert all(cid[4:] == cid_of(block)[4:] for cid, block in found.items())


@given(st.binary(max_size=300), st.booleans())
def test_arbitrary_bytes_raise_no_other_error(data: bytes, with_header: bool) -> None:
    file = car_header(cid_of(b"")) + data if with_header else data
    for parse in (split, read_in_two_chunks):
        with contextlib.suppress(UpstreamError):
            parse(file)


CIDS = st.sampled_from(
    [
        b"\x01\x71\x13\x40" + bytes(64),  # SHA-512
        b"\x01\x55\x00\x00",  # identity
        RAW + cid_of(b"")[4:],
        RAW + bytes(32),
        DAG_CBOR + bytes(31),
        b"\x12\x20" + bytes(32),  # CIDv0
        b"\x01\xf1\x00\x12\x20" + bytes(32),  # the codec is not in its shortest form
        b"",
    ]
)
SECTIONS = st.one_of(
    st.binary(max_size=200).map(lambda block: car_section(cid_of(block), block)),
    st.tuples(CIDS, st.binary(max_size=40)).filter(any).map(lambda parts: car_section(*parts)),
    st.binary(max_size=3),
)


@settings(max_examples=scaled(300))
@given(st.lists(SECTIONS, max_size=6).map(b"".join), st.data())
def test_both_parsers_agree_on_arbitrary_sections(sections: bytes, data: st.DataObject) -> None:
    file = car_header(cid_of(b"")) + sections
    cuts = data.draw(st.lists(st.integers(0, len(file)), max_size=4))
    assert result_or_reason(read, file, cuts) == result_or_reason(split, file)


HEADER = car_header(cid_of(b"x"))
SECTION = car_section(cid_of(b"x"), b"x")
X = {cid_of(b"x"): b"x"}


def header_of(**fields: Any) -> bytes:
    """Return a header with other fields, and its length before it."""
    header = dag_cbor.encode({"roots": [cid_of(b"x")], "version": 1} | fields)
    return bytes([len(header)]) + header


@pytest.mark.parametrize(
    "file",
    [
        b"",
        b"\x00",
        b"\x80" * 20,
        HEADER[:-1],
        HEADER + b"\x00",
        HEADER + b"\x00" + SECTION,
        HEADER + b"\x80\x00" + SECTION,
        HEADER + bytes([SECTION[0] | 0x80, 0x00]) + SECTION[1:],
        HEADER + b"\xff" * 10,
        HEADER + b"\x05hello",
        HEADER + bytes([30]) + b"\x01\x71\x13\x40" + bytes(26) + SECTION,  # a CID that is longer than its section
        b"\x02\x81\x01" + SECTION,
        HEADER + b"\x24" + cid_of(b"x")[:-1],
        b"\xff\xff\x7f" + HEADER,
        header_of()[1:],
        header_of(roots=[]) + SECTION,
        header_of(version=2) + SECTION,
        header_of(version=True) + SECTION,
        bytes([66]) + header_of()[1:-1] + b"\xfb\x3f\xf0" + bytes(6) + SECTION,
        header_of(roots=["text"]) + SECTION,
    ],
)
def test_bad_lengths_and_bad_headers_are_rejected(file: bytes) -> None:
    for parse in (split, read_at_once):
        with pytest.raises(UpstreamError) as caught:
            parse(file)
        assert caught.value.reason is Rejection.CAR_MALFORMED


def test_block_under_another_cid_is_rejected() -> None:
    for parse in (split, read_at_once):
        with pytest.raises(UpstreamError) as caught:
            parse(HEADER + car_section(cid_of(b"x"), b"y"))
        assert caught.value.reason is Rejection.BLOCK_HASH_MISMATCH


def test_block_under_an_unsupported_cid_is_skipped() -> None:
    sha512 = b"\x01\x71\x13\x40" + bytes(64)
    for block in (b"data", b""):
        for parse in (split, read_at_once):
            assert parse(HEADER + car_section(sha512, block) + SECTION)[1] == {cid_of(b"x"): b"x"}


@pytest.mark.parametrize("size", [91, 92, 16_347, 16_348, 16_474, 16_475, 40_000])
def test_lengths_of_one_two_and_three_bytes_are_read(size: int) -> None:
    """With the CID, 127, 128, 16,383, 16,384, 16,510 and 16,511 bytes."""
    file = car_of([bytes(size), b"x"])
    assert split(file) == read(file, [60, 61]) == ([cid_of(bytes(size))], {cid_of(bytes(size)): bytes(size), **X})


def test_resumed_reader_continues_with_sizes_and_counts() -> None:
    file = car_of([b"first", b"second", b"third"])
    begun = CarReader(DEFAULT_LIMITS)
    position = file.index(b"first") + 5
    [(cid, _)] = begun.feed(file[:position])
    limits = Limits(repo_bytes=len(file), repo_blocks=3)
    resumed = CarReader(limits, begun.roots, position, 1)
    assert [block for _, block in resumed.feed(file[position:])] == [b"second", b"third"]
    assert resumed.roots == [cid]
    resumed.close()
    for limits in (Limits(repo_bytes=len(file) - 1), Limits(repo_blocks=2)):
        with pytest.raises(UpstreamError):
            list(CarReader(limits, [cid], position, 1).feed(file[position:]))


def test_bounds_on_sizes_and_counts_are_exact() -> None:
    file = car_of([b"a" * 1_000, b"b", b"c"])
    whole = split_car(file, DEFAULT_LIMITS, max_bytes=len(file))
    limits = Limits(repo_bytes=len(file), repo_blocks=3, block_bytes=1_000, car_header_bytes=58)
    assert read(file, [10, 20], limits) == whole
    assert read_header(file, limits) == (whole[0], 59)
    with pytest.raises(UpstreamError, match="header of 58 bytes"):
        read_header(file, Limits(car_header_bytes=57))
    with pytest.raises(UpstreamError) as caught:
        split_car(file, DEFAULT_LIMITS, max_bytes=len(file) - 1)
    assert caught.value.reason is Rejection.BLOCKS_TOO_LARGE
    too_few = {"repo_bytes": len(file) - 1, "repo_blocks": 2, "block_bytes": 999, "car_header_bytes": 57}
    for name, limit in too_few.items():
        with pytest.raises(UpstreamError):
            read(file, [10, 20], replace(limits, **{name: limit}))
    with pytest.raises(UpstreamError):
        next(CarReader(DEFAULT_LIMITS).feed(HEADER + b"\xff\xff\xff\x7f"))  # 256 MiB


def test_header_of_many_items_is_rejected() -> None:
    for items, is_rejected in ((400, False), (600, True)):
        header = dag_cbor.encode({"more": [0] * items, "roots": [cid_of(b"x")], "version": 1})
        file = bytes([len(header) & 0x7F | 0x80, len(header) >> 7]) + header
        with pytest.raises(UpstreamError, match="over 512 items") if is_rejected else nullcontext():
            assert read_header(file, DEFAULT_LIMITS) == ([cid_of(b"x")], len(file))


def test_truncated_header_is_incomplete() -> None:
    header = car_header(cid_of(b"x"))
    assert [read_header(header[:size], DEFAULT_LIMITS) for size in range(len(header))] == [None] * len(header)
