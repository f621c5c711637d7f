"""The native core for tests, which are skipped if it is not built."""

from typing import Any

import pytest

from indexer.sync.native_core import NativeCore, load_core


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
