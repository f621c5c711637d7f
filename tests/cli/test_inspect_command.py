import subprocess
import sys
from pathlib import Path

import pytest

from indexer.atproto.cid import cid_text
from indexer.atproto.crypto import PrivateKey
from indexer.localnet.local_repo import LocalRepo, Write
from tests.cli.command_line import PROJECT, error_line, run_indexer
from tests.cli.stored_account import CID, DID, NOTE, REV

pytestmark = pytest.mark.slow

KEY = PrivateKey.from_seed("k256", b"cli")
OTHER_KEY = PrivateKey.from_seed("p256", b"other").public.did_key()


@pytest.fixture
def export(tmp_path: Path) -> Path:
    return write_export(tmp_path / "repo.car", [Write.create("com.example.note/one", NOTE)])


def write_export(file: Path, writes: list[Write]) -> Path:
    repo = LocalRepo(DID, KEY, "3jzfcijpj2z2a")
    repo.write(writes, KEY, REV)
    file.write_bytes(b"".join(repo.export()))
    return file


def test_valid_export_is_listed(export: Path) -> None:
    result = run_indexer("inspect", str(export), "--key", KEY.public.did_key())
    assert (result.returncode, result.stderr) == (0, "")
    head, _, records = result.stdout.partition("\n\n")
    assert f"did        {DID}\n" in head
    assert head.endswith("signature  valid")
    assert records == f"{cid_text(CID)} com.example.note/one\n"


def test_signature_is_not_checked_without_a_key(export: Path) -> None:
    assert "signature  not checked" in run_indexer("inspect", str(export)).stdout


def test_invalid_export_is_rejected_with_the_reason(export: Path) -> None:
    export.write_bytes(export.read_bytes()[:-1])
    result = run_indexer("inspect", str(export))
    assert result.returncode == 1
    assert error_line(result).startswith(f"{export} is invalid: export-incomplete: ")
    export.write_bytes(b"")
    assert run_indexer("inspect", str(export), "--key", OTHER_KEY).returncode == 1


def test_signature_of_another_key_is_rejected(export: Path) -> None:
    result = run_indexer("inspect", str(export), "--key", OTHER_KEY)
    assert result.returncode == 1
    assert error_line(result) == f"{export} is invalid: signature-invalid"


def test_malformed_key_is_a_bad_argument(export: Path) -> None:
    result = run_indexer("inspect", str(export), "--key", "did:key:nonsense")
    assert result.returncode == 2
    assert error_line(result).startswith("Invalid value for '--key': ")


def test_closed_output_pipe_is_not_reported_as_an_error(tmp_path: Path) -> None:
    export = write_export(tmp_path / "repo.car", [Write.create(f"com.example.note/{n}", NOTE) for n in range(3_000)])
    process = subprocess.Popen(
        [sys.executable, "-m", "indexer", "inspect", str(export)],
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(30) == 1
        assert process.stderr.read() == b""
