import ast
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from indexer.log import ACTIONS, printable

ROOT = Path(__file__).parents[1]
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}


def written(program: str, *, stderr: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """Logging is the process's own, so each test has a process."""
    return subprocess.run(
        [sys.executable, "-c", "from indexer.log import configure_logging\n" + program],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        check=True,
        cwd=ROOT,
    )


def test_our_lines_and_the_libraries_have_one_form_on_stderr() -> None:
    result = written(
        """
import logging, structlog, warnings
configure_logging("json", "info")
structlog.get_logger("indexer.relay").info("relay.lost", relay="wss://one.example", error=ValueError("no"))
logging.getLogger("somebody.else").warning("told %s", "you", extra={"host": "one.example"})
warnings.warn("old", stacklevel=1)
structlog.get_logger("indexer.relay").debug("relay.info")
logging.getLogger("websockets").info("GET /")
"""
    )
    assert result.stdout == ""
    ours, theirs, warning = map(json.loads, result.stderr.splitlines())
    assert ours.items() >= {
        ("event", "relay.lost"),
        ("level", "info"),
        ("logger", "indexer.relay"),
        ("relay", "wss://one.example"),
        ("error", "no"),
    }
    assert theirs.items() >= {("event", "told you"), ("level", "warning"), ("host", "one.example")}
    assert ours.keys() >= {"timestamp"} <= theirs.keys()
    assert "old" in warning["event"]


def test_a_traceback_is_part_of_its_line() -> None:
    result = written(
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


def test_auto_is_json_off_a_terminal_and_console_on_one() -> None:
    program = "import structlog\nconfigure_logging()\nstructlog.get_logger('x').info('relay.info', name='hello')"
    assert json.loads(written(program).stderr)["name"] == "hello"
    terminal, inner = pty.openpty()
    written(program, stderr=inner)
    os.close(inner)
    with os.fdopen(terminal, "rb", buffering=0) as screen:
        assert b"hello" in (line := screen.read(4_096))
        assert not line.startswith(b"{")


def test_nothing_that_others_send_can_steer_a_terminal() -> None:
    result = written(
        "import structlog\nconfigure_logging('console')\n"
        "structlog.get_logger('x').info('relay.info', message='\\x1b[2J\\x9b31m\\nforged line')"
    )
    assert "\x1b[2J" not in result.stderr
    assert "\x9b" not in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("text", ["plain", "größer", "日本"])
def test_printable_leaves_plain_text_alone(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize("text", ["a\nb", "\x1b[31m", "\u202egnp.exe", "\x9b"])
def test_printable_escapes_the_rest(text: str) -> None:
    assert printable(text).isprintable()


def logged() -> set[str]:
    """The first argument of every call `log.<level>(…)` in the program."""
    calls = [
        node
        for file in (ROOT / "indexer").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
    ]
    return {
        ast.literal_eval(call.args[0])
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in LEVELS
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "log"
    }


def test_log_lines_have_one_vocabulary() -> None:
    assert logged() == set(ACTIONS)
