import ast
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from indexer.monitoring.log import printable
from indexer.monitoring.log_events import LOG_EVENTS
from tests.source_code import source_calls

ROOT = Path(__file__).parents[2]
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}


def run_program(program: str, *, stderr: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, because logging is configured once per process."""
    return subprocess.run(
        [sys.executable, "-c", "from indexer.monitoring.log import configure_logging\n" + program],
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
structlog.get_logger("indexer.relay").info("relay.lost", relay="wss://one.example", error=ValueError("no"))
logging.getLogger("some.library").warning("connected to %s", "port", extra={"host": "one.example"})
warnings.warn("old", stacklevel=1)
structlog.get_logger("indexer.relay").debug("relay.info")
logging.getLogger("alembic").info("Running upgrade")
logging.getLogger("asyncpg.pool").warning("Failed to restore the pool connection floor; retrying")
"""
    )
    assert result.stdout == ""
    own, library, warning = map(json.loads, result.stderr.splitlines())
    assert own.items() >= {
        ("event", "relay.lost"),
        ("level", "info"),
        ("logger", "indexer.relay"),
        ("relay", "wss://one.example"),
        ("error", "no"),
    }
    assert library.items() >= {("event", "connected to port"), ("level", "warning"), ("host", "one.example")}
    assert own.keys() >= {"timestamp"} <= library.keys()
    assert "old" in warning["event"]


@pytest.mark.slow
def test_traceback_is_part_of_its_log_line() -> None:
    result = run_program(
        """
import structlog
configure_logging("json", "info")
try:
    1 / 0
except ZeroDivisionError:
    structlog.get_logger("x").exception("relay.error")
"""
    )
    (line,) = map(json.loads, result.stderr.splitlines())
    assert line["exception"][0]["exc_type"] == "ZeroDivisionError"


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


FAILURE_PATHS = {
    "traceback of this program": "structlog.get_logger('x').exception('relay.error')",
    "traceback of a library": "logging.getLogger('asyncio').error('Task failed', exc_info=True)",
    "error as a value": "structlog.get_logger('x').error('relay.error', error=error, cause=[str(error), {'e': error}])",
    "named field": "structlog.get_logger('x').error('relay.error', password=password, headers={'x-api-key': password})",
    "message of a library": "logging.getLogger('y').warning('retry %s', error)",
    "warning": "warnings.warn(str(error), stacklevel=1)",
    "uncaught exception": "sys.excepthook(*sys.exc_info())",
    "uncaught exception of a thread": "threading.excepthook("
    "threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))",
    "exception of a finalizer": "Finalized(error)",
}
SECRET_FORMS = {
    "password": "f'connect(user=me, password={password!r}, sslpassword={password})'",
    "token": "f'refused: Authorization: Bearer {password}'",
    "DSN": "f'no route to postgresql://me:{password}@db.example:5432/x?sslpassword={password}&application_name=a'",
}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["json", "console"])
@pytest.mark.parametrize("path", FAILURE_PATHS)
def test_no_failure_path_logs_a_secret(form: str, path: str) -> None:
    program = f"""
import logging, structlog, sys, threading, warnings
configure_logging({form!r}, "info")
def connect(password):
    for text in ({", ".join(SECRET_FORMS.values())}):
        try:
            raise OSError("cannot open it: " + text)
        except OSError as error:
            {FAILURE_PATHS[path]}
class Finalized:
    def __init__(self, error):
        self.error = error
    def __del__(self):
        raise self.error
connect("hunter2" + "x" * 8)
"""
    errors = run_program(program).stderr
    assert "hunter2x" not in errors
    assert "***" in errors
    assert not re.search(r"\blocals\b", errors)


@pytest.mark.parametrize("text", ["plain", "größer", "日本"])
def test_printable_returns_plain_text_unchanged(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize("text", ["a\nb", "\x1b[31m", "\u202egnp.exe", "\x9b"])
def test_printable_escapes_control_characters(text: str) -> None:
    assert printable(text).isprintable()


class LoggedCall(NamedTuple):
    """A call `log.<level>(event, …)` in the package."""

    event: str
    level: str
    fields: tuple[str, ...]
    module: str


def logged_calls() -> Iterator[LoggedCall]:
    """Yield every call that logs. Its event must be a literal, and its fields must be named in the call."""
    for module, _function, call in source_calls():
        if (
            isinstance(call.func, ast.Attribute)
            and isinstance(call.func.value, ast.Name)
            and call.func.value.id == "log"
            and call.func.attr in LEVELS
        ):
            names = ["exception" if keyword.arg == "exc_info" else keyword.arg or "**" for keyword in call.keywords]
            yield LoggedCall(ast.literal_eval(call.args[0]), call.func.attr, tuple(names), module)


def test_code_logs_exactly_the_listed_events() -> None:
    assert {call.event for call in logged_calls()} == set(LOG_EVENTS)


def test_every_event_has_the_listed_fields_in_each_call() -> None:
    calls = [call for call in logged_calls() if sorted(call.fields) != sorted(LOG_EVENTS[call.event].fields)]
    assert calls == []


def test_every_event_has_the_listed_levels() -> None:
    used: dict[str, set[str]] = {event: set() for event in LOG_EVENTS}
    for call in logged_calls():
        used[call.event].add(call.level)
    assert used == {name: set(event.levels) for name, event in LOG_EVENTS.items()}


def test_no_event_about_a_single_repo_or_handle_is_above_the_level_debug() -> None:
    """Each of millions of repos can cause such an event."""
    single = {name: event.levels for name, event in LOG_EVENTS.items() if {"did", "handle"} & set(event.fields)}
    assert set(single.values()) == {("debug",)}, single


def test_every_event_says_in_sentences_what_happened_and_what_happens_next() -> None:
    for name, event in LOG_EVENTS.items():
        for text in (event.happened, event.then):
            assert text[0].isupper() or text[0] == "`", name
            assert text.endswith("."), name
