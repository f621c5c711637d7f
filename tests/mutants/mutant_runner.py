"""Run the tests on copies of the project that have one mutant each."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import SIGKILL
from time import monotonic
from typing import NamedTuple

from tests.mutants.seeded_mutant import TIERS, Mutant, Tier

_FAILED_TEST = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)
"""A line of the summary. In lines of a captured log, several spaces follow `ERROR`."""
_PASSED_TESTS = re.compile(r"^\d+ passed|, \d+ passed", re.MULTILINE)
_PASSED, _FAILED = 0, 1  # exit codes of pytest
_PYTEST = ("-m", "pytest", "-q", "--hypothesis-profile", "quick", "--hypothesis-seed", "0", "--tb", "line", "-rfEs")


class UnusableTestsError(Exception):
    """A test fails without a mutant, or the tests cannot be run."""


class SkippedTestsError(UnusableTestsError):
    """All tests are skipped on this machine."""


class Outcome(NamedTuple):
    """The result of the tests for one mutant.

    Attributes:
        killed_by: The tier that killed it; None if it survived, or if the tests cannot be run.
        named: True if the tests that it names killed it, False if only others of a tier did.
        test: The test that failed, or why the tests cannot be run.
        seconds: The time that this took.
        skipped: True if nothing is known, because all tests that it names are skipped on this machine.
    """

    mutant: Mutant
    killed_by: str | None
    named: bool
    test: str
    seconds: float
    skipped: bool = False

    @property
    def as_expected(self) -> bool:
        """True if the tier that the mutant names killed it."""
        return self.killed_by == self.mutant.tier


class ProjectCopy:
    """A copy of the files of the project that are not ignored by git. The tests run on it, and import it.

    The folder `shared` beside the project, which tests read, is beside the copy, too.
    """

    def __init__(self, project: Path, directory: Path, tiers: Mapping[str, Tier] = TIERS) -> None:
        self.root = directory / "project"
        self._tiers = tiers
        self._mutants = 0
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=project,
            check=True,
            capture_output=True,
            text=True,
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (project / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(project / name, self.root / name)
        shared = project.parent / "shared"
        if shared.exists():
            (directory / "shared").symlink_to(shared.resolve())

    @contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """Have the mutant in the copy while the block runs."""
        path = self.root / mutant.file
        original, written_at = path.read_bytes(), path.stat().st_mtime
        self._mutants += 1
        path.write_text(mutant.applied_to(original.decode()))
        # Cached bytecode belongs to a size and a time in seconds, so each mutant has a time of its own.
        os.utime(path, (written_at, written_at + 2 * self._mutants))
        try:
            yield
        finally:
            path.write_bytes(original)
            os.utime(path, (written_at, written_at))

    def failed_tests(self, tier: str, tests: Sequence[str], seconds: float, *options: str) -> list[str]:
        """Run tests of a tier, with more options of pytest; return the names of those that fail.

        Raises:
            UnusableTestsError: pytest cannot run them, or they are not done after `seconds`.
            SkippedTestsError: All of them are skipped.
        """
        code, output = self._run([*_PYTEST, *options, *tests], self._tiers[tier].hides_native_core, seconds)
        failed = _FAILED_TEST.findall(output)
        if code not in (_PASSED, _FAILED) or (code == _FAILED) != bool(failed):
            raise UnusableTestsError(f"pytest ended with {code} for {' '.join(tests)}:\n{output[-2_000:]}")
        if not failed and not _PASSED_TESTS.search(output):
            raise SkippedTestsError(f"all tests were skipped of {' '.join(tests)}:\n{output[-2_000:]}")
        return failed

    def _run(self, arguments: Sequence[str], hides_native_core: bool, seconds: float) -> tuple[int | str, str]:
        paths = [self.root, *([self.root / "tests/without_native_core"] if hides_native_core else [])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONDONTWRITEBYTECODE": ""}
        with subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        ) as process:
            try:
                output, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, SIGKILL)
                return f"no result within {seconds:.0f} s", process.communicate()[0]
            except BaseException:
                os.killpg(process.pid, SIGKILL)
                raise
        return process.returncode, output


def kill(
    copy: ProjectCopy, mutant: Mutant, seconds: float, tiers: Mapping[str, Tier] = TIERS, *, named_only: bool = False
) -> Outcome:
    """Run the tests that the mutant names, then its tier, then the later tiers, until one test fails.

    Args:
        copy: The copy to run them on.
        mutant: The mutant.
        seconds: The time limit of each run of pytest.
        tiers: The tiers.
        named_only: Run only the tests that the mutant names.

    Raises:
        UnusableTestsError: The tests cannot be run.
    """
    began, names = monotonic(), list(tiers)
    whole = [(tier, tiers[tier].arguments) for tier in names[names.index(mutant.tier) :]]
    with copy.mutated(mutant):
        if failed := copy.failed_tests(mutant.tier, mutant.tests, seconds, "-x"):
            return Outcome(mutant, mutant.tier, True, failed[0], monotonic() - began)
        for tier, tests in [] if named_only else whole:
            with suppress(SkippedTestsError):  # of a later tier; those that the mutant names have passed
                if failed := copy.failed_tests(tier, tests, seconds, "-x"):
                    return Outcome(mutant, tier, False, failed[0], monotonic() - began)
    return Outcome(mutant, None, False, "", monotonic() - began)


def without_broken_tests(copy: ProjectCopy, outcomes: Sequence[Outcome], seconds: float) -> list[Outcome]:
    """Return the outcomes, but a mutant is not killed by a test that fails without it, too.

    Raises:
        UnusableTestsError: The tests cannot be run.
    """
    killers: dict[str, set[str]] = {}
    for outcome in outcomes:
        if outcome.killed_by is not None:
            killers.setdefault(outcome.killed_by, set()).add(_function_of(outcome.test))
    broken = {
        _function_of(test)
        for tier, tests in killers.items()
        for test in copy.failed_tests(tier, sorted(tests), seconds)
    }
    return [
        outcome._replace(killed_by=None, named=False, test=f"{outcome.test} fails without the mutant, too")
        if _function_of(outcome.test) in broken
        else outcome
        for outcome in outcomes
    ]


def _function_of(test: str) -> str:
    """Return the name of a test without its parameters."""
    return test.partition("[")[0]
