"""A spooled export, compared with a dict of its blocks."""

import os
import resource
import tracemalloc
from collections.abc import Iterable, Iterator
from contextlib import closing
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.core.spool import Spool
from indexer.errors import UnavailableError, UpstreamError
from indexer.reasons import FetchFailure, Rejection
from tests.core.unreadable_file import make_unreadable, open_descriptors

FOREIGN = b"\x01\x70\x12\x20" + bytes(32) + b"a block of another codec"


def varint(number: int) -> bytes:
    return bytes([number & 0x7F | 0x80]) + varint(number >> 7) if number > 0x7F else bytes([number])


def section(data: bytes) -> bytes:
    return varint(len(data)) + data


def cid_of(block: bytes) -> bytes:
    return b"\x01\x71\x12\x20" + sha256(block).digest()


def header(root: bytes) -> bytes:
    return section(b"\xa2eroots\x81\xd8\x2aX\x25\x00" + root + b"gversion\x01")


def car(blocks: Iterable[bytes]) -> bytes:
    return header(cid_of(b"root")) + b"".join(section(cid_of(block) + block) for block in blocks)


def write_all(spool: Spool, data: bytes, size: int = 65_536) -> None:
    for start in range(0, len(data), size):
        spool.write(data[start : start + size])
    spool.finish()


blocks = st.binary(max_size=40) | st.integers(0, 9).map(lambda n: bytes([n]) * 1_000 * n)


@pytest.mark.slow
@given(st.lists(blocks, max_size=60), st.lists(blocks, max_size=5), st.data())
def test_spool_contains_the_written_blocks(
    tmp_path_factory: pytest.TempPathFactory, present: list[bytes], others: list[bytes], data: st.DataObject
) -> None:
    expected = {cid_of(block): block for block in present}
    size, buffer_bytes = data.draw(st.integers(1, 5_000)), data.draw(st.sampled_from([1, 20_000, 1 << 20]))
    with closing(Spool(tmp_path_factory.getbasetemp(), DEFAULT_LIMITS, buffer_bytes)) as spool:
        write_all(spool, car(present) + section(FOREIGN), size)
        assert spool.root == cid_of(b"root")
        assert spool.size == sum(len(cid) + 4 + len(block) for cid, block in expected.items())
        for block in present + others:
            assert spool.block(cid_of(block)) == expected.get(cid_of(block))
        assert spool.block(b"") is None


def test_blocks_up_to_the_maximum_size_are_stored_once(tmp_path: Path) -> None:
    largest = os.urandom(DEFAULT_LIMITS.block_bytes)
    with closing(Spool(tmp_path, DEFAULT_LIMITS)) as spool:
        write_all(spool, car([b"small", largest, b"after", b"small"]))
        assert spool.size == len(largest) + len(b"small" + b"after") + 3 * 40
        assert [spool.block(cid_of(block)) for block in (largest, b"after")] == [largest, b"after"]


def test_file_that_ends_within_a_block_is_incomplete(tmp_path: Path) -> None:
    whole = car([b"first", b"second"])
    ends = {len(car([b"first", b"second"][:count])) for count in range(3)}  # such a file is well-formed
    for cut in set(range(len(whole))) - ends:
        with closing(Spool(tmp_path, DEFAULT_LIMITS)) as spool, pytest.raises(UnavailableError) as failure:
            write_all(spool, whole[:cut])
        assert failure.value.reason is FetchFailure.EXPORT_INCOMPLETE


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"<!doctype html><html></html>" * 10, Rejection.CAR_MALFORMED),
        (car([b"a"])[:-1] + b"b", Rejection.BLOCK_HASH_MISMATCH),
        (car([b"a"]) + b"\x00", Rejection.CAR_MALFORMED),
        (car([]) + varint(DEFAULT_LIMITS.block_bytes + 37), Rejection.CAR_MALFORMED),
    ],
)
def test_malformed_file_is_rejected(tmp_path: Path, data: bytes, reason: Rejection) -> None:
    with closing(Spool(tmp_path, DEFAULT_LIMITS)) as spool, pytest.raises(UpstreamError) as rejection:
        write_all(spool, data)
    assert rejection.value.reason is reason


def large_blocks() -> list[bytes]:
    """Return more than SQLite holds in memory."""
    return [os.urandom(1_000_000) for _ in range(9)]


def test_full_disk_is_a_failure_that_does_not_count_as_attempt(tmp_path: Path) -> None:
    export, before = car(large_blocks()), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        with (
            closing(Spool(tmp_path, DEFAULT_LIMITS)) as spool,
            pytest.raises(UnavailableError, match="disk") as failure,
        ):
            write_all(spool, export)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert failure.value.reason is FetchFailure.SPOOL_FULL
    assert not failure.value.reason.counts_as_attempt


def test_disk_error_while_a_block_is_read_is_a_failure_that_does_not_count_as_attempt(tmp_path: Path) -> None:
    blocks = large_blocks()
    with closing(Spool(tmp_path, DEFAULT_LIMITS)) as spool:
        write_all(spool, car(blocks))
        make_unreadable(tmp_path)
        with pytest.raises(UnavailableError, match="disk I/O error") as failure:
            spool.block(cid_of(blocks[0]))
        assert failure.value.reason is FetchFailure.SPOOL_UNREADABLE
        assert not failure.value.reason.counts_as_attempt


def test_only_a_large_export_needs_a_file(tmp_path: Path) -> None:
    with closing(Spool(tmp_path / "missing", DEFAULT_LIMITS)) as spool:
        write_all(spool, car([b"small"]))
        assert spool.block(cid_of(b"small")) == b"small"
        with pytest.raises(UnavailableError) as failure:
            spool.write(section(cid_of(large := os.urandom(1_900_000)) + large))
        assert failure.value.reason is FetchFailure.SPOOL_FULL


def test_file_has_no_name_and_is_deleted_on_close(tmp_path: Path) -> None:
    with closing(Spool(tmp_path, DEFAULT_LIMITS)) as spool:
        blocks = large_blocks()
        write_all(spool, car(blocks))
        assert list(tmp_path.iterdir()) == []
        [file] = open_descriptors(tmp_path)
        assert spool.size > os.fstat(file).st_size > 1_500_000
    assert open_descriptors(tmp_path) == []
    with pytest.raises(UnavailableError, match="closed"):
        spool.block(cid_of(blocks[0]))


@pytest.mark.slow
def test_memory_use_does_not_depend_on_the_size(tmp_path: Path) -> None:
    """Write 20,000 blocks of 300 bytes: 6 MB on disk. The 2 MB in memory of SQLite are not traced."""
    count = 20_000

    def export() -> Iterator[bytes]:
        yield header(cid_of(b"root"))
        for start, stop in pairwise(range(0, count + 1, 200)):
            generated = (number.to_bytes(4, "big") * 75 for number in range(start, stop))
            yield b"".join(section(cid_of(block) + block) for block in generated)

    with closing(Spool(tmp_path, DEFAULT_LIMITS)) as spool:
        tracemalloc.start()
        try:
            for chunk in export():
                spool.write(chunk)
            spool.finish()
            held, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert spool.size == count * 340
        assert held < 100_000
        assert peak < 3_500_000
