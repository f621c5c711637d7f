import ast
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from indexer.monitoring.log import LOG_EVENTS, printable
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
logging.getLogger("websockets").info("GET /")
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


@pytest.mark.parametrize("text", ["plain", "größer", "日本"])
def test_printable_returns_plain_text_unchanged(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize("text", ["a\nb", "\x1b[31m", "\u202egnp.exe", "\x9b"])
def test_printable_escapes_control_characters(text: str) -> None:
    assert printable(text).isprintable()


def logged_events() -> set[str]:
    """Return the first argument of every call `log.<level>(…)` in the package."""
    return {
        ast.literal_eval(call.args[0])
        for _module, _function, call in source_calls()
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in LEVELS
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "log"
    }


def test_code_logs_exactly_the_listed_events() -> None:
    assert logged_events() == set(LOG_EVENTS)
