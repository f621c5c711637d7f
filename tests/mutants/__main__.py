"""`python -m tests.mutants`: show that the tests kill every mutant."""

import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from queue import SimpleQueue

import click

from tests.mutants.mutant_runner import Outcome, ProjectCopy, UnusableTestsError, kill, without_broken_tests
from tests.mutants.seeded_mutant import PROJECT, Mutant, load_mutants


@click.command()
@click.option("--jobs", default=1, show_default=True, help="Mutants that are tested at the same time.")
@click.option("--seconds", default=900.0, show_default=True, help="Time limit of one run of tests.")
@click.option("--named-only", is_flag=True, help="Run only the tests that the mutants name, not their tiers.")
@click.argument("only", nargs=-1)
def main(jobs: int, seconds: float, named_only: bool, only: Sequence[str]) -> None:
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
                return Outcome(mutant, None, str(error), 0.0)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(jobs) as pool:
            outcomes = [_shown(outcome) for outcome in pool.map(run, mutants)]
        try:
            sys.exit(_summarize(without_broken_tests(copies.get(), outcomes, seconds)))
        except UnusableTestsError as error:
            raise click.ClickException(str(error)) from None


def _is_named(mutant: Mutant, only: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for name in (mutant.name, mutant.part) for pattern in only)


def _shown(outcome: Outcome) -> Outcome:
    result = "NOT KILLED" if outcome.killed_by is None else f"killed by {outcome.killed_by}"
    late = "" if outcome.as_expected or outcome.killed_by is None else f" and not by {outcome.mutant.tier}"
    click.echo(f"{outcome.mutant.name:34} {result}{late:22} {outcome.seconds:6.0f} s  {outcome.test}")
    return outcome


def _summarize(outcomes: Sequence[Outcome]) -> int:
    """Print the totals; return the exit code."""
    wrong = [outcome for outcome in outcomes if not outcome.as_expected]
    click.echo(f"{len(outcomes) - len(wrong)} of {len(outcomes)} mutants were killed by the tier that they name")
    for mutant, _, test, _ in wrong:
        click.echo(f"A test is missing: {mutant.name} ({mutant.file}): {mutant.bug} {test}")
    return 1 if wrong else 0


main()
