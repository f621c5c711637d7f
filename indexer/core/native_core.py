"""The native core: decodes #commit frames, and verifies many commits at once, with the results of the Python code.

It is optional: a distribution of its own, `atproto-indexer-native` (native/README.md). For a commit without a flaw and
of the usual form it returns what `decode_frame` and `verify_commit` return. For every other one it returns nothing, and
these two decide.
"""

import sys
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Literal

from indexer.atproto.crypto import PublicKey
from indexer.atproto.limits import Limits
from indexer.atproto.record import Problem
from indexer.core.native_export import ExportClass
from indexer.errors import SettingsError
from indexer.sync import events, verify
from indexer.sync.batch import PreparedCommits, prepared_commits
from indexer.sync.events import CommitEvent, Event, OtherShardEvent, decode_frame
from indexer.sync.policy import PlanContext, Policy
from indexer.sync.shard import Shard
from indexer.sync.verify import VerifiedCommit, previous_root

CoreChoice = Literal["auto", "python", "native"]

INTERFACE = 5
"""The number of the interface between this module and the native one."""
_PROBLEM_OF_SHAPE = (None, Problem.NOT_A_MAP, Problem.NO_TYPE, Problem.OTHER_TYPE)


class NativeCore:
    """The native core with its own threads. It may be called from several threads at once.

    Attributes:
        version: The version of its distribution.
        threads: The number of threads that verify commits at once.
        new_export: Creates an empty export, which `native_reader` reads.
    """

    def __init__(self, module: Any, threads: int) -> None:
        """Start the threads. `module` is the native module; `threads` is at least 1."""
        self.version: str = module.__version__
        self.threads = threads
        self.new_export: ExportClass = module.Export
        self._core = module.Core(threads, verify, _PROBLEM_OF_SHAPE)
        self._new_frame_decoder = module.FrameDecoder

    def commit_decoder(self, limits: Limits, shard: Shard) -> Callable[[bytes], CommitEvent | OtherShardEvent | None]:
        """Return a function that decodes ordinary `#commit` frames as `decode_frame` does.

        It returns None for every other frame, for which `decode_frame` has to decide.
        """
        buckets = None if shard.count == 1 else shard.buckets
        decode: Callable[[bytes], CommitEvent | OtherShardEvent | None]
        decode = self._new_frame_decoder(events, limits, buckets).decode
        return decode

    def begin_verification(
        self, commits: Sequence[tuple[CommitEvent, PublicKey]], policy: Policy
    ) -> "CommitVerification":
        """Begin to verify commits, in the threads of the core and without the interpreter's lock; return at once."""
        given = [(event, previous_root(event), key.curve, key.uncompressed) for event, key in commits]
        patterns = policy.scope.collections.patterns if policy.store_values else ()
        return CommitVerification(self._core.begin(given, patterns, policy.limits))


class CommitVerification:
    """Commits that the threads of the native core verify."""

    def __init__(self, running: Any) -> None:
        """Wait for what the native module has begun."""
        self._running = running

    def wait(self) -> None:
        """Block until all results are there, without the interpreter's lock."""
        self._running.wait()

    def next_results(self, count: int) -> list[VerifiedCommit | None]:
        """Return the next results, at most `count`, in the order of the commits; [] at the end. Wait for all of them.

        They are what `verify_commit` returns, with converted records. A result is None if `verify_commit` has to
        decide: the commit has a flaw, is not authentic, is malformed, or has an unusual form.
        """
        results: list[VerifiedCommit | None] = self._running.next_results(count)
        return results

    def results(self) -> list[VerifiedCommit | None]:
        """Return all results that were not returned yet."""
        return self.next_results(sys.maxsize)


class CommitsBeingVerified:
    """Commits that the native core verifies while the interpreter does something else."""

    def __init__(
        self, core: NativeCore, commits: Sequence[tuple[CommitEvent, PublicKey]], context: PlanContext
    ) -> None:
        """Begin to verify them."""
        self._waiting = iter(commits)
        self._running = core.begin_verification(commits, context.policy)

    def wait(self) -> None:
        """Block until all results are there, without the interpreter's lock."""
        self._running.wait()

    def next_results(self, count: int) -> PreparedCommits:
        """Return the results of the next commits, at most `count`; none at the end. Wait for all of them."""
        results = self._running.next_results(count)
        return prepared_commits(islice(self._waiting, len(results)), results)

    def results(self) -> PreparedCommits:
        """Return all results that were not returned yet."""
        return prepared_commits(self._waiting, self._running.results())


def frame_decoder(core: NativeCore | None, limits: Limits, shard: Shard) -> Callable[[bytes], Event]:
    """Return the function that decodes the frames of a stream for a shard. Its events are those of `decode_frame`."""
    owns = None if shard.count == 1 else shard.owns
    if core is None:
        return lambda frame: decode_frame(frame, limits, owns)
    decode_commit = core.commit_decoder(limits, shard)

    def decode(frame: bytes) -> Event:
        event = decode_commit(frame)
        return decode_frame(frame, limits, owns) if event is None else event

    return decode


def load_core(choice: CoreChoice, threads: int) -> NativeCore | None:
    """Return the native core; None if the Python code verifies.

    Args:
        choice: "python": never the native core. "auto": the native core, if it is installed and fits this release.
            "native": always.
        threads: The number of threads that verify commits at once.

    Raises:
        SettingsError: The choice is "native", and the native core is not installed or does not fit this release.
    """
    if choice == "python":
        return None
    try:
        import atproto_indexer_native as module  # noqa: PLC0415 because most installations do not have it
    except ImportError as error:
        if choice == "auto":
            return None
        raise SettingsError(f"the native core is not installed: {error}. Install atproto-indexer-native.") from None
    if module.INTERFACE == INTERFACE:
        return NativeCore(module, threads)
    if choice == "auto":
        return None
    raise SettingsError(
        f"atproto-indexer-native {module.__version__} has interface {module.INTERFACE}; this release needs {INTERFACE}."
    )
