"""The native core for tests, which are skipped if it is not built."""

import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from indexer.atproto.crypto import PublicKey
from indexer.atproto.limits import Limits
from indexer.core.core import CommitsBeingVerified, NativeCore, NativeReader, load_core
from indexer.db.write import ROW_LAYOUT
from indexer.sync import verify
from indexer.sync.events import CommitEvent, OtherShardEvent
from indexer.sync.policy import Policy
from indexer.sync.shard import Shard
from indexer.sync.verify import VerifiedCommit


def native_core(threads: int = 2) -> NativeCore:
    """Return the native core; skip the test if it is not installed. An installed one of another interface is an error.

    Raises:
        SettingsError: The installed one does not fit.
    """
    native_module()
    core = load_core("native", threads)
    assert isinstance(core, NativeCore)
    return core


def shared_core(threads: int = 2) -> NativeCore:
    """Return the native core that the tests of this process share; skip the test if it is not installed.

    A forked process, as mutmut makes one for each mutant, gets its own: it does not inherit the threads of another.
    """
    return _core_of_process(os.getpid(), threads)


@cache
def _core_of_process(_process: int, threads: int) -> NativeCore:
    return native_core(threads)


def native_reader(directory: Path, limits: Limits, **sizes: int) -> NativeReader:
    """Return a reader of an export; skip the test if the native core is not installed."""
    return NativeReader(native_module().Export, directory, limits, ROW_LAYOUT, **sizes)


def verified(
    core: NativeCore, commits: Sequence[tuple[CommitEvent, PublicKey]], policy: Policy
) -> list[VerifiedCommit | None]:
    """Return the results of the native core for different commits."""
    prepared = core.begin_verification(commits, policy).next_results()
    return [prepared.accepted(event, key) for event, key in commits]


def native_module() -> Any:
    """Return the module of the native core; skip the test if it is not installed."""
    return pytest.importorskip("atproto_indexer_native", reason="the native core is not built: run `make native`")


def module_core(threads: int) -> Any:
    """Return the object of the native module that verifies commits; skip the test if the module is not installed."""
    return native_module().Core(threads, verify, (None,) * 4)


class CountingCore(NativeCore):
    """Counts what it is asked for. The test is skipped if the native core is not installed.

    Attributes:
        frames: The frames that it was asked to decode.
        decoded: Those that it decoded.
        asked: The commits that it was asked to verify.
    """

    def __init__(self) -> None:
        super().__init__(native_module(), 1)
        self.frames = self.decoded = self.asked = 0

    def commit_decoder(self, limits: Limits, shard: Shard) -> Callable[[bytes], CommitEvent | OtherShardEvent | None]:
        decode_commit = super().commit_decoder(limits, shard)

        def decode(frame: bytes) -> CommitEvent | OtherShardEvent | None:
            event = decode_commit(frame)
            self.frames += 1
            self.decoded += event is not None
            return event

        return decode

    def begin_verification(
        self, commits: Sequence[tuple[CommitEvent, PublicKey]], policy: Policy
    ) -> CommitsBeingVerified:
        self.asked += len(commits)
        return super().begin_verification(commits, policy)
