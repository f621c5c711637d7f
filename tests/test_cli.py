import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from indexer import __version__
from indexer.atproto.cid import cid_of, cid_text
from indexer.atproto.crypto import PrivateKey
from indexer.cli import commands, main
from indexer.localnet.repo import Repo, Write

ROOT = Path(__file__).parents[1]
DID = "did:plc:" + "a" * 24
KEY = PrivateKey.from_seed("k256", b"cli")
NOTE = b"\xa1\x65$type\x70com.example.note"


def indexer(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The program as a user runs it."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("INDEXER_")}
    return subprocess.run(
        [sys.executable, "-m", "indexer", *arguments],
        cwd=ROOT,
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def complaint(result: subprocess.CompletedProcess[str]) -> str:
    """The one line on stderr, with nothing on stdout."""
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("indexer: ")
    return line.removeprefix("indexer: ")


@pytest.fixture
def export(tmp_path: Path) -> Path:
    repo = Repo(DID, KEY, "3jzfcijpj2z2a")
    repo.write([Write.create("com.example.note/one", NOTE)], KEY, "3jzfcijpj2z2b")
    file = tmp_path / "repo.car"
    file.write_bytes(b"".join(repo.export()))
    return file


def test_the_program_and_every_command_have_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    for name, command in commands.commands.items():
        assert name in page
        assert isinstance(command, click.Command)
        assert main([name, "--help"]) == 0
        assert "--config" in capsys.readouterr().out


def test_the_version() -> None:
    result = indexer("--version")
    assert (result.returncode, result.stdout) == (0, f"indexer, version {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "Missing command; see indexer --help"),
        (["fly"], "No such command 'fly'; see indexer --help"),
        (["run", "--fast"], "No such option '--fast'; see indexer run --help"),
        (["run", "now"], "Got unexpected extra argument (now); see indexer run --help"),
        (["inspect"], "Missing argument 'FILE.car'; see indexer inspect --help"),
        (["demo", "--seconds", "many"], "Invalid value for '--seconds': 'many' is not a valid float range; see"),
    ],
)
def test_a_bad_argument_costs_one_line(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.startswith(f"indexer: {expected}")
    assert written.err.count("\n") == 1


def test_bad_settings_stop_every_command_with_one_line(export: Path, tmp_path: Path) -> None:
    result = indexer("inspect", str(export), INDEXER_RESYNC_WORKERS="many")
    assert result.returncode == 2
    assert (
        complaint(result) == "INDEXER_RESYNC_WORKERS: 'many' is not allowed; it must be a whole number from 1 to 1000"
    )
    (tmp_path / "bad.toml").write_text("shard = '9/4'")
    for arguments in (["--config", f"{tmp_path}/bad.toml", "run"], ["run", "--config", f"{tmp_path}/bad.toml"]):
        result = indexer(*arguments)
        assert result.returncode == 2
        assert complaint(result).startswith(f"'shard' in {tmp_path}/bad.toml: '9/4' is not allowed")


def test_what_others_chose_cannot_forge_lines(tmp_path: Path) -> None:
    result = indexer("inspect", str(tmp_path / "a\n\x1b[2Jb.car"))
    assert result.returncode == 2
    assert complaint(result).isprintable()


def test_inspect_lists_a_valid_export(export: Path) -> None:
    result = indexer("inspect", str(export), "--key", KEY.public.did_key())
    assert (result.returncode, result.stderr) == (0, "")
    head, _, listing = result.stdout.partition("\n\n")
    assert f"did        {DID}\n" in head
    assert head.endswith("signature  valid")
    assert listing == f"{cid_text(cid_of(NOTE))} com.example.note/one\n"


def test_inspect_says_that_it_did_not_check_a_signature(export: Path) -> None:
    assert "signature  not checked" in indexer("inspect", str(export)).stdout


def test_inspect_refuses_an_invalid_export_with_the_reason(export: Path) -> None:
    export.write_bytes(export.read_bytes()[:-1])
    result = indexer("inspect", str(export))
    assert result.returncode == 1
    assert complaint(result) == f"{export} is invalid: export-incomplete: cut inside a block"
    other = PrivateKey.from_seed("p256", b"other").public.did_key()
    export.write_bytes(b"")
    assert indexer("inspect", str(export), "--key", other).returncode == 1


def test_inspect_tells_a_key_of_another_account(export: Path) -> None:
    other = PrivateKey.from_seed("p256", b"other").public.did_key()
    result = indexer("inspect", str(export), "--key", other)
    assert result.returncode == 1
    assert complaint(result) == f"{export} is invalid: signature-invalid"


def test_inspect_refuses_what_is_no_key(export: Path) -> None:
    result = indexer("inspect", str(export), "--key", "did:key:nonsense")
    assert result.returncode == 2
    assert complaint(result).startswith("Invalid value for --key: ")


def test_a_reader_that_has_had_enough_is_no_error(export: Path) -> None:
    repo = Repo(DID, KEY, "3jzfcijpj2z2a")
    repo.write([Write.create(f"com.example.note/{n}", NOTE) for n in range(3_000)], KEY, "3jzfcijpj2z2b")
    export.write_bytes(b"".join(repo.export()))
    process = subprocess.Popen(
        [sys.executable, "-m", "indexer", "inspect", str(export)],
        cwd=ROOT,
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
