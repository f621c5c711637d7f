import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from indexer.telemetry.log import printable
from tests.source_code import source_files
from tests.telemetry.log_events import listed_events

ROOT = Path(__file__).parents[2]


def run_program(program: str, *, stderr: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, because logging is configured once per process."""
    return subprocess.run(
        [sys.executable, "-c", "from indexer.telemetry.log import configure_logging\n" + program],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        check=True,
        cwd=ROOT,
    )


@pytest.mark.slow
def test_log_lines_of_program_and_libraries_have_the_same_form_on_stderr() -> None:
    result = run_program(
        """
import logging, structlog, warnings
configure_logging("json", "info")
structlog.get_logger("indexer.net.relay").info("relay.lost", relay="wss://one.example", error=ValueError("no"))
logging.getLogger("some.library").warning("connected to %s", "port", extra={"host": "one.example"})
warnings.warn("old", stacklevel=1)
structlog.get_logger("indexer.net.relay").debug("relay.info")
logging.getLogger("alembic").info("Running upgrade")
logging.getLogger("asyncpg.pool").warning("Failed to restore the pool connection floor; retrying")
try:
    1 / 0
except ZeroDivisionError:
    structlog.get_logger("x").exception("relay.error")
"""
    )
    assert result.stdout == ""
    own, library, warning, failure = map(json.loads, result.stderr.splitlines())
    assert own.items() >= {
        ("event", "relay.lost"),
        ("level", "info"),
        ("logger", "indexer.net.relay"),
        ("relay", "wss://one.example"),
        ("error", "no"),
    }
    assert library.items() >= {("event", "connected to port"), ("level", "warning"), ("host", "one.example")}
    assert own.keys() >= {"timestamp"} <= library.keys()
    assert "old" in warning["event"]
    assert failure["exception"][0]["exc_type"] == "ZeroDivisionError"


@pytest.mark.slow
def test_auto_format_is_console_on_a_terminal_and_json_elsewhere() -> None:
    program = "import structlog\nconfigure_logging()\nstructlog.get_logger('x').info('relay.info', name='hello')"
    assert json.loads(run_program(program).stderr)["name"] == "hello"
    terminal, inner = pty.openpty()
    run_program(program, stderr=inner)
    os.close(inner)
    with os.fdopen(terminal, "rb", buffering=0) as screen:
        assert b"hello" in (line := screen.read(4_096))
        assert not line.startswith(b"{")


@pytest.mark.slow
def test_values_from_other_hosts_cannot_control_the_terminal() -> None:
    result = run_program(
        "import structlog\nconfigure_logging('console')\n"
        "structlog.get_logger('x').info('relay.info', message='\\x1b[2J\\x9b31m\\nforged line')"
    )
    assert "\x1b[2J" not in result.stderr
    assert "\x9b" not in result.stderr
    assert len(result.stderr.splitlines()) == 1


FAILURE_PATHS = [
    "structlog.get_logger('x').exception('relay.error')",
    "logging.getLogger('asyncio').error('Task failed', exc_info=True)",
    "structlog.get_logger('x').error('relay.error', error=error, cause=[str(error), {'e': error}])",
    "structlog.get_logger('x').error('relay.error', password=password, headers={'x-api-key': password})",
    "logging.getLogger('y').warning('retry %s', error)",
    "warnings.warn(str(error), stacklevel=1)",
    "sys.excepthook(*sys.exc_info())",
    "threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))",
    "Finalized(error)",
]
"""Log a traceback, an error, a field, a message or a warning; an uncaught exception, of a thread, of a finalizer."""
SECRET_FORMS = {
    "password": "f'connect(user=me, password={password!r}, sslpassword={password})'",
    "token": "f'refused: Authorization: Bearer {password}'",
    "DSN": "f'no route to postgresql://me:{password}@db.example:5432/x?sslpassword={password}&application_name=a'",
}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["json", "console"])
def test_no_failure_path_logs_a_secret(form: str) -> None:
    program = f"""
import logging, structlog, sys, threading, warnings
configure_logging({form!r}, "info")
class Finalized:
    def __init__(self, error):
        self.error = error
    def __del__(self):
        raise self.error
def connect(password):
    for path in {FAILURE_PATHS}:
        structlog.get_logger("x").info("relay.info", next=path)
        for text in ({", ".join(SECRET_FORMS.values())}):
            try:
                raise OSError("cannot open it: " + text)
            except OSError as error:
                exec(path)
connect("hunter2" + "x" * 8)
"""
    errors = run_program(program).stderr
    assert "hunter2x" not in errors
    assert not re.search(r"\blocals\b", errors)
    lines_of_paths = re.split(r"relay\.info", errors)[1:]
    assert len(lines_of_paths) == len(FAILURE_PATHS)
    for path, lines in zip(FAILURE_PATHS, lines_of_paths, strict=True):
        assert lines.count("***") >= len(SECRET_FORMS), path


def test_printable_escapes_control_characters_only() -> None:
    for text in ("plain", "größer", "日本"):
        assert printable(text) == text
    for text in ("a\nb", "\x1b[31m", "\u202egnp.exe", "\x9b"):
        assert printable(text).isprintable()


def test_no_event_about_a_single_repo_or_handle_is_above_the_level_debug() -> None:
    """Each of millions of repos can cause such an event."""
    assert [name for name, event in listed_events().items() if {"did", "handle"} & event.fields] == []


def test_each_event_of_the_code_above_the_level_debug_is_listed_with_its_level() -> None:
    call = re.compile(r"\blog\.(info|warning|error|critical)\(\s*\"([a-z0-9.-]+)\"")
    found = {
        (name, level)
        for path in source_files("indexer")
        if path.suffix == ".py"
        for level, name in call.findall(path.read_text())
    }
    listed = {(name, level) for name, event in listed_events().items() for level in event.levels}
    assert len(found) > 40
    assert found - listed == set()
