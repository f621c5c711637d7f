import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import pytest

from indexer import __version__
from indexer.cli.command import ExitCode
from indexer.cli.json_fields import JSON_LINES
from indexer.cli.main import COMMANDS, load_command, main
from tests.cli.command_line import PROJECT, environment_without_settings, error_line, run_indexer


def test_program_and_every_command_have_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    for name, (_, short_help) in COMMANDS.items():
        assert name in page
        command = load_command(name)
        assert command.get_short_help_str(limit=1_000) == short_help
        subcommands = getattr(command, "commands", {})
        for arguments in ([name], *([name, subcommand] for subcommand in subcommands)):
            assert main([*arguments, "--help"]) == 0
            assert "--config" in capsys.readouterr().out


WITHOUT_JSON = {"run", "demo", "completion", "export"}
"""Commands that print no data, or print it in a format that their options choose."""


def leaf_commands(commands: Mapping[str, click.Command], prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    """Yield the commands that are not groups, with the words of their names."""
    for name, found in commands.items():
        if isinstance(found, click.Group):
            yield from leaf_commands(found.commands, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", found


def test_every_command_that_prints_data_has_json_with_listed_fields() -> None:
    found = dict(leaf_commands({name: load_command(name) for name in COMMANDS}))
    with_json = {name for name, command in found.items() for option in command.params if option.name == "as_json"}
    assert found.keys() - with_json == WITHOUT_JSON
    assert JSON_LINES.keys() == with_json


def test_names_of_json_fields_are_in_snake_case() -> None:
    paths = [path for lines in JSON_LINES.values() for fields in lines.values() for path in fields]
    assert [path for path in paths if not re.fullmatch(r"[a-z_]+((\[\])?\.[a-z_]+)*", path)] == []


def test_every_exit_code_has_a_meaning() -> None:
    assert all(code.text.endswith(".") for code in ExitCode)


@pytest.mark.slow
@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_output_on_a_terminal_has_colours_unless_the_user_does_not_want_them(
    no_color: str, coloured: bool, tmp_path: Path
) -> None:
    environment = {"NO_COLOR": no_color, "TERM": "xterm", "INDEXER_RESYNC_WORKERS": "many"}
    output = run_on_terminal(["doctor"], **environment)
    assert "fail" in output
    assert ("\x1b[1;31m" in output) == coloured
    assert ("\x1b[31m" in output) is False
    result = run_indexer("doctor", **environment)
    assert "\x1b" not in result.stdout, "without a terminal"


def run_on_terminal(arguments: list[str], **environment: str) -> str:
    """Run the program with a terminal as stdout; return what it wrote there."""
    terminal, stdout = os.openpty()
    program = [sys.executable, "-m", "indexer", *arguments]
    subprocess.run(
        program, cwd=PROJECT, env=environment_without_settings() | environment, stdout=stdout, check=False, timeout=60
    )
    os.close(stdout)
    output = b""
    with contextlib.suppress(OSError):  # the end of a terminal whose other side is closed
        while part := os.read(terminal, 65_536):
            output += part
    os.close(terminal)
    return output.decode()


def test_program_without_a_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    output = capsys.readouterr()
    assert main(["--help"]) == 0
    assert output.out == capsys.readouterr().out
    assert output.err == ""


SLOW_LIBRARIES = {
    *("aiohttp", "alembic", "asyncpg", "coincurve", "cryptography", "dns", "multiformats", "prometheus_client"),
    *("pydantic", "pydantic_settings", "rich", "sqlalchemy", "structlog"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "arguments", "expected"),
    [
        ({}, ["--version"], f"indexer, version {__version__}\nnative core: "),
        ({}, ["--help"], "Usage: indexer [OPTIONS] [COMMAND]"),
        ({}, [], "Usage: indexer [OPTIONS] [COMMAND]"),
        ({"_INDEXER_COMPLETE": "bash_complete", "COMP_WORDS": "indexer mi", "COMP_CWORD": "1"}, [], "plain,migrate\n"),
    ],
    ids=["version", "help", "no arguments", "completion"],
)
def test_version_help_and_completion_load_no_slow_library(
    variables: dict[str, str], arguments: list[str], expected: str
) -> None:
    program = (
        "import atexit, sys\nfrom indexer.cli.main import main\n"
        f"atexit.register(lambda: print({SLOW_LIBRARIES} & set(sys.modules) or '', file=sys.stderr))\n"
        f"sys.exit(main({arguments}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=PROJECT,
        env=environment_without_settings() | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr.strip()) == (0, "")
    assert result.stdout.startswith(expected)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["fly"], "No such command 'fly'; see indexer --help"),
        (["statu"], "No such command 'statu'. Did you mean 'status'?; see indexer --help"),
        (["run", "--fast"], "No such option '--fast'; see indexer run --help"),
        (["run", "now"], "Got unexpected extra argument (now); see indexer run --help"),
        (["cursor"], "Missing command; see indexer cursor --help\n"),
        (["inspect"], "Missing argument 'FILE.car'; see indexer inspect --help"),
        (["demo", "--seconds", "many"], "Invalid value for '--seconds': 'many' is not a valid number; see"),
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
    result = run_indexer("demo", INDEXER_LOG_FORMAT="loud")
    assert result.returncode == 2
    assert error_line(result) == "INDEXER_LOG_FORMAT: 'loud' is not allowed; it must be json, console, or auto"
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
