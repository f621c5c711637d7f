import math
from typing import get_args

import pytest

from indexer.reasons import Desync, FetchFailure, Rejection
from indexer.sync.events import Event
from indexer.sync.repo import Outcome
from indexer.telemetry.metrics import KINDS, Metrics


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    """Return a sample; its name is that of the metric without the prefix."""
    return metrics.registry.get_sample_value(f"indexer_{name}", labels)


def test_kinds_match_the_events() -> None:
    kinds = dict.fromkeys(kind for event in get_args(Event) for kind in get_args(event.__annotations__["kind"]))
    assert sorted(KINDS) == sorted(kinds)


def test_every_reason_can_be_counted() -> None:
    metrics = Metrics()
    for rejection in Rejection:
        metrics.rejected[rejection].inc()
        assert value(metrics, "rejected_total", reason=rejection.value) == 1
    for desync in Desync:
        metrics.desynchronized[desync].inc()
        metrics.resyncs[desync].inc()
        assert value(metrics, "desynchronized_total", reason=desync.value) == 1
        assert value(metrics, "resync_total", result=desync.value) == 1
    for failure in FetchFailure:
        metrics.resyncs[failure].inc()
        metrics.identity_lookups["plc", failure].inc()
        assert value(metrics, "identity_lookups_total", method="plc", result=failure.value) == 1
        assert value(metrics, "resync_total", result=failure.value) == 1


def test_series_exist_before_the_first_message() -> None:
    metrics = Metrics()
    for kind in KINDS:
        assert value(metrics, "events_received_total", kind=kind) == 0
        assert [value(metrics, "events_total", kind=kind, outcome=outcome) for outcome in Outcome] == [0] * len(Outcome)


def test_gauges_show_the_value_that_was_set() -> None:
    metrics = Metrics()
    assert math.isnan(value(metrics, "firehose_lag_seconds") or 0)
    metrics.watch({"indexer_firehose_lag_seconds": lambda: 1.5, "indexer_queue_bytes": lambda: 77})
    assert value(metrics, "firehose_lag_seconds") == 1.5
    assert value(metrics, "queue_bytes") == 77
    metrics.cursor_seq.labels("wss://one.example").set(9)
    assert value(metrics, "cursor_seq", relay="wss://one.example") == 9
    assert value(metrics, "repos", sync_status="in-progress") == 0
    assert value(metrics, "links_progress_ratio") == 1, "no links are kept"


def test_gauge_with_labels_is_read_at_each_scrape() -> None:
    metrics = Metrics()
    connected: dict[tuple[str, ...], float] = {("wss://one.example",): 1.0, ("wss://two.example",): 0.0}
    metrics.watch({"indexer_relay_connected": lambda: connected})
    for (relay,), expected in connected.items():
        assert value(metrics, "relay_connected", relay=relay) == expected
    del connected["wss://two.example",]
    assert value(metrics, "relay_connected", relay="wss://two.example") is None


def test_failed_stage_is_measured() -> None:
    metrics, other = Metrics(), Metrics()
    with pytest.raises(ZeroDivisionError), metrics.batch_seconds["apply"].time():
        _ = 1 / 0
    assert value(metrics, "batch_seconds_count", stage="apply") == 1
    assert value(other, "batch_seconds_count", stage="apply") == 0, "instances share no state"


def test_names_and_labels_outside_the_closed_sets_are_errors() -> None:
    metrics = Metrics()
    with pytest.raises(KeyError):
        metrics.events_received["telegram"].inc()
    with pytest.raises(KeyError):
        metrics.batch_seconds["lunch"].time()
    for name in ("indexer_unknown", "indexer_database_up"):  # the second one has a value of its own
        with pytest.raises(KeyError, match=name):
            metrics.watch({name: lambda: 1.0})
