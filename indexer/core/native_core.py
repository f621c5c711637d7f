"""The native core: decodes #commit frames, and verifies many commits at once, with the results of the Python code.

It is optional: a distribution of its own, `atproto-indexer-native` (native/README.md). For a commit without a flaw and
of the usual form it returns what `decode_frame` and `verify_commit` return. For every other one it returns nothing, and
these two decide.
"""

import sys
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from indexer.atproto.crypto import PublicKey
from indexer.atproto.limits import Limits
from indexer.atproto.record import Problem
from indexer.errors import SettingsError
from indexer.sync import events, verify
from indexer.sync.batch import PreparedCommits
from indexer.sync.events import CommitEvent, OtherShardEvent
from indexer.sync.policy import Policy
from indexer.sync.shard import Shard
from indexer.sync.verify import VerifiedCommit, previous_root

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


class NativeCore:
    """The native core with its own threads. It may be called from several threads at once.

    Attributes:
        version: The version of its distribution.
        threads: The number of threads that verify commits at once.
        new_export: The class `Export` of the native module (native/src/python_export.rs).
    """

    def __init__(self, module: Any, threads: int) -> None:
        """Start the threads. `module` is the native module; `threads` is at least 1."""
        self.version: str = module.__version__
        self.threads = threads
        self.new_export: Callable[..., Any] = module.Export
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
    ) -> CommitsBeingVerified:
        """Begin to verify commits; return at once."""
        given = [(event, previous_root(event), key.curve, key.uncompressed) for event, key in commits]
        patterns = policy.scope.collections.patterns if policy.store_values else ()
        return CommitsBeingVerified(commits, self._core.begin(given, patterns, policy.limits))


def load_native(threads: int, *, required: bool) -> NativeCore | None:
    """Return the native core with so many threads; None if it is not installed, or does not fit this release.

    Raises:
        SettingsError: It is `required`, and would be None.
    """
    try:
        import atproto_indexer_native as module  # noqa: PLC0415 because most installations do not have it
    except ImportError as error:
        if not required:
            return None
        raise SettingsError(f"the native core is not installed: {error}. Install atproto-indexer-native.") from None
    if module.INTERFACE == INTERFACE:
        return NativeCore(module, threads)
    if not required:
        return None
    raise SettingsError(
        f"atproto-indexer-native {module.__version__} has interface {module.INTERFACE}; this release needs {INTERFACE}."
    )
