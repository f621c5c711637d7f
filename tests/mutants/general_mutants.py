"""`python -m tests.mutants.general_mutants`: change each expression of the pure packages, and show what tests miss.

mutmut (https://mutmut.readthedocs.io) makes the mutants and runs the tests that reach them, on a copy of the project.
Each survivor must be in a file in `judged/`, with the reason why no test is added.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click

from tests.mutants.project_copy import PROJECT, ProjectCopy
from tests.vectors import ROOT as VECTORS

JUDGED = Path(__file__).with_name("judged")
"""The folder of the judgements: one file for each package."""
MODULES = tuple(
    sorted(
        str(path.relative_to(PROJECT))
        for package in ("atproto", "sync")
        for path in (PROJECT / "indexer" / package).rglob("*.py")
    )
)
"""All modules of `atproto` and `sync`. The command line can name some of them."""
_TESTS = ("tests/atproto", "tests/sync")
_LEFT_OUT = ("tests/atproto/test_cbor.py::test_deep_nesting_does_not_overflow_the_small_stack_of_a_thread",)
"""Tests of the use of the stack by the product, which mutmut changes even without a mutant."""
_PYTEST = ("-m", "not slow", "--hypothesis-profile", "quick", "--hypothesis-seed", "0")
_UNCHANGED = (
    r"^\s*raise ",  # most of their mutants change only the text of an error message
    "raise_malformed",  # as above
    "case -1:",  # mutmut writes `case +1:`, which is no Python
)
"""Lines that are not mutated."""
_RESULT = re.compile(r"^ +(\S+): (.+)$", re.MULTILINE)
_KILLED = ("killed", "timeout", "caught by type check")
_MYPY = (
    "-m", "mypy", "--config-file=", "--python-version=3.11", "--ignore-missing-imports", "--follow-imports=silent",
    "--output=json", *(f"--disable-error-code={code}" for code in ("has-type", "misc", "no-redef", "var-annotated")),
)  # fmt: skip
"""The arguments of mypy, which `make check` also runs: no test runs for a mutant that is a type error, such as None for
an argument that must not be None. The disabled codes and those of `strict` also report the code that mutmut adds."""
TIMEOUT_CONSTANT = 10.0
"""Added to the usual seconds of the tests of a mutant: 15 times the sum is the limit. A test that another program holds
up must not count as one that a mutant holds up."""


class Survivor(NamedTuple):
    """A mutant that no test notices: the changed lines, without their indentation."""

    file: str
    old: str
    new: str


class Judgement(NamedTuple):
    """Why no test is added for a survivor.

    Attributes:
        verdict: "equivalent" if no test can notice it, else "not worth a test".
    """

    survivor: Survivor
    verdict: str
    reason: str


def load_judgements(directory: Path = JUDGED) -> list[Judgement]:
    """Return all judgements."""
    rows = [row for path in sorted(directory.glob("*.toml")) for row in tomllib.loads(path.read_text())["survivor"]]
    return [
        Judgement(Survivor(row["file"], row["old"], row["new"]), row["verdict"], row["reason"].strip()) for row in rows
    ]


def find_survivors(copy: ProjectCopy, modules: Sequence[str], jobs: int) -> Iterator[Survivor]:
    """Run mutmut on these modules of the copy; yield the mutants that it did not kill."""
    settings = {
        "source_paths": ["indexer"],
        "only_mutate": list(modules),
        "do_not_mutate_patterns": list(_UNCHANGED),
        "also_copy": ["config", "docs", "migrations"],
        "pytest_add_cli_args": [*_PYTEST, *(f"--deselect={test}" for test in _LEFT_OUT)],
        "pytest_add_cli_args_test_selection": list(_TESTS),
        "type_check_command": [sys.executable, *_MYPY, *modules],
        "timeout_constant": TIMEOUT_CONSTANT,
        "track_dependencies": False,
        "use_git_change_detection": False,
    }
    with (copy.root / "pyproject.toml").open("a") as file:
        file.write("\n[tool.mutmut]\n")
        file.writelines(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
    _mutmut(copy, "run", "--max-children", str(jobs), shown=True)
    results: list[tuple[str, str]] = _RESULT.findall(_mutmut(copy, "results"))
    for name, _ in [result for result in results if result[1] not in _KILLED]:
        yield parse_diff(_mutmut(copy, "show", name))


def parse_diff(diff: str) -> Survivor:
    """Return the survivor that a unified diff shows."""
    lines = diff.splitlines()
    [file] = [line.removeprefix("--- ") for line in lines if line.startswith("--- ")]
    old = [line[1:].strip() for line in lines if line.startswith("-") and not line.startswith("---")]
    new = [line[1:].strip() for line in lines if line.startswith("+") and not line.startswith("+++")]
    return Survivor(file, "\n".join(old), "\n".join(new))


def unjudged(survivors: Iterable[Survivor], judgements: Iterable[Judgement]) -> list[Survivor]:
    """Return the survivors without a judgement, each of them once."""
    judged = {judgement.survivor for judgement in judgements}
    return sorted(set(survivors) - judged)


def _mutmut(copy: ProjectCopy, *arguments: str, shown: bool = False) -> str:
    result = subprocess.run(
        [sys.executable, "-m", "mutmut", *arguments],
        cwd=copy.root,
        env=os.environ | {"INDEXER_VECTORS": str(VECTORS)},
        check=True,
        text=True,
        stdout=None if shown else subprocess.PIPE,
    )
    return result.stdout or ""


@click.command()
@click.option("--jobs", default=1, show_default=True, help="Tests that run at the same time.")
@click.argument("modules", nargs=-1)
def main(jobs: int, modules: Sequence[str]) -> None:
    """Mutate MODULES (paths such as indexer/sync/stream.py; default: all of atproto and sync), and check survivors.

    The exit code is 1 if one survives that is not judged.
    """
    with tempfile.TemporaryDirectory(prefix="indexer-mutants-") as directory:
        copy = ProjectCopy(Path(directory))
        survivors = set(find_survivors(copy, modules or MODULES, jobs))
    new = unjudged(survivors, load_judgements())
    click.echo(f"{len(survivors)} different changes survived, of which {len(new)} are not judged")
    for survivor in new:
        click.echo(f"\n[[survivor]]\nfile = '{survivor.file}'\nold = '''{survivor.old}'''\nnew = '''{survivor.new}'''")
    sys.exit(1 if new else 0)


if __name__ == "__main__":
    main()
