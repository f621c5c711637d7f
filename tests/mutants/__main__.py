"""`python -m tests.mutants`: show that the tests find each bug that was written by hand (docs/testing.md)."""

import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import NamedTuple

import click

from tests.mutants.project_copy import PROJECT, ProjectCopy, UnusableTestsError

SEEDED = Path(__file__).with_name("seeded.toml")


class Mutant(NamedTuple):
    """A bug that tests must find.

    Attributes:
        name: Unique among all mutants.
        bug: A sentence that says what is wrong.
        file: The path of the changed file in the project.
        old: The text that is replaced. It occurs once in the file.
        new: The text in its place.
        tests: The tests that find it, as arguments of pytest.
    """

    name: str
    bug: str
    file: str
    old: str
    new: str
    tests: Sequence[str]


class Outcome(NamedTuple):
    """What is known of a mutant: the test that found it, or why none did."""

    mutant: Mutant
    killed_by: str | None
    problem: str = ""
    seconds: float = 0.0


def load_mutants() -> Iterator[Mutant]:
    """Yield all mutants, in the order of their file."""
    for name, row in tomllib.loads(SEEDED.read_text()).items():
        yield Mutant(name, **row)


def outcome_of(copy: ProjectCopy, mutant: Mutant, seconds: float) -> Outcome:
    """Run the tests that the mutant names, until one fails. Each run of pytest has a limit of `seconds`."""
    path, began = PROJECT / mutant.file, monotonic()
    source = path.read_text() if path.exists() else ""
    if (count := source.count(mutant.old)) != 1:
        return Outcome(mutant, None, f"ITS PLACE IS GONE: the old text occurs {count} times in {mutant.file}")
    try:
        with copy.changed(mutant.file, source.replace(mutant.old, mutant.new)):
            failed = copy.failed_tests(mutant.tests, seconds, "-x")
    except UnusableTestsError as error:
        return Outcome(mutant, None, f"ITS TESTS WERE NOT RUN: {error}", monotonic() - began)
    problem = "" if failed else f"IT SURVIVED, a test is missing: {mutant.bug}"
    return Outcome(mutant, failed[0] if failed else None, problem, monotonic() - began)


def without_broken_tests(copy: ProjectCopy, outcomes: Sequence[Outcome], seconds: float) -> Iterator[Outcome]:
    """Yield the outcomes, but no test finds a mutant if it fails without one, too."""
    killers = sorted({_function(outcome.killed_by) for outcome in outcomes if outcome.killed_by})
    broken = set(map(_function, copy.failed_tests(killers, seconds))) if killers else set()
    for outcome in outcomes:
        fails_always = outcome.killed_by is not None and _function(outcome.killed_by) in broken
        problem = f"ITS TEST FAILS WITHOUT IT, TOO: {outcome.killed_by}"
        yield outcome._replace(killed_by=None, problem=problem) if fails_always else outcome


def _function(test: str) -> str:
    """Return the name of a test without its parameters."""
    return test.partition("[")[0]


@click.command()
@click.option("--jobs", default=1, show_default=True, help="Mutants that are tested at the same time.")
@click.option("--seconds", default=900.0, show_default=True, help="Time limit of one run of tests.")
@click.argument("only", nargs=-1)
def main(jobs: int, seconds: float, only: Sequence[str]) -> None:
    """Run the tests on each mutant, or on those whose name is ONLY, which may contain `*`.

    The exit code is 1 if one is not found, or if its place in the source is gone.
    """
    mutants = [one for one in load_mutants() if not only or any(fnmatch(one.name, pattern) for pattern in only)]
    if not mutants:
        raise click.UsageError(f"no mutant is named {' or '.join(only)}")
    with tempfile.TemporaryDirectory(prefix="indexer-mutants-") as directory:
        copies = SimpleQueue[ProjectCopy]()
        for number in range(jobs):
            copies.put(ProjectCopy(Path(directory, str(number))))

        def run(mutant: Mutant) -> Outcome:
            copy = copies.get()
            try:
                return outcome_of(copy, mutant, seconds)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(jobs) as pool:
            outcomes = list(_shown(pool.map(run, mutants)))
        outcomes = list(without_broken_tests(copies.get(), outcomes, 2 * seconds))
    wrong = [outcome for outcome in outcomes if outcome.killed_by is None]
    click.echo(f"{len(outcomes)} mutants: {len(outcomes) - len(wrong)} were found")
    for outcome in wrong:
        click.echo(f"{outcome.mutant.name}: {outcome.problem}")
    sys.exit(1 if wrong else 0)


def _shown(outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
    for outcome in outcomes:
        found = f"found by {outcome.killed_by}" if outcome.killed_by else outcome.problem.partition("\n")[0]
        click.echo(f"{outcome.mutant.name:38} {outcome.seconds:6.0f} s  {found}")
        yield outcome


if __name__ == "__main__":
    main()
