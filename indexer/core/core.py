"""The core that decodes frames, verifies commits and reads exports: the Python code, or the native core beside it.

The native core is optional: a distribution of its own, `atproto-indexer-native` (native/README.md). It never gives
another result. It handles what is ordinary, and leaves everything else to the Python code.
"""

import sys
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from indexer import __version__
from indexer.atproto.crypto import PublicKey
from indexer.atproto.limits import Limits
from indexer.atproto.record import Problem
from indexer.core.native_export import NativeReader
from indexer.core.spool import Spool
from indexer.errors import SettingsError
from indexer.sync import events, verify
from indexer.sync.batch import PreparedCommits
from indexer.sync.events import CommitEvent, Event, OtherShardEvent, decode_frame
from indexer.sync.export import ColumnLayout, ExportReader
from indexer.sync.policy import Policy
from indexer.sync.shard import Shard
from indexer.sync.verify import VerifiedCommit, previous_root

CoreChoice = Literal["auto", "python", "native"]
INTERFACE = 6
"""The number of the interface between this package and the native module."""
_PROBLEM_OF_SHAPE = (None, Problem.NOT_A_MAP, Problem.NO_TYPE, Problem.OTHER_TYPE)


class CommitsBeingVerified:
    """Commits that the threads of the native core verify, without the interpreter's lock.

    The results are what `verify_commit` returns, with converted records. A result is None if `verify_commit` has to
    decide: the commit has a flaw, is not authentic, is malformed, or has an unusual form.
    """

    def __init__(self, commits: Sequence[tuple[CommitEvent, PublicKey]], running: Any) -> None:
        """Wait for what the native module has begun for these commits."""
        self._waiting = iter(commits)
        self._running = running

    def wait(self) -> None:
        """Block until all results are there, without the interpreter's lock."""
        self._running.wait()

    def next_results(self, count: int = sys.maxsize) -> PreparedCommits:
        """Return the results of the next commits, at most `count`; none at the end. Wait for all of them."""
        results: list[VerifiedCommit | None] = self._running.next_results(count)
        return PreparedCommits(islice(self._waiting, len(results)), results)


class Core:
    """The Python code.

    Attributes:
        name: `native` or `python`.
        version: The version of the package that it is part of.
        threads: The maximum number of threads in which it verifies commits at once.
        verifies_ahead: False if commits are verified only when they are planned.
    """

    name = "python"
    version = __version__
    threads = 1
    verifies_ahead = False

    def decoder(self, limits: Limits, shard: Shard) -> Callable[[bytes], Event]:
        """Return the function that decodes the frames of a stream for a shard."""
        owns = None if shard.count == 1 else shard.owns
        return lambda frame: decode_frame(frame, limits, owns)

    def open_export(self, directory: Path, limits: Limits, _layout: ColumnLayout) -> ExportReader:
        """Return a reader of an export that may write a file in a directory. Its ready-made rows have this layout.

        Raises:
            UnavailableError: With SPOOL_FULL.
        """
        return Spool(directory, limits)

    def begin_verification(
        self, commits: Sequence[tuple[CommitEvent, PublicKey]], policy: Policy
    ) -> CommitsBeingVerified:
        """Begin to verify commits ahead; return at once."""
        raise NotImplementedError


class NativeCore(Core):
    """The native core with its own threads. It may be called from several threads at once.

    Attributes:
        module: The native module (native/src/python.rs).
    """

    name = "native"
    verifies_ahead = True

    def __init__(self, module: Any, threads: int) -> None:
        """Start the threads. `module` is the native module; `threads` is at least 1."""
        self.version: str = module.__version__
        self.threads = threads
        self.module = module
        self._core = module.Core(threads, verify, _PROBLEM_OF_SHAPE)

    def decoder(self, limits: Limits, shard: Shard) -> Callable[[bytes], Event]:
        """See `Core`."""
        decode_commit, decode_other = self.commit_decoder(limits, shard), super().decoder(limits, shard)

        def decode(frame: bytes) -> Event:
            event = decode_commit(frame)
            return decode_other(frame) if event is None else event

        return decode

    def commit_decoder(self, limits: Limits, shard: Shard) -> Callable[[bytes], CommitEvent | OtherShardEvent | None]:
        """Return a function that decodes ordinary `#commit` frames as `decode_frame` does.

        It returns None for every other frame, for which `decode_frame` has to decide.
        """
        buckets = None if shard.count == 1 else shard.buckets
        decode: Callable[[bytes], CommitEvent | OtherShardEvent | None]
        decode = self.module.FrameDecoder(events, limits, buckets).decode
        return decode

    def open_export(self, directory: Path, limits: Limits, layout: ColumnLayout) -> ExportReader:
        """See `Core`."""
        return NativeReader(self.module.Export, directory, limits, layout)

    def begin_verification(
        self, commits: Sequence[tuple[CommitEvent, PublicKey]], policy: Policy
    ) -> CommitsBeingVerified:
        """See `Core`."""
        given = [(event, previous_root(event), key.curve, key.uncompressed) for event, key in commits]
        patterns = policy.scope.collections.patterns if policy.store_values else ()
        return CommitsBeingVerified(commits, self._core.begin(given, patterns, policy.limits))


PYTHON_CORE = Core()


def load_core(choice: CoreChoice, threads: int) -> Core:
    """Return the core that the settings choose. A native one starts this number of threads, which verify commits.

    Args:
        choice: "python": never the native core. "auto": the native core, if it is installed and fits this release.
            "native": always.
        threads: The number of threads that verify commits at once.

    Raises:
        SettingsError: The choice is "native", and the native core is not installed or does not fit this release.
    """
    if choice == "python":
        return PYTHON_CORE
    try:
        import atproto_indexer_native as module  # noqa: PLC0415 because most installations do not have it
    except ImportError as error:
        problem = f"the native core is not installed: {error}. Install atproto-indexer-native."
    else:
        if module.INTERFACE == INTERFACE:
            return NativeCore(module, threads)
        problem = (
            f"atproto-indexer-native {module.__version__} has interface {module.INTERFACE}; "
            f"this release needs {INTERFACE}."
        )
    if choice == "native":
        raise SettingsError(problem)
    return PYTHON_CORE
