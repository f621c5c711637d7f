"""The core that the settings select."""

import sys

import pytest

from indexer.app.clients import core_of
from indexer.app.process_setup import available_cores
from indexer.app.settings import Settings
from indexer.core.core import PYTHON_CORE
from indexer.errors import SettingsError
from tests.native_module import native_module


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the import of the native core fail, as if it was not installed."""
    monkeypatch.setitem(sys.modules, "atproto_indexer_native", None)


def test_python_core_is_used_if_the_settings_say_so() -> None:
    assert core_of(Settings(core="python")) is PYTHON_CORE


@pytest.mark.usefixtures("hidden")
def test_python_core_is_used_if_the_native_one_is_not_installed() -> None:
    assert core_of(Settings()) is PYTHON_CORE
    with pytest.raises(SettingsError, match="not installed"):
        core_of(Settings(core="native"))


@pytest.mark.parametrize(("threads", "used"), [("3", 3), (None, available_cores())])
def test_native_core_is_used_if_it_is_installed(threads: str | None, used: int) -> None:
    version = native_module().__version__
    for choice in ("auto", "native"):
        core = core_of(Settings(core=choice, verify_threads=threads))
        assert (core.name, core.version, core.threads) == ("native", version, used)
