"""`python -m tests.mutants`: show that the tests kill every mutant."""

import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from queue import SimpleQueue

import click

from tests.mutants.mutant_runner import (
    Outcome,
    ProjectCopy,
    SkippedTestsError,
    UnusableTestsError,
    kill,
    without_broken_tests,
)
from tests.mutants.seeded_mutant import PROJECT, Mutant, load_mutants


@click.command()
@click.option("--jobs", default=1, show_default=True, help="Mutants that are tested at the same time.")
@click.option("--seconds", default=900.0, show_default=True, help="Time limit of one run of tests.")
@click.option("--named-only", is_flag=True, help="Run only the tests that the mutants name, not their tiers.")
@click.option("--allow-skipped", is_flag=True, help="Do not fail for mutants whose tests are skipped on this machine.")
@click.argument("only", nargs=-1)
def main(jobs: int, seconds: float, named_only: bool, allow_skipped: bool, only: Sequence[str]) -> None:
    """Run the tests on each mutant, or on those whose name or part is ONLY, which may contain `*`.

    The exit code is 1 if one survives, or if the tests of its tier do not kill it.
    """
    mutants = [mutant for mutant in load_mutants() if not only or _is_named(mutant, only)]
    if not mutants:
        raise click.UsageError(f"no mutant is named {' or '.join(only)}")
    with tempfile.TemporaryDirectory(prefix="indexer-mutants-") as directory:
        copies = SimpleQueue[ProjectCopy]()
        for number in range(jobs):
            copies.put(ProjectCopy(PROJECT, Path(directory, str(number))))

        def run(mutant: Mutant) -> Outcome:
            copy = copies.get()
            try:
                return kill(copy, mutant, seconds, named_only=named_only)
            except UnusableTestsError as error:
                return Outcome(mutant, None, False, str(error), 0.0, isinstance(error, SkippedTestsError))
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(jobs) as pool:
            outcomes = [_shown(outcome) for outcome in pool.map(run, mutants)]
        try:
            sys.exit(summarize(without_broken_tests(copies.get(), outcomes, seconds), allow_skipped=allow_skipped))
        except UnusableTestsError as error:
            raise click.ClickException(str(error)) from None


def _is_named(mutant: Mutant, only: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for name in (mutant.name, mutant.part) for pattern in only)


def _shown(outcome: Outcome) -> Outcome:
    click.echo(f"{outcome.mutant.name:38} {_result(outcome):34} {outcome.seconds:6.0f} s  {outcome.test}")
    return outcome


def _result(outcome: Outcome) -> str:
    match outcome:
        case Outcome(skipped=True):
            return "NOT TESTED ON THIS MACHINE"
        case Outcome(killed_by=None):
            return "NOT KILLED"
        case Outcome(named=True):
            return f"killed by its tests ({outcome.killed_by})"
        case Outcome(as_expected=True):
            return f"killed by OTHER TESTS of {outcome.killed_by}"
        case _:
            return f"killed by {outcome.killed_by}, NOT BY {outcome.mutant.tier}"


def summarize(outcomes: Sequence[Outcome], *, allow_skipped: bool) -> int:
    """Print the totals; return the exit code."""
    skipped = [outcome.mutant.name for outcome in outcomes if outcome.skipped]
    named = [outcome for outcome in outcomes if outcome.named]
    others = [outcome for outcome in outcomes if outcome.as_expected and not outcome.named]
    wrong = [outcome for outcome in outcomes if not outcome.as_expected and not outcome.skipped]
    click.echo(f"{len(outcomes)} mutants: {len(named)} were killed by the tests that they name, {len(others)} only by")
    click.echo(f"other tests of their tier, {len(wrong)} not by their tier")
    if skipped:
        click.echo(f"NOT TESTED ON THIS MACHINE, because their tests are skipped: {', '.join(skipped)}")
    for outcome in others:
        click.echo(f"Name this test: {outcome.mutant.name} ({outcome.mutant.part}.toml): {outcome.test}")
    for outcome in wrong:
        mutant = outcome.mutant
        click.echo(f"A test is missing: {mutant.name} ({mutant.file}): {mutant.bug} {outcome.test}")
    return 1 if wrong or (skipped and not allow_skipped) else 0


if __name__ == "__main__":
    main()
