"""A copy of the project, in which a text is replaced by a bug, and whose tests are run."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from signal import SIGKILL

from tests.vectors import ROOT as VECTORS

PROJECT = Path(__file__).parents[2]
_PYTEST = ("-m", "pytest", "-q", "--hypothesis-profile", "quick", "--hypothesis-seed", "0", "--tb", "line", "-rfEs")
_FAILED_TEST = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)
"""A line of the summary. In lines of a captured log, several spaces follow `ERROR`."""
_PASSED_TESTS = re.compile(r"^\d+ passed|, \d+ passed", re.MULTILINE)
_PART = re.compile(r'pytest\.mark\.proof\("(\w+)"\)')
_PASSED, _FAILED, _NOTHING_SELECTED = 0, 1, 5
"""Exit codes of pytest."""


class UnusableTestsError(Exception):
    """The tests cannot be run, or all of them are skipped."""


class ProjectCopy:
    """A copy of the files of the project that are not ignored by git. The tests run on it, and import it.

    Attributes:
        root: The directory of the copy.
    """

    def __init__(self, directory: Path) -> None:
        self.root = directory / "project"
        paths = (self.root, self.root / "tests/without_native_core")  # the native core would hide bugs of the other one
        self._environment = os.environ | {
            "INDEXER_VECTORS": str(VECTORS),
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTHONDONTWRITEBYTECODE": "",
        }
        self._bugs = 0
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=PROJECT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, listed.split("\0")):
            if (PROJECT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(PROJECT / name, self.root / name)

    @contextmanager
    def changed(self, file: str, source: str) -> Iterator[None]:
        """Have this source in a file of the copy while the block runs."""
        path = self.root / file
        original, written_at = path.read_bytes(), path.stat().st_mtime
        self._bugs += 1
        path.write_text(source)
        # Cached bytecode belongs to a size and a time in seconds, so each bug has a time of its own.
        os.utime(path, (written_at, written_at + 2 * self._bugs))
        try:
            yield
        finally:
            path.write_bytes(original)
            os.utime(path, (written_at, written_at))

    def failed_tests(self, tests: Sequence[str], seconds: float, *options: str) -> list[str]:
        """Run tests, also those of parts of `make proof`, with more options of pytest; return those that fail.

        Raises:
            UnusableTestsError: pytest cannot run them, all are skipped, or a run is not done after `seconds`.
        """
        passed, output = False, ""
        for selection in ([], *(["--proof", part] for part in sorted(self._parts(tests)))):
            code, output = self._run([*_PYTEST, *selection, *options, *tests], seconds)
            failed = _FAILED_TEST.findall(output)
            if code not in (_PASSED, _FAILED, _NOTHING_SELECTED) or (code == _FAILED) != bool(failed):
                raise UnusableTestsError(f"pytest ended with {code} for {' '.join(tests)}:\n{output[-2_000:]}")
            if failed:
                return failed
            passed = passed or _PASSED_TESTS.search(output) is not None
        if not passed:
            raise UnusableTestsError(f"no test was run of {' '.join(tests)}:\n{output[-2_000:]}")
        return []

    def _parts(self, tests: Iterable[str]) -> set[str]:
        """Return the parts of `make proof` that these files and folders have tests of."""
        paths = {self.root / test.partition("::")[0] for test in tests}
        files = {file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path]) if file.exists()}
        return {part for file in files for part in _PART.findall(file.read_text())}

    def _run(self, arguments: Sequence[str], seconds: float) -> tuple[int | str, str]:
        with subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.root,
            env=self._environment,
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
