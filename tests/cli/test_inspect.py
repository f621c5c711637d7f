import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from indexer.atproto.cid import cid_of, cid_text
from indexer.atproto.crypto import PrivateKey, PublicKey
from indexer.atproto.limits import DEFAULT_LIMITS, Limits
from indexer.atproto.mst import MissingNodeError
from indexer.atproto.record import Problem
from indexer.cli.inspect import InspectedRecord, open_export
from indexer.demo.local_repo import LocalRepo, Write, car_header, car_section
from indexer.errors import UnavailableError, UpstreamError
from indexer.reasons import FetchFailure, Rejection
from tests.cli.command_line import PROJECT, Session, error_line
from tests.vectors import vectors

DID = "did:plc:" + "a" * 24
KEY = PrivateKey.from_seed("k256", b"inspection")
OTHER_KEY = PrivateKey.from_seed("p256", b"other").public
FLOAT = b"\xa1\x61x\xfb\x3f\xf8\x00\x00\x00\x00\x00\x00"
NOTES = 200
NOT_STRICT = b"\xa2\x61b\x01\x61a\x01"  # a map with keys out of order


@pytest.fixture
def repo() -> LocalRepo:
    repo = LocalRepo(DID, KEY, "3jzfcijpj2z2a")
    writes = [
        Write.create(f"com.example.note/{number:03}", {"$type": "com.example.note", "n": number})
        for number in range(NOTES)
    ]
    repo.write(writes, KEY, "3jzfcijpj2z2b")
    return repo


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "repo.car"


def write(file: Path, sections: Iterable[bytes]) -> Path:
    file.write_bytes(b"".join(sections))
    return file


def list_records(file: Path, key: PublicKey | None = None, limits: Limits = DEFAULT_LIMITS) -> list[InspectedRecord]:
    with open_export(file, key, limits) as export:
        records = list(export.records)
        assert export.total == len(records)
        return records


def rejection_of(file: Path, key: PublicKey | None = None, limits: Limits = DEFAULT_LIMITS) -> UpstreamError:
    with pytest.raises(UpstreamError) as raised:
        list_records(file, key, limits)
    return raised.value


def test_complete_export_is_listed_in_path_order(repo: LocalRepo, file: Path) -> None:
    write(file, repo.export())
    expected = [InspectedRecord(path, cid_of(block), "") for path, block in sorted(repo.records.items())]
    assert list_records(file, KEY.public) == expected
    with open_export(file, None, DEFAULT_LIMITS) as export:
        assert (export.commit.did, export.commit.rev, export.commit.cid) == (DID, repo.head.rev, repo.head.cid)


def test_the_order_of_blocks_does_not_matter(repo: LocalRepo, file: Path) -> None:
    header, *sections = repo.export()
    assert len(list_records(write(file, [header, *reversed(sections)]))) == NOTES


def is_complete(file: Path) -> bool:
    try:
        return not any(record.problem for record in list_records(file))
    except (UpstreamError, UnavailableError):
        return False


@pytest.mark.slow
def test_change_of_any_byte_is_found(repo: LocalRepo, file: Path) -> None:
    export = b"".join(repo.export())
    assert is_complete(write(file, [export]))
    for at in range(0, len(export), 97):
        assert not is_complete(write(file, [export[:at], bytes([export[at] ^ 0x10]), export[at + 1 :]])), at


def test_truncated_file_is_incomplete(repo: LocalRepo, file: Path) -> None:
    *_, last = sections = list(repo.export())
    for count in range(2, len(sections), 20):
        with pytest.raises(MissingNodeError):
            list_records(write(file, sections[:count]))
    problems = [record.problem for record in list_records(write(file, sections[:-1]))]
    assert problems == [""] * (NOTES - 1) + ["missing"]
    with pytest.raises(UnavailableError, match=FetchFailure.EXPORT_INCOMPLETE):
        list_records(write(file, [*sections[:-1], last[:-1]]))


def test_records_that_are_not_strict_dag_cbor_are_explained(file: Path) -> None:
    repo = LocalRepo(DID, KEY, "3jzfcijpj2z2a")
    blocks = {"com.example.note/bad": NOT_STRICT, "com.example.note/float": FLOAT}
    repo.write([Write.create(path, block) for path, block in blocks.items()], KEY, "3jzfcijpj2z2b")
    bad, unusual = list_records(write(file, repo.export()), KEY.public)
    assert bad.problem.startswith("not-dag-cbor: the key before byte")
    assert unusual.problem == Problem.NUMBER


@pytest.mark.parametrize(
    ("block", "reason", "words"),
    [
        (NOT_STRICT, Rejection.COMMIT_MALFORMED, "the key before byte"),
        (b"\xa1\x61", Rejection.COMMIT_MALFORMED, "the data ends"),
        (None, Rejection.COMMIT_MISSING, ""),
    ],
)
def test_bad_commit_is_explained(block: bytes | None, reason: Rejection, words: str, file: Path) -> None:
    root = cid_of(block or b"missing")
    error = rejection_of(write(file, [car_header(root), car_section(cid_of(block or b"x"), block or b"x")]))
    assert (error.reason, words in error.detail) == (reason, True)


@pytest.mark.parametrize("limit", [{"repo_blocks": 100}, {"repo_bytes": 10_000}, {"block_bytes": 100}])
def test_limits_are_enforced(limit: dict[str, int], repo: LocalRepo, file: Path) -> None:
    error = rejection_of(write(file, repo.export()), limits=replace(DEFAULT_LIMITS, **limit))
    assert error.reason is Rejection.CAR_MALFORMED


@pytest.mark.parametrize("name", ["repos/atproto.dart/repo.car", "repos/php-car/repo.car", "jetstream-corpus/repo.car"])
def test_real_exports_are_complete(name: str) -> None:
    records = list_records(vectors(name))
    assert len(records) > 20
    assert not any(record.problem == Problem.MISSING for record in records)


def test_command_lists_a_valid_export_and_says_whether_the_signature_was_checked(
    repo: LocalRepo, file: Path, session_without_database: Session
) -> None:
    write(file, repo.export())
    result = session_without_database("inspect", str(file), "--key", KEY.public.did_key())
    assert (result.returncode, result.stderr) == (0, "")
    head, _, records = result.stdout.partition("\n\n")
    assert f"did        {DID}\n" in head
    assert head.endswith("signature  valid")
    assert records.splitlines() == [f"{cid_text(cid_of(block))} {path}" for path, block in sorted(repo.records.items())]
    assert "signature  not checked" in session_without_database("inspect", str(file)).stdout


def test_command_rejects_an_invalid_export_with_the_reason(
    repo: LocalRepo, file: Path, session_without_database: Session
) -> None:
    write(file, repo.export())
    session = session_without_database
    for key, code, expected in (
        (OTHER_KEY.did_key(), 1, f"{file} is invalid: signature-invalid"),
        ("did:key:nonsense", 2, "Invalid value for '--key': "),
    ):
        result = session("inspect", str(file), "--key", key)
        assert result.returncode == code
        assert error_line(result).startswith(expected)
    file.write_bytes(file.read_bytes()[:-1])
    result = session("inspect", str(file))
    assert result.returncode == 1
    assert error_line(result).startswith(f"{file} is invalid: export-incomplete: ")


@pytest.mark.slow
def test_closed_output_pipe_is_not_reported_as_an_error(file: Path) -> None:
    repo = LocalRepo(DID, KEY, "3jzfcijpj2z2a")
    repo.write([Write.create(f"com.example.note/{n}", FLOAT) for n in range(3_000)], KEY, "3jzfcijpj2z2b")
    write(file, repo.export())
    process = subprocess.Popen(
        [sys.executable, "-m", "indexer", "inspect", str(file)],
        cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(30) == 1
        assert process.stderr.read() == b""
