import asyncio
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from indexer.daemon_probe import STALL_SECONDS, DaemonProbe


def probe_of(roles: tuple[str, ...] = ("live", "resync"), *, owned: bool = True, **stages: Any) -> DaemonProbe:
    """Return a probe of an idle, connected daemon, with some attributes of stages replaced."""
    ownership = SimpleNamespace(owned=asyncio.Event(), last_error=None)
    if owned:
        ownership.owned.set()
    attributes: dict[str, Any] = {
        "subscription": {"connection": SimpleNamespace(relay="wss://one.example"), "last_error": None},
        "stream_position": {"watermark": SimpleNamespace(position=7)},
        "firehose_consumer": {"last_error": None, "gaps": 0},
        "inbox": {"unsettled": 0, "unsettled_bytes": 0},
        "batch_writer": {"last_progress": monotonic(), "last_error": None, "lag": 1.0},
        "resync_pool": {"last_progress": monotonic(), "last_error": None, "free_workers": 8, "running": []},
        "reconciliation": {"progress": None},
        "change_log_retention": {"lagging": []},
        "hosts": {"paused": list},
    }
    made: dict[str, Any] = {
        name: SimpleNamespace(**(values | stages.get(name, {}))) for name, values in attributes.items()
    }
    return DaemonProbe(roles, key_lookups=stages.get("key_lookups", []), shard_ownership=ownership, **made)  # type: ignore[arg-type]


def long_ago() -> float:
    return monotonic() - STALL_SECONDS - 10


def test_idle_daemon_is_alive_and_ready() -> None:
    probe = probe_of(batch_writer={"last_progress": long_ago()})
    assert probe.alive() is None
    assert probe.ready() is None
    assert (probe.status()["relay"], probe.status()["cursor"]) == ("wss://one.example", 7)


def test_writer_with_messages_and_without_progress_is_stalled() -> None:
    stages: dict[str, Any] = {"inbox": {"unsettled": 3}, "batch_writer": {"last_progress": long_ago()}}
    assert probe_of(**stages).alive() == "batch writer stalled: no batch written for 130 s"
    assert probe_of(**stages, key_lookups=["waiting"] * 3).alive() is None, "all messages wait for keys"
    assert probe_of(**stages, owned=False).alive() is None, "another process owns the shard"
    stages["batch_writer"]["last_error"] = "unreachable: no database"
    assert probe_of(**stages).alive() is None, "the writer retries"


def test_pool_with_free_workers_and_without_claims_is_stalled() -> None:
    stages: dict[str, Any] = {"resync_pool": {"last_progress": long_ago()}}
    assert probe_of(**stages).alive() == "resync pool stalled: no claim for 130 s"
    assert probe_of(("live",), **stages).alive() is None
    stages["resync_pool"]["free_workers"] = 0
    assert probe_of(**stages).alive() is None


@pytest.mark.parametrize(
    ("stages", "reason"),
    [
        ({"resync_pool": {"last_error": "unreachable: no database"}}, "unreachable: no database"),
        ({"subscription": {"connection": None}}, "no relay is connected"),
        ({"subscription": {"connection": None, "last_error": "401"}}, "no relay is connected; last error: 401"),
        ({"batch_writer": {"lag": 75.0}}, "the newest stored event is 75 s old"),
    ],
)
def test_reason_why_the_daemon_is_not_ready(stages: dict[str, Any], reason: str) -> None:
    assert probe_of(**stages).ready() == reason


def test_process_without_the_live_role_needs_no_relay() -> None:
    assert probe_of(("resync",), subscription={"connection": None}).ready() is None
