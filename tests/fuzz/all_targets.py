"""Fuzz all targets, two at a time."""

import importlib.util
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import click

from tests.fuzz.corpus import open_corpus
from tests.fuzz.targets import TARGETS

PROCESSES = 2
ROUND_SECONDS = 300
"""Seconds for each target and round, if the run has no end."""


def fuzz_all(seconds: int, corpus: Path | None) -> int:
    """Fuzz all targets for so many seconds in all; without an end, if that is 0, until one has a finding.

    All rounds continue with the same corpus.

    Returns:
        The exit code: 0, or 1 if a target had a finding.
    """
    names = [name for name, row in TARGETS.items() if row.needs != "native core" or has_native_core()]
    for name in sorted(TARGETS.keys() - set(names)):
        click.echo(f"NOT FUZZED: {name}, because the native core is not built")
    share = max(1, seconds * PROCESSES // len(names)) if seconds else ROUND_SECONDS
    with open_corpus(corpus, seconds) as directory, ThreadPoolExecutor(PROCESSES) as threads:
        for _ in range(1) if seconds else count():
            if any(list(threads.map(lambda name: _fuzz(name, share, directory), names))):
                return 1
    return 0


def has_native_core() -> bool:
    """Return True if the native core is installed."""
    return importlib.util.find_spec("atproto_indexer_native") is not None


def _fuzz(name: str, seconds: int, corpus: Path) -> int:
    """Fuzz one target in a process of its own; print its last report, or everything if it fails."""
    command = [sys.executable, "-m", "tests.fuzz", "--target", name, "--seconds", str(seconds), "--corpus", str(corpus)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    reports = [line for line in ended.stdout.splitlines() if line.startswith(f"{name}: ")]
    click.echo(ended.stdout if ended.returncode else (reports or [f"{name}: no report"])[-1])
    return ended.returncode
