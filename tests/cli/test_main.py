import subprocess
import sys
from pathlib import Path

import click
import pytest

from indexer import __version__
from indexer.cli.main import COMMAND_MODULES, commands, main
from tests.cli.command_line import PROJECT, error_line, run_indexer

DATABASE_AND_NETWORK = {"alembic", "aiohttp", "asyncpg", "dns", "prometheus_client", "sqlalchemy", "websockets"}


def test_program_and_every_command_have_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    context = click.Context(commands)
    for name in COMMAND_MODULES:
        assert name in page
        command = commands.get_command(context, name)
        assert isinstance(command, click.Command)
        subcommands = getattr(command, "commands", {})
        for arguments in ([name], *([name, subcommand] for subcommand in subcommands)):
            assert main([*arguments, "--help"]) == 0
            assert "--config" in capsys.readouterr().out


@pytest.mark.slow
def test_version_is_printed_without_loading_database_and_network_libraries() -> None:
    program = (
        "import sys\nfrom indexer.cli.main import main\ncode = main(['--version'])\n"
        f"sys.exit(code or str({DATABASE_AND_NETWORK} & set(sys.modules) or ''))"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr.strip()) == (f"indexer, version {__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "Missing command; see indexer --help"),
        (["fly"], "No such command 'fly'; see indexer --help"),
        (["statu"], "No such command 'statu'. Did you mean 'status'?; see indexer --help"),
        (["run", "--fast"], "No such option '--fast'; see indexer run --help"),
        (["run", "now"], "Got unexpected extra argument (now); see indexer run --help"),
        (["inspect"], "Missing argument 'FILE.car'; see indexer inspect --help"),
        (["demo", "--seconds", "many"], "Invalid value for '--seconds': 'many' is not a valid float range; see"),
    ],
)
def test_bad_argument_is_reported_in_one_line(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"indexer: {expected}")
    assert output.err.count("\n") == 1


@pytest.mark.slow
def test_bad_settings_are_reported_in_one_line_by_every_command(tmp_path: Path) -> None:
    file = tmp_path / "some.car"
    file.write_bytes(b"")
    result = run_indexer("inspect", str(file), INDEXER_RESYNC_WORKERS="many")
    assert result.returncode == 2
    expected = "INDEXER_RESYNC_WORKERS: 'many' is not allowed; it must be a whole number from 1 to 1000"
    assert error_line(result) == expected
    (tmp_path / "bad.toml").write_text("shard = '9/4'")
    for arguments in (["--config", f"{tmp_path}/bad.toml", "run"], ["run", "--config", f"{tmp_path}/bad.toml"]):
        result = run_indexer(*arguments)
        assert result.returncode == 2
        assert error_line(result).startswith(f"'shard' in {tmp_path}/bad.toml: '9/4' is not allowed")


@pytest.mark.slow
def test_control_characters_in_an_argument_are_escaped_in_the_error(tmp_path: Path) -> None:
    result = run_indexer("inspect", str(tmp_path / "a\n\x1b[2Jb.car"))
    assert result.returncode == 2
    assert error_line(result).isprintable()
