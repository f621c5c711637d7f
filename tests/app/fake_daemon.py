"""A daemon whose stages have the attributes that a test sets, for tests of what is read from them."""

from collections.abc import Sequence
from time import monotonic
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from indexer.concurrency.stage_progress import StageProgress
from indexer.live.streams import Stream
from indexer.sync.stream import Origin


def fake_stream(relay: str = "wss://one.example", **changes: Any) -> Any:
    """Return a connected stream, with some attributes of its parts replaced."""
    parts: dict[str, dict[str, Any]] = {
        "subscription": {
            "relays": [relay],
            "connection": SimpleNamespace(relay=relay),
            "last_error": None,
            "disconnected_since": monotonic() - 40,
        },
        "continuity": {},
        "position": {
            "origin": Origin(relay),
            "watermark": SimpleNamespace(position=7),
            "lag": 0.25,
            "cursor_age": 0.25,
        },
        "consumer": {
            "last_error": None,
            "failing_since": None,
            "last_message": {relay: monotonic() - 2},
            "stage": StageProgress("firehose consumer"),
            "run": None,
        },
    }
    fakes: list[Any] = [SimpleNamespace(**values | changes.get(name, {})) for name, values in parts.items()]
    return Stream(*fakes)


def fake_daemon(roles: Sequence[str], streams: Sequence[dict[str, Any]] = ({},), **stages: Any) -> Any:
    """Return an idle, connected daemon, with some attributes of streams and stages replaced.

    What a stage runs, watches and measures is a mock.
    """
    healthy = {"last_error": None, "failing_since": None}
    attributes: dict[str, dict[str, Any]] = {
        "inbox": {"unsettled": 3, "unsettled_bytes": 4_096},
        "batch_writer": {
            "stage": StageProgress("batch writer"),
            "lag": 0.25,
            "totals": SimpleNamespace(settled=3),
        },
        "resync_pool": {
            "claims": SimpleNamespace(**healthy),
            "shares": SimpleNamespace(free_workers=8, running=[]),
            "ended": 0,
        },
        "shard_ownership": {
            "last_error": None,
            "owned_since": monotonic() - 900,
            "waits_since": monotonic() - 950,
        },
        "reconciliation": {"progress": None},
        "comparison": {"show": lambda _: {"compared": True, "missing_messages": 2}},
        "open_gaps": {"gaps": ()},
        "hosts": {"paused": list, "failing": list},
        "database_monitor": {"answering_since": monotonic() - 1_000},
        "conditions": {"active": list},
    }
    daemon = MagicMock()
    daemon.settings.roles, daemon.settings.relays, daemon.settings.stop_timeout = roles, ("wss://one.example",), 60.0
    daemon.change_numbering, daemon.tasks, daemon.shard_tasks = None, [], []
    daemon.started_at = monotonic() - 1_000
    daemon.streams = [fake_stream(**stream) for stream in streams]
    for name, values in attributes.items():
        for attribute, value in (values | stages.get(name, {})).items():
            setattr(getattr(daemon, name), attribute, value)
    daemon.key_lookups.__len__.return_value = 1
    return daemon
