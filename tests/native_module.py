"""The native core for tests, which are skipped if it is not built."""

from collections.abc import Sequence
from typing import Any

import pytest

from indexer.atproto.crypto import PublicKey
from indexer.sync.events import CommitEvent
from indexer.sync.native_core import NativeCore, load_core
from indexer.sync.policy import Policy
from indexer.sync.verify import VerifiedCommit


def native_core(threads: int = 2) -> NativeCore:
    """Return the native core; skip the test if it is not installed. An installed one of another interface is an error.

    Raises:
        SettingsError: The installed one does not fit.
    """
    native_module()
    core = load_core("native", threads)
    assert core is not None
    return core


def native_module() -> Any:
    """Return the module of the native core; skip the test if it is not installed."""
    return pytest.importorskip("atproto_indexer_native", reason="the native core is not built: run `make native`")


class CountingCore(NativeCore):
    """Counts the commits that it is asked for. The test is skipped if the native core is not installed."""

    def __init__(self) -> None:
        super().__init__(native_module(), 1)
        self.asked = 0

    def verify_commits(
        self, commits: Sequence[tuple[CommitEvent, PublicKey]], policy: Policy
    ) -> list[VerifiedCommit | None]:
        self.asked += len(commits)
        return super().verify_commits(commits, policy)
