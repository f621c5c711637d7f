"""Run commands as a user does, or in the test process."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from indexer.cli.main import main

PROJECT = Path(__file__).parents[2]


def run_indexer(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the program in a process of its own, with no other INDEXER_ variables than the given ones."""
    return subprocess.run(
        [sys.executable, "-m", "indexer", *arguments],
        cwd=PROJECT,
        env=environment_without_settings() | environment,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def environment_without_settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("INDEXER_")}


def error_line(result: subprocess.CompletedProcess[str]) -> str:
    """Return the only line on stderr, without the program's name. There must be nothing on stdout."""
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("indexer: ")
    return line.removeprefix("indexer: ")


class Session:
    """Runs commands in the test process. The settings come from the environment."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch

    def configure(self, **environment: str) -> None:
        """Set environment variables for the following commands."""
        for name, value in environment.items():
            self._monkeypatch.setenv(name, value)

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        self._capsys.readouterr()
        code = main(arguments)
        output = self._capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, output.out, output.err)

    async def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a thread, beside the servers of an asynchronous test."""
        return await asyncio.to_thread(self, *arguments)
