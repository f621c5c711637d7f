"""A spooled export against a dict of its blocks."""

import asyncio
import os
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncIterator, Iterable
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.errors import UnavailableError, UpstreamError
from indexer.pds import spool as spooling
from indexer.pds.spool import Spool
from indexer.reasons import FetchFailure, Rejection

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


async def pieces(data: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def fill(spool: Spool, data: bytes, size: int = 65_536) -> None:
    asyncio.run(spool.fill(pieces(data, size)))


blocks = st.binary(max_size=40) | st.integers(0, 9).map(lambda n: bytes([n]) * 1_000 * n)


@given(
    st.lists(blocks, max_size=60),
    st.lists(blocks, max_size=5),
    st.integers(1, 5_000),
    st.sampled_from([1, 20_000, 1 << 20]),
    st.sampled_from([41, 1 << 14]),
    st.booleans(),
)
def test_it_holds_what_was_put_in(
    tmp_path_factory: pytest.TempPathFactory,
    present: list[bytes],
    others: list[bytes],
    size: int,
    in_memory: int,
    page: int,
    crowded: bool,
) -> None:
    oracle = {cid_of(block): block for block in present}
    with (
        pytest.MonkeyPatch.context() as patch,
        Spool(tmp_path_factory.getbasetemp(), DEFAULT_LIMITS) as spool,
    ):
        patch.setattr(spooling, "_WRITE_BYTES", in_memory)
        patch.setattr(spooling, "_PAGE", page)
        if crowded:  # as if all hashes were nearly alike
            patch.setattr(spooling, "_HASH", 1)
        fill(spool, car(present) + section(FOREIGN), size)
        assert spool.root == cid_of(b"root")
        assert len(spool) == len(oracle)
        for block in present + others:
            assert spool.block(cid_of(block)) == oracle.get(cid_of(block))
        assert spool.block(b"") is None


def test_many_blocks_twice(tmp_path: Path) -> None:
    everything = [number.to_bytes(4, "big") * (number % 50) for number in range(5_000)]
    with Spool(tmp_path, DEFAULT_LIMITS) as spool:
        fill(spool, car(everything * 2))
        assert len(spool) == len(set(everything))
        assert all(spool.block(cid_of(block)) == block for block in everything)


def test_a_block_of_the_greatest_size(tmp_path: Path) -> None:
    great = os.urandom(DEFAULT_LIMITS.block_bytes)
    with Spool(tmp_path, DEFAULT_LIMITS) as spool:
        fill(spool, car([b"small", great, b"after"]))
        assert [spool.block(cid_of(block)) for block in (great, b"after")] == [great, b"after"]


@given(st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=5, unique=True), st.integers(0, 500))
def test_a_cut_inside_a_block_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, present: list[bytes], cut: int
) -> None:
    whole = car(present)
    cut %= len(whole)
    ends = {len(car(present[:count])) for count in range(len(present) + 1)}
    with Spool(tmp_path_factory.getbasetemp(), DEFAULT_LIMITS) as spool:
        if cut in ends:  # nothing in the file tells
            fill(spool, whole[:cut])
            return
        with pytest.raises(UnavailableError) as failure:
            fill(spool, whole[:cut])
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
def test_a_file_that_breaks_a_rule(tmp_path: Path, data: bytes, reason: Rejection) -> None:
    with Spool(tmp_path, DEFAULT_LIMITS) as spool, pytest.raises(UpstreamError) as rejection:
        fill(spool, data)
    assert rejection.value.reason is reason


def test_a_full_disk_is_neither_our_end_nor_the_repos_fault(tmp_path: Path) -> None:
    with Spool(tmp_path, DEFAULT_LIMITS) as spool:
        spool._file.close()
        spool._file = open("/dev/full", "wb", buffering=0)  # noqa: PTH123, SIM115
        with pytest.raises(UnavailableError, match="No space left") as failure:
            fill(spool, car([os.urandom(1_000_000) for _ in range(2)]))
    assert failure.value.reason is FetchFailure.SPOOL_FULL
    assert failure.value.reason.spares


def test_neither_is_a_directory_that_takes_no_file(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError) as failure:
        Spool(tmp_path / "missing", DEFAULT_LIMITS)
    assert failure.value.reason is FetchFailure.SPOOL_FULL


def test_its_file_has_no_name_and_goes_with_it(tmp_path: Path) -> None:
    open_files = len(os.listdir("/dev/fd"))  # noqa: PTH208
    with Spool(tmp_path, DEFAULT_LIMITS) as spool:
        blocks = [os.urandom(500_000) for _ in range(5)]
        fill(spool, car(blocks))
        assert list(tmp_path.iterdir()) == []
        assert spool.size > os.fstat(spool._file.fileno()).st_size > 1_500_000
    assert len(os.listdir("/dev/fd")) == open_files  # noqa: PTH208
    with pytest.raises(ValueError, match="closed"):
        spool.block(cid_of(blocks[0]))


def test_a_killed_process_leaves_nothing_behind(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, signal, sys\n"
        "from indexer.atproto.limits import DEFAULT_LIMITS\n"
        "from indexer.pds.spool import Spool\n"
        "spool = Spool(pathlib.Path(sys.argv[1]), DEFAULT_LIMITS)\n"
        "spool._file.write(bytes(100_000))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert ended.returncode == -9
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_memory_is_that_of_the_index(tmp_path: Path) -> None:
    """100,000 blocks of 300 bytes: 30 MB on disk, 3 MB in memory, and the buffers."""
    count = 100_000

    async def export() -> AsyncIterator[bytes]:
        yield header(cid_of(b"root"))
        for start, stop in pairwise(range(0, count + 1, 200)):
            made = (number.to_bytes(4, "big") * 75 for number in range(start, stop))
            yield b"".join(section(cid_of(block) + block) for block in made)

    with Spool(tmp_path, DEFAULT_LIMITS) as spool:
        tracemalloc.start()
        try:
            asyncio.run(spool.fill(export()))
            held, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(spool) == count
        assert held < 5_000_000
        assert peak < 10_000_000
