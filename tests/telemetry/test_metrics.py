import math
from typing import get_args

import pytest

from indexer.reasons import Desync, FetchFailure, Rejection
from indexer.sync.changes import Action
from indexer.sync.events import Event
from indexer.sync.repo import Outcome, SyncStatus
from indexer.telemetry.metric_definitions import MAX_LISTED, METRICS
from indexer.telemetry.metrics import ACTIONS, KINDS, ConsumerLag, Metrics


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    """Return a sample; its name is that of the metric without the prefix."""
    return metrics.registry.get_sample_value(f"indexer_{name}", labels)


def test_registry_shows_exactly_the_defined_metrics() -> None:
    suffixes = {"counter": "_total", "info": "_info"}
    shown = {
        family.name + suffixes.get(family.type, ""): (family.type.replace("info", "gauge"), family.documentation)
        for family in Metrics().registry.collect()
        if family.name.startswith("indexer_")
    }
    assert shown == {name: (definition.kind, definition.meaning) for name, definition in METRICS.items()}


def test_kind_and_action_labels_match_the_events() -> None:
    kinds = dict.fromkeys(kind for event in get_args(Event) for kind in get_args(event.__annotations__["kind"]))
    assert sorted(KINDS) == sorted(kinds)
    assert get_args(Action) == ACTIONS


def test_outcomes_add_up_to_the_messages_received() -> None:
    metrics = Metrics()
    for kind in KINDS:
        for outcome in Outcome:
            metrics.received(kind)
            metrics.outcome(kind, outcome)
    for kind in KINDS:
        assert [value(metrics, "events_total", kind=kind, outcome=outcome) for outcome in Outcome] == [1] * len(Outcome)
        assert value(metrics, "events_received_total", kind=kind) == len(Outcome)


def test_every_reason_can_be_counted() -> None:
    metrics = Metrics()
    for rejection in Rejection:
        metrics.rejected(rejection)
        assert value(metrics, "rejected_total", reason=rejection.value) == 1
    for desync in Desync:
        metrics.desynchronized(desync)
        metrics.resync(desync, 0.2)
        assert value(metrics, "desynchronized_total", reason=desync.value) == 1
    for failure in FetchFailure:
        metrics.resync(failure, 0.2)
        metrics.identity_lookup("plc", failure)
        assert value(metrics, "identity_lookups_total", method="plc", result=failure.value) == 1
        assert value(metrics, "resync_total", result=failure.value) == 1
    assert value(metrics, "resync_seconds_count") == len(Desync) + len(FetchFailure)


def test_record_changes_of_live_events_and_resyncs_are_counted_apart() -> None:
    metrics = Metrics()
    metrics.record_changes("create", live=True)
    metrics.record_changes("create", live=False, count=40)
    assert value(metrics, "record_changes_total", action="create", live="true") == 1
    assert value(metrics, "record_changes_total", action="create", live="false") == 40


def test_gauges_show_the_value_that_was_set() -> None:
    metrics = Metrics()
    assert math.isnan(value(metrics, "firehose_lag_seconds") or 0)
    metrics.watch({"indexer_firehose_lag_seconds": lambda: 1.5, "indexer_queue_bytes": lambda: 77})
    metrics.cursor("wss://one.example", 9)
    metrics.repos(
        {SyncStatus.SYNCHRONIZED: 3, SyncStatus.DESYNCHRONIZED: 1}, {"behind": 1}, resync_queue=2, incomplete=5
    )
    assert value(metrics, "firehose_lag_seconds") == 1.5
    assert value(metrics, "queue_bytes") == 77
    assert value(metrics, "cursor_seq", relay="wss://one.example") == 9
    assert value(metrics, "repos", sync_status="synchronized") == 3
    assert value(metrics, "repos", sync_status="in-progress") == 0
    assert value(metrics, "resync_queue") == 2
    assert value(metrics, "scope_incomplete_repos") == 5
    assert value(metrics, "repos_desynchronized", reason="behind") == 1
    metrics.repos({SyncStatus.SYNCHRONIZED: 4}, {}, resync_queue=0, incomplete=0)
    assert value(metrics, "repos_desynchronized", reason="behind") == 0


def test_progress_of_links_is_complete_while_none_are_kept() -> None:
    metrics = Metrics()
    assert value(metrics, "links_progress_ratio") == 1
    metrics.links(0.25)
    assert value(metrics, "links_progress_ratio") == 0.25
    metrics.links(None)
    assert value(metrics, "links_progress_ratio") == 1


def test_gauge_with_labels_is_read_at_each_scrape() -> None:
    metrics = Metrics()
    connected: dict[tuple[str, ...], float] = {("wss://one.example",): 1.0, ("wss://two.example",): 0.0}
    metrics.watch({"indexer_relay_connected": lambda: connected})
    for (relay,), expected in connected.items():
        assert value(metrics, "relay_connected", relay=relay) == expected
    del connected["wss://two.example",]
    assert value(metrics, "relay_connected", relay="wss://two.example") is None


def test_each_lagging_consumer_has_a_series_and_their_number_is_bounded() -> None:
    metrics = Metrics()
    metrics.change_log(5_000, [ConsumerLag(f"c{number}", number, 10 * number) for number in range(30)], cut_off=1)
    assert value(metrics, "change_log_bytes") == 5_000
    assert value(metrics, "consumer_lag_seconds") == 29
    assert value(metrics, "consumers", state="following") == 30
    assert value(metrics, "consumers", state="cut-off") == 1
    assert value(metrics, "consumer_behind_seconds", consumer="c29") == 29
    assert value(metrics, "consumer_behind_changes", consumer="c29") == 290
    listed = [
        sample
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "indexer_consumer_behind_seconds"
    ]
    assert len(listed) == MAX_LISTED
    metrics.change_log(5_000, [], cut_off=0)
    assert value(metrics, "consumer_behind_seconds", consumer="c29") is None


def test_postponed_resyncs_are_counted_without_a_duration() -> None:
    metrics = Metrics()
    for result in ("postponed", "postponed", "new-accounts"):
        metrics.postponed(result)
    assert value(metrics, "resync_total", result="postponed") == 2
    assert value(metrics, "resync_total", result="new-accounts") == 1
    assert value(metrics, "resync_seconds_count") == 0


def test_failed_stage_is_measured() -> None:
    metrics, other = Metrics(), Metrics()
    with pytest.raises(ZeroDivisionError), metrics.stage("apply"):
        _ = 1 / 0
    assert value(metrics, "batch_seconds_count", stage="apply") == 1
    assert value(other, "batch_seconds_count", stage="apply") == 0, "instances share no state"


def test_names_and_labels_outside_the_closed_sets_are_errors() -> None:
    metrics = Metrics()
    with pytest.raises(KeyError):
        metrics.received("telegram")
    with pytest.raises(KeyError):
        metrics.stage("lunch")
    for name in ("indexer_unknown", "indexer_database_up"):  # the second one has a value of its own
        with pytest.raises(KeyError, match=name):
            metrics.watch({name: lambda: 1.0})
