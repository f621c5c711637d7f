import contextlib
import json
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.atproto.car import CarReader, split_car
from indexer.atproto.cid import DAG_CBOR, RAW, cid_of, cid_text
from indexer.atproto.limits import DEFAULT_LIMITS, Limits
from indexer.errors import UpstreamError
from indexer.localnet import dag_cbor
from indexer.localnet.repo import car, car_header, car_section
from indexer.reasons import Rejection
from tests.vectors import ROOT, vectors

BLOCKS = st.lists(st.binary(max_size=300), min_size=1, max_size=8, unique=True)
MOST = 10**8


def split(data: bytes) -> tuple[list[bytes], dict[bytes, bytes]]:
    return split_car(data, DEFAULT_LIMITS, max_bytes=MOST)


def read(data: bytes, cuts: list[int], limits: Limits = DEFAULT_LIMITS) -> tuple[list[bytes], dict[bytes, bytes]]:
    """The push parser, fed pieces cut at `cuts`."""
    reader, blocks, start = CarReader(limits), {}, 0
    for stop in [*sorted(cuts), len(data)]:
        for cid, block, offset in reader.feed(data[start:stop]):
            assert data[offset : offset + len(block)] == block
            blocks[cid] = block
        start = stop
    reader.close()
    return reader.roots, blocks


def sample(blocks: list[bytes]) -> bytes:
    return car({cid_of(block): block for block in blocks})


@given(BLOCKS, st.data())
def test_cut_anywhere_it_reads_the_same(blocks: list[bytes], data: st.DataObject) -> None:
    file = sample(blocks)
    cuts = data.draw(st.lists(st.integers(0, len(file)), max_size=6))
    assert read(file, cuts) == split(file) == ([cid_of(blocks[0])], {cid_of(block): block for block in blocks})


@given(BLOCKS, st.data())
def test_a_cut_is_seen_unless_it_is_between_two_blocks(blocks: list[bytes], data: st.DataObject) -> None:
    file = sample(blocks)
    ends = {len(car_header(cid_of(blocks[0])))}
    for block in blocks:
        ends.add(max(ends) + len(car_section(cid_of(block), block)))
    at = data.draw(st.integers(0, len(file) - 1))
    for parse in (split, lambda part: read(part, [])):
        if at in ends:
            assert len(parse(file[:at])[1]) < len(blocks)
        else:
            with pytest.raises(UpstreamError) as caught:
                parse(file[:at])
            assert caught.value.reason is Rejection.CAR_MALFORMED


@given(BLOCKS, st.data())
def test_no_flipped_bit_gives_a_block_under_a_wrong_cid(blocks: list[bytes], data: st.DataObject) -> None:
    file = bytearray(sample(blocks))
    file[data.draw(st.integers(0, len(file) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    for parse in (split, lambda part: read(part, [])):
        try:
            _, found = parse(bytes(file))
        except UpstreamError:
            continue
        assert all(cid[4:] == cid_of(block)[4:] for cid, block in found.items())


@given(st.binary(max_size=300), st.booleans())
def test_no_bytes_break_a_parser(data: bytes, headed: bool) -> None:
    file = car_header(cid_of(b"")) + data if headed else data
    for parse in (split, lambda part: read(part, [len(part) // 2])):
        with contextlib.suppress(UpstreamError):
            parse(file)


def outcome(parse: Callable[[], object]) -> object:
    try:
        return parse()
    except UpstreamError as error:
        return error.reason


KINDS = st.sampled_from(
    [
        b"\x01\x71\x13\x40" + bytes(64),  # SHA-512
        b"\x01\x55\x00\x00",  # identity
        RAW + cid_of(b"")[4:],
        RAW + bytes(32),
        DAG_CBOR + bytes(31),
        b"\x12\x20" + bytes(32),  # version 0
        b"\x01\xf1\x00\x12\x20" + bytes(32),  # a codec in a longer form
        b"",
    ]
)
SECTIONS = st.one_of(
    st.binary(max_size=200).map(lambda block: car_section(cid_of(block), block)),
    st.tuples(KINDS, st.binary(max_size=40)).filter(any).map(lambda parts: car_section(*parts)),
    st.binary(max_size=3),
)


@settings(max_examples=300)
@given(st.lists(SECTIONS, max_size=6).map(b"".join), st.data())
def test_both_parsers_say_the_same_of_any_sections(sections: bytes, data: st.DataObject) -> None:
    file = car_header(cid_of(b"")) + sections
    cuts = data.draw(st.lists(st.integers(0, len(file)), max_size=4))
    assert outcome(lambda: read(file, cuts)) == outcome(lambda: split(file))


HEADER = car_header(cid_of(b"x"))
SECTION = car_section(cid_of(b"x"), b"x")


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
        HEADER + b"\x24" + cid_of(b"x")[:-1],
        b"\xff\xff\x7f" + HEADER,
        dag_cbor.encode({"roots": [cid_of(b"x")], "version": 1}),
        bytes([17]) + dag_cbor.encode({"roots": [], "version": 1}) + SECTION,
        bytes([58]) + dag_cbor.encode({"roots": [cid_of(b"x")], "version": 2}) + SECTION,
        bytes([58]) + dag_cbor.encode({"roots": [cid_of(b"x")], "version": True}) + SECTION,
        bytes([66])
        + dag_cbor.encode({"roots": [cid_of(b"x")], "version": 1})[:-1]
        + b"\xfb\x3f\xf0"
        + bytes(6)
        + SECTION,
        bytes([21]) + dag_cbor.encode({"roots": ["text"], "version": 1}) + SECTION,
    ],
)
def test_bad_lengths_and_headers_are_refused(file: bytes) -> None:
    for parse in (split, lambda part: read(part, [])):
        with pytest.raises(UpstreamError) as caught:
            parse(file)
        assert caught.value.reason is Rejection.CAR_MALFORMED


def test_a_block_under_another_cid_is_refused() -> None:
    for parse in (split, lambda part: read(part, [])):
        with pytest.raises(UpstreamError) as caught:
            parse(HEADER + car_section(cid_of(b"x"), b"y"))
        assert caught.value.reason is Rejection.BLOCK_HASH_MISMATCH


def test_blocks_of_other_kinds_are_passed_over() -> None:
    foreign = b"\x01\x71\x13\x40" + bytes(64)  # SHA-512
    assert split(HEADER + car_section(foreign, b"data") + SECTION)[1] == {cid_of(b"x"): b"x"}


def test_bounds() -> None:
    file = sample([b"a" * 1_000, b"b", b"c"])
    with pytest.raises(UpstreamError) as caught:
        split_car(file, DEFAULT_LIMITS, max_bytes=len(file) - 1)
    assert caught.value.reason is Rejection.BLOCKS_TOO_LARGE
    for limits in (
        Limits(repo_bytes=1_000),
        Limits(repo_blocks=2),
        Limits(block_bytes=900),
        Limits(car_header_bytes=50),
    ):
        with pytest.raises(UpstreamError):
            read(file, [10, 20], limits)
    lying = HEADER + b"\xff\xff\xff\x7f"  # a block of 256 MiB, it says
    with pytest.raises(UpstreamError):
        CarReader(DEFAULT_LIMITS).feed(lying).__next__()


def test_published_fixtures() -> None:
    cases = json.loads(vectors("atproto-monorepo/packages/repo/tests/car-file-fixtures.json").read_text())
    assert cases
    for case in cases:
        roots, blocks = split(b64decode(case["car"] + "=="))
        assert [cid_text(root) for root in roots] == [case["root"]]
        assert {cid_text(cid): block for cid, block in blocks.items()} == {
            block["cid"]: b64decode(block["bytes"] + "==") for block in case["blocks"]
        }


def hostile() -> list[Path]:
    return sorted(path for path in (ROOT / "car-hostile").rglob("*") if path.is_file() and path.suffix != ".txt")


def test_hostile_files_are_refused_or_read_alike() -> None:
    vectors("car-hostile")
    assert len(hostile()) > 5
    outcomes: dict[str, object] = {}
    for path in hostile():
        data = path.read_bytes()
        results: list[object] = []
        for parse in (split, lambda part: read(part, [1, len(part) // 2])):
            try:
                results.append(parse(data))
            except UpstreamError as error:
                results.append(error.reason)
        assert results[0] == results[1], path
        outcomes[path.name] = results[0]
    refused = {name for name, outcome in outcomes.items() if isinstance(outcome, Rejection)}
    assert {"badheaderlength.car", "sample-corrupt-pragma.car", "sample-v1-with-zero-len-section2.car"} <= refused


def test_real_exports_split() -> None:
    vectors("repos")
    found = sorted(path for path in (ROOT / "repos").rglob("*.car"))
    assert len(found) > 4
    for path in found:
        roots, blocks = split(path.read_bytes())
        assert read(path.read_bytes(), [100, 1_000]) == (roots, blocks)
        assert roots[0] in blocks


def test_the_usual_header_is_read_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is recognised by its bytes; with any of them changed, it is what the decoder says."""
    block = b"a block"
    good = car({cid_of(block): block})

    def outcome(data: bytes) -> object:
        try:
            return split_car(data, DEFAULT_LIMITS, max_bytes=1_000)
        except UpstreamError as error:
            return error.reason

    damaged = [good[:at] + bytes([good[at] ^ bit]) + good[at + 1 :] for at in range(60) for bit in (1, 0x10, 0x80)]
    cut = [good[:size] for size in range(len(good))]
    quickly = [outcome(data) for data in (good, *damaged, *cut)]
    assert quickly[0] == ([cid_of(block)], {cid_of(block): block})
    monkeypatch.setattr("indexer.atproto.car._USUAL_START", b"never")
    assert [outcome(data) for data in (good, *damaged, *cut)] == quickly
