"""The files of the previous release, out of the history of this repository."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command_line import PROJECT


def previous_commit() -> str:
    lines = (PROJECT / "tests" / "previous_release.txt").read_text().splitlines()
    [commit] = [line for line in lines if line and not line.startswith("#")]
    return commit


def unpack_previous_release(parent: Path) -> Path:
    """Return a new directory with the files of the previous release; skip the test if it cannot run here."""
    git = ["git", "-C", str(PROJECT)]
    commit = previous_commit()
    if subprocess.run([*git, "cat-file", "-e", f"{commit}^{{commit}}"], capture_output=True, check=False).returncode:
        pytest.skip(f"this clone does not contain {commit[:7]}: git fetch --unshallow")
    archive = subprocess.run([*git, "archive", commit], capture_output=True, check=True).stdout
    directory = parent / "previous"
    directory.mkdir()
    subprocess.run(["tar", "--extract", "--directory", str(directory)], input=archive, check=True)
    imported = run_previous(directory, "-c", "import indexer.app.daemon; print(indexer.app.daemon.__file__)")
    if "ModuleNotFoundError" in imported.stderr:
        pytest.skip(f"the previous release needs a library that is not installed: {imported.stderr.splitlines()[-1]}")
    assert Path(imported.stdout.strip()).is_relative_to(directory), imported.stderr
    return directory


def run_previous(directory: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=directory, env=os.environ | {"PYTHONPATH": str(directory)} | environment,
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
