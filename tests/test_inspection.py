from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from indexer.atproto.cid import cid_of
from indexer.atproto.crypto import PrivateKey
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.mst import MissingNodeError
from indexer.errors import UpstreamError
from indexer.inspection import Listed, open_export
from indexer.localnet.repo import Repo, Write, car_header, car_section
from indexer.reasons import Rejection
from tests.vectors import vectors

DID = "did:plc:" + "a" * 24
KEY = PrivateKey.from_seed("k256", b"inspection")
FLOAT = b"\xa1\x61x\xfb\x3f\xf8\x00\x00\x00\x00\x00\x00"
NOT_STRICT = b"\xa2\x61b\x01\x61a\x01"  # its keys are out of order


@pytest.fixture
def repo() -> Repo:
    repo = Repo(DID, KEY, "3jzfcijpj2z2a")
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


def refusal(file: Path) -> UpstreamError:
    with pytest.raises(UpstreamError) as raised, open_export(file, KEY.public, DEFAULT_LIMITS):
        pass
    return raised.value


def test_a_whole_export_is_listed_in_path_order(repo: Repo, file: Path) -> None:
    with open_export(write(file, repo.export()), KEY.public, DEFAULT_LIMITS) as export:
        assert (export.commit.did, export.commit.rev, export.commit.cid) == (DID, repo.head.rev, repo.head.cid)
        assert (export.signed, export.count, export.missing) == (True, 200, 0)
        expected = [Listed(path, cid_of(block), "") for path, block in sorted(repo.records.items())]
        assert list(export.records()) == expected


def test_without_a_key_the_signature_is_not_checked(repo: Repo, file: Path) -> None:
    with open_export(write(file, repo.export()), None, DEFAULT_LIMITS) as export:
        assert export.signed is None


def test_the_order_of_blocks_does_not_matter(repo: Repo, file: Path) -> None:
    header, *sections = repo.export()
    with open_export(write(file, [header, *reversed(sections)]), KEY.public, DEFAULT_LIMITS) as export:
        assert len(list(export.records())) == 200


def test_another_key_is_refused(repo: Repo, file: Path) -> None:
    write(file, repo.export())
    other = PrivateKey.from_seed("p256", b"other").public
    with (
        pytest.raises(UpstreamError, match=Rejection.SIGNATURE_INVALID),
        open_export(file, other, DEFAULT_LIMITS),
    ):
        pass


def whole(file: Path) -> bool:
    try:
        with open_export(file, None, DEFAULT_LIMITS) as export:
            return not export.missing
    except (UpstreamError, MissingNodeError):
        return False


def test_every_byte_counts(repo: Repo, file: Path) -> None:
    export = b"".join(repo.export())
    assert whole(write(file, [export]))
    for at in range(0, len(export), 97):
        assert not whole(write(file, [export[:at], bytes([export[at] ^ 0x10]), export[at + 1 :]])), at


def test_a_file_that_ends_early_is_not_whole(repo: Repo, file: Path) -> None:
    *_, last = sections = list(repo.export())
    for kept in range(2, len(sections), 20):
        write(file, sections[:kept])
        with pytest.raises(MissingNodeError), open_export(file, None, DEFAULT_LIMITS):
            pass
    with open_export(write(file, sections[:-1]), None, DEFAULT_LIMITS) as export:
        assert export.missing == 1
        assert [record.problem for record in export.records() if record.problem] == ["missing"]
    assert refusal(write(file, [*sections[:-1], last[:-1]])).reason is Rejection.CAR_MALFORMED


def test_records_that_strict_dag_cbor_refuses_are_explained(file: Path) -> None:
    repo = Repo(DID, KEY, "3jzfcijpj2z2a")
    blocks = {"com.example.note/bad": NOT_STRICT, "com.example.note/float": FLOAT}
    repo.write([Write.create(path, block) for path, block in blocks.items()], KEY, "3jzfcijpj2z2b")
    with open_export(write(file, repo.export()), KEY.public, DEFAULT_LIMITS) as export:
        problems = {record.path: record.problem for record in export.records()}
    assert problems["com.example.note/bad"].startswith("not-dag-cbor: CBOR (a map with the keys 'b', 'a')")
    assert problems["com.example.note/float"]


def test_a_commit_that_strict_dag_cbor_refuses_is_explained(file: Path) -> None:
    write(file, [car_header(cid_of(NOT_STRICT)), car_section(cid_of(NOT_STRICT), NOT_STRICT)])
    error = refusal(file)
    assert error.reason is Rejection.COMMIT_MALFORMED
    assert "CBOR (a map with the keys 'b', 'a')" in error.detail


def test_a_root_that_is_not_there_is_named(file: Path) -> None:
    assert refusal(write(file, [car_header(cid_of(b"x")), car_section(cid_of(b"\xa0"), b"\xa0")])).reason is (
        Rejection.COMMIT_MISSING
    )


def test_limits_hold(repo: Repo, file: Path) -> None:

    write(file, repo.export())
    for limits in (replace(DEFAULT_LIMITS, repo_blocks=100), replace(DEFAULT_LIMITS, repo_bytes=10_000)):
        with pytest.raises(UpstreamError, match="over"), open_export(file, None, limits):
            pass


@pytest.mark.parametrize("name", ["repos/atproto.dart/repo.car", "repos/php-car/repo.car", "jetstream-corpus/repo.car"])
def test_real_exports_are_whole(name: str) -> None:
    with open_export(vectors(name), None, DEFAULT_LIMITS) as export:
        records = list(export.records())
        assert len(records) == export.count > 20
        assert export.missing == 0
