"""The choice of the core, and what Python code does with the answers of a native one."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.core.core import INTERFACE, PYTHON_CORE, NativeCore, load_core
from indexer.errors import SettingsError
from indexer.sync.shard import Shard
from tests.sync.signing_account import SigningAccount, decoded_event


def test_a_core_of_another_interface_is_an_error_only_if_it_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace(INTERFACE=INTERFACE + 1, __version__="9.9.9")
    monkeypatch.setitem(__import__("sys").modules, "atproto_indexer_native", other)
    assert load_core("auto", 2) is PYTHON_CORE
    with pytest.raises(SettingsError, match=f"9.9.9 has interface {INTERFACE + 1}"):
        load_core("native", 2)


def test_event_that_the_core_decoded_is_not_decoded_again() -> None:
    event, module = decoded_event("commit", SigningAccount().commit_post("a")), Mock(__version__="1.2.3")
    module.FrameDecoder.return_value.decode.return_value = event
    assert NativeCore(module, 1).decoder(DEFAULT_LIMITS, Shard())(b"no frame") is event


def test_core_of_a_process_with_all_repos_does_not_compare_buckets() -> None:
    module, half = Mock(__version__="1.2.3"), Shard(1, 2)
    for shard in (Shard(), half):
        NativeCore(module, 1).decoder(DEFAULT_LIMITS, shard)
    assert [call.args[2] for call in module.FrameDecoder.call_args_list] == [None, half.buckets]
