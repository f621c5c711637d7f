from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from indexer.atproto.cid import cid_of
from indexer.atproto.crypto import PrivateKey, PublicKey
from indexer.atproto.limits import DEFAULT_LIMITS, Limits
from indexer.atproto.mst import MissingNodeError
from indexer.atproto.record import Problem
from indexer.cli.inspect_car import InspectedRecord, open_export
from indexer.errors import UnavailableError, UpstreamError
from indexer.localnet.local_repo import LocalRepo, Write, car_header, car_section
from indexer.reasons import FetchFailure, Rejection
from tests.vectors import vectors

DID = "did:plc:" + "a" * 24
KEY = PrivateKey.from_seed("k256", b"inspection")
FLOAT = b"\xa1\x61x\xfb\x3f\xf8\x00\x00\x00\x00\x00\x00"
NOTES = 200
NOT_STRICT = b"\xa2\x61b\x01\x61a\x01"  # a map with keys out of order


@pytest.fixture
def repo() -> LocalRepo:
    repo = LocalRepo(DID, KEY, "3jzfcijpj2z2a")
    writes = [
        Write.create(f"com.example.note/{number:03}", {"$type": "com.example.note", "n": number})
        for number in range(200)
    ]
    repo.write(writes, KEY, "3jzfcijpj2z2b")
    return repo


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "repo.car"


def write(file: Path, sections: Iterable[bytes]) -> Path:
    file.write_bytes(b"".join(sections))
    return file


async def list_records(
    file: Path, key: PublicKey | None = None, limits: Limits = DEFAULT_LIMITS
) -> list[InspectedRecord]:
    async with open_export(file, key, limits) as export:
        records = list(export.records())
        assert export.count == len(records)
        assert export.signature_checked is (key is not None)
        return records


async def rejection_of(file: Path, key: PublicKey | None = None, limits: Limits = DEFAULT_LIMITS) -> UpstreamError:
    with pytest.raises(UpstreamError) as raised:
        await list_records(file, key, limits)
    return raised.value


async def test_complete_export_is_listed_in_path_order(repo: LocalRepo, file: Path) -> None:
    write(file, repo.export())
    expected = [InspectedRecord(path, cid_of(block), "") for path, block in sorted(repo.records.items())]
    assert await list_records(file, KEY.public) == expected
    async with open_export(file, None, DEFAULT_LIMITS) as export:
        assert (export.commit.did, export.commit.rev, export.commit.cid) == (DID, repo.head.rev, repo.head.cid)


async def test_the_order_of_blocks_does_not_matter(repo: LocalRepo, file: Path) -> None:
    header, *sections = repo.export()
    assert len(await list_records(write(file, [header, *reversed(sections)]))) == NOTES


async def test_signature_of_another_key_is_rejected(repo: LocalRepo, file: Path) -> None:
    other = PrivateKey.from_seed("p256", b"other").public
    assert (await rejection_of(write(file, repo.export()), other)).reason is Rejection.SIGNATURE_INVALID


async def is_complete(file: Path) -> bool:
    try:
        return not any(record.problem for record in await list_records(file))
    except (UpstreamError, UnavailableError):
        return False


@pytest.mark.slow
async def test_change_of_any_byte_is_found(repo: LocalRepo, file: Path) -> None:
    export = b"".join(repo.export())
    assert await is_complete(write(file, [export]))
    for at in range(0, len(export), 97):
        assert not await is_complete(write(file, [export[:at], bytes([export[at] ^ 0x10]), export[at + 1 :]])), at


async def test_truncated_file_is_incomplete(repo: LocalRepo, file: Path) -> None:
    *_, last = sections = list(repo.export())
    for count in range(2, len(sections), 20):
        with pytest.raises(MissingNodeError):
            await list_records(write(file, sections[:count]))
    problems = [record.problem for record in await list_records(write(file, sections[:-1]))]
    assert problems == [""] * (NOTES - 1) + ["missing"]
    with pytest.raises(UnavailableError, match=FetchFailure.EXPORT_INCOMPLETE):
        await list_records(write(file, [*sections[:-1], last[:-1]]))


async def test_records_that_are_not_strict_dag_cbor_are_explained(file: Path) -> None:
    repo = LocalRepo(DID, KEY, "3jzfcijpj2z2a")
    blocks = {"com.example.note/bad": NOT_STRICT, "com.example.note/float": FLOAT}
    repo.write([Write.create(path, block) for path, block in blocks.items()], KEY, "3jzfcijpj2z2b")
    bad, unusual = await list_records(write(file, repo.export()), KEY.public)
    assert bad.problem.startswith("not-dag-cbor: CBOR (a map with the keys 'b', 'a')")
    assert unusual.problem == Problem.NUMBER


@pytest.mark.parametrize(("block", "words"), [(NOT_STRICT, "CBOR (a map with"), (b"\xa1\x61", "not CBOR at all")])
async def test_commit_that_is_not_strict_dag_cbor_is_explained(block: bytes, words: str, file: Path) -> None:
    error = await rejection_of(write(file, [car_header(cid_of(block)), car_section(cid_of(block), block)]))
    assert error.reason is Rejection.COMMIT_MALFORMED
    assert words in error.detail


async def test_root_that_is_not_in_the_file_is_rejected(file: Path) -> None:
    sections = [car_header(cid_of(b"x")), car_section(cid_of(b"\xa0"), b"\xa0")]
    assert (await rejection_of(write(file, sections))).reason is Rejection.COMMIT_MISSING


@pytest.mark.parametrize("limit", [{"repo_blocks": 100}, {"repo_bytes": 10_000}, {"block_bytes": 100}])
async def test_limits_are_enforced(limit: dict[str, int], repo: LocalRepo, file: Path) -> None:
    error = await rejection_of(write(file, repo.export()), limits=replace(DEFAULT_LIMITS, **limit))
    assert error.reason is Rejection.CAR_MALFORMED


@pytest.mark.parametrize("name", ["repos/atproto.dart/repo.car", "repos/php-car/repo.car", "jetstream-corpus/repo.car"])
async def test_real_exports_are_complete(name: str) -> None:
    records = await list_records(vectors(name))
    assert len(records) > 20
    assert not any(record.problem == Problem.MISSING for record in records)
