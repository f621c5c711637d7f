import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import pytest

from indexer import __version__
from indexer.cli.main import COMMANDS, load_command, main
from tests.cli.command_line import PROJECT, Session, environment_without_settings, error_line
from tests.cli.stored_account import DID

FULL_HELP = "Usage: indexer [OPTIONS] [COMMAND]"
WITHOUT_JSON = {"run", "demo", "completion", "export", "lexicon types"}
"""Commands that print no data, or print it in a format that their options choose."""


def leaf_commands(commands: Mapping[str, click.Command], prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    """Yield the commands that are not groups, with the words of their names."""
    for name, found in commands.items():
        if isinstance(found, click.Group):
            yield from leaf_commands(found.commands, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", found


def test_every_command_has_help_and_one_that_prints_data_has_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = dict(leaf_commands({name: load_command(name) for name in COMMANDS}))
    for name in found:
        assert main([*name.split(), "--help"]) == 0
        assert "--config" in capsys.readouterr().out
    with_json = {name for name, command in found.items() for option in command.params if option.name == "as_json"}
    assert found.keys() - with_json == WITHOUT_JSON


SLOW_LIBRARIES = {
    *("aiohttp", "alembic", "asyncpg", "coincurve", "cryptography", "dns", "multiformats", "prometheus_client"),
    *("pydantic", "rich", "sqlalchemy", "structlog"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "arguments", "expected"),
    [
        ({}, ["--version"], f"indexer, version {__version__}\nnative core: "),
        ({}, [], FULL_HELP),
        ({"_INDEXER_COMPLETE": "bash_complete", "COMP_WORDS": "indexer mi", "COMP_CWORD": "1"}, [], "plain,migrate\n"),
    ],
    ids=["version", "help", "completion"],
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
        cwd=PROJECT, env=environment_without_settings() | variables, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (result.returncode, result.stderr.strip()) == (0, "")
    assert result.stdout.startswith(expected)


@pytest.mark.parametrize(
    "arguments",
    [
        "fly", "run --fast", "run now", "cursor", "inspect", "inspect absent.car", "demo --seconds many",
        *(f"demo --serve {address}" for address in ("127.0.0.1", "localhost:0", "localhost:65001", ":2470")),
        "add", f"add {DID} --file {__file__}", f"add {DID} -", "add someone.example",
        "resync", f"resync {DID} --all", "resync someone.example",
        "repo nobody", "record https://example.com", f"record at://{DID}", f"record at://{DID}/com.example.note/..",
        "discover --relay https://a.example --pds https://b.example", "discover --relay a.example",
        "discover --hosts --pds https://a.example", "discover --hosts --collection com.example.note",
        "discover --pds https://a.example/xrpc", "discover --pds https://[::1", "discover --collection notes",
        f"audit {DID} --sample 5", "audit --sample 0", "audit someone.example", "export --collection notes",
        *(f"cursor reset wss://a.example --yes --to={to}" for to in ("yesterday", "-1", "1" * 30, 2**63)),
        "rejected --reason nonsense", "rejected --did someone.example", "rejected --limit 0", "rejected show",
        "rejected show one", f"rejected show {2**63}", "rejected replay", "rejected replay 1 --reason future-rev",
        "lexicon add nowhere.json", "lexicon add ./like", "lexicon add one.two",
    ],
)  # fmt: skip
def test_bad_argument_is_reported_in_one_line_before_anything_is_opened(
    arguments: str, session_without_database: Session
) -> None:
    result = session_without_database(*arguments.split())
    assert result.returncode == 2
    assert error_line(result)


@pytest.mark.parametrize(
    ("command", "instead"),
    [("backup f", "pg_dump"), ("restore f", "pg_restore"), ("sweep", "resync --behind")],
)
def test_removed_command_says_what_to_use_instead(
    command: str, instead: str, session_without_database: Session
) -> None:
    result = session_without_database(*command.split())
    assert result.returncode == 2
    assert instead in error_line(result)


def test_bad_settings_are_reported_in_one_line(session_without_database: Session, tmp_path: Path) -> None:
    session = session_without_database
    file = tmp_path / "bad.toml"
    file.write_text("shard = '9/4'")
    for arguments in (["--config", str(file), "run"], ["run", "--config", str(file)]):
        result = session(*arguments)
        assert result.returncode == 2
        assert error_line(result).startswith(f"'shard' in {file}: '9/4' is not allowed")
    (tmp_path / "some.car").touch()
    session.configure(INDEXER_RESYNC_WORKERS="many")
    expected = "INDEXER_RESYNC_WORKERS: 'many' is not allowed; it must be a whole number from 1 to 1000"
    assert error_line(session("inspect", f"{tmp_path}/some.car")) == expected
    session.configure(INDEXER_LOG_FORMAT="loud")
    assert error_line(session("demo")).startswith("INDEXER_LOG_FORMAT: 'loud' is not allowed")


def test_control_characters_in_an_argument_are_escaped_in_the_error(session_without_database: Session) -> None:
    result = session_without_database("inspect", "a\n\x1b[2Jb.car")
    assert result.returncode == 2
    assert error_line(result).isprintable()
