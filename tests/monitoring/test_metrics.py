import math
from collections.abc import Mapping
from typing import get_args

import pytest

from indexer.monitoring.health import MetricsPage
from indexer.monitoring.metric_definitions import MAX_LISTED, METRICS
from indexer.monitoring.metrics import ACTIONS, KINDS, ConsumerLag, Metrics
from indexer.reasons import Desync, FetchFailure, Rejection
from indexer.sync.events import Event
from indexer.sync.plans import Action
from indexer.sync.repo_state import SyncStatus
from indexer.sync.repo_transitions import Outcome

# Names and labels that dashboards depend on.
NAMES = {
    "indexer_events_received_total": {"kind"},
    "indexer_events_total": {"kind", "outcome"},
    "indexer_rejected_total": {"reason"},
    "indexer_desynchronized_total": {"reason"},
    "indexer_record_changes_total": {"action", "live"},
    "indexer_firehose_lag_seconds": set(),
    "indexer_repos": {"sync_status"},
    "indexer_resync_total": {"result"},
    "indexer_resync_seconds_count": set(),
    "indexer_resync_queue": set(),
    "indexer_scope_incomplete_repos": set(),
    "indexer_identity_lookups_total": {"method", "result"},
    "indexer_identity_cache_total": {"found_in"},
    "indexer_identity_refreshes_total": {"cause", "result"},
    "indexer_outbound_requests_total": {"result"},
    "indexer_hosts_paused": set(),
    "indexer_batch_seconds_count": {"stage"},
    "indexer_queue_bytes": set(),
    "indexer_change_log_bytes": set(),
    "indexer_consumer_lag_seconds": set(),
    "indexer_consumers": {"state"},
    "indexer_build_info": {"version", "python"},
    "indexer_database_up": set(),
    "indexer_links_progress_ratio": set(),
    "indexer_links_open_deltas": set(),
}


def sample_value(metrics: Metrics, name: str, labels: Mapping[str, str] | None = None) -> float | None:
    return metrics.registry.get_sample_value(name, dict(labels or {}))


def test_every_metric_exists_from_the_start_with_its_labels() -> None:
    samples = [sample for family in Metrics().registry.collect() for sample in family.samples]
    found = {sample.name: set(sample.labels) for sample in samples}
    assert {name: found.get(name) for name in NAMES} == NAMES


def test_registry_shows_exactly_the_defined_metrics() -> None:
    suffixes = {"counter": "_total", "info": "_info"}
    shown = {
        family.name + suffixes.get(family.type, ""): (family.type.replace("info", "gauge"), family.documentation)
        for family in Metrics().registry.collect()
        if family.name.startswith("indexer_")
    }
    assert shown == {name: (definition.kind, definition.meaning) for name, definition in METRICS.items()}


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text"])
def test_no_series_tells_when_a_counter_was_created(accept: str) -> None:
    text, _ = MetricsPage(Metrics().registry, interval=0).text(accept)
    assert b"indexer_events_total{" in text
    assert b"_created" not in text


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
        outcomes = [
            sample_value(metrics, "indexer_events_total", {"kind": kind, "outcome": outcome}) for outcome in Outcome
        ]
        assert outcomes == [1] * len(Outcome)
        assert sample_value(metrics, "indexer_events_received_total", {"kind": kind}) == len(Outcome)


def test_every_reason_can_be_counted() -> None:
    metrics = Metrics()
    for rejection in Rejection:
        metrics.rejected(rejection)
        assert sample_value(metrics, "indexer_rejected_total", {"reason": rejection.value}) == 1
    for desync in Desync:
        metrics.desynchronized(desync)
        metrics.resync(desync, 0.2)
        assert sample_value(metrics, "indexer_desynchronized_total", {"reason": desync.value}) == 1
    for failure in FetchFailure:
        metrics.resync(failure, 0.2)
        metrics.identity_lookup("plc", failure)
        assert sample_value(metrics, "indexer_identity_lookups_total", {"method": "plc", "result": failure.value}) == 1
        assert sample_value(metrics, "indexer_resync_total", {"result": failure.value}) == 1
    assert sample_value(metrics, "indexer_resync_seconds_count") == len(Desync) + len(FetchFailure)


def test_record_changes_of_live_events_and_resyncs_are_counted_apart() -> None:
    metrics = Metrics()
    metrics.record_changes("create", live=True)
    metrics.record_changes("create", live=False, count=40)
    assert sample_value(metrics, "indexer_record_changes_total", {"action": "create", "live": "true"}) == 1
    assert sample_value(metrics, "indexer_record_changes_total", {"action": "create", "live": "false"}) == 40


def test_gauges_show_the_value_that_was_set() -> None:
    metrics = Metrics()
    assert math.isnan(sample_value(metrics, "indexer_firehose_lag_seconds") or 0)
    metrics.watch({"indexer_firehose_lag_seconds": lambda: 1.5, "indexer_queue_bytes": lambda: 77})
    metrics.cursor("wss://one.example", 9)
    metrics.repos(
        {SyncStatus.SYNCHRONIZED: 3, SyncStatus.DESYNCHRONIZED: 1}, {"behind": 1}, resync_queue=2, incomplete=5
    )
    assert sample_value(metrics, "indexer_firehose_lag_seconds") == 1.5
    assert sample_value(metrics, "indexer_queue_bytes") == 77
    assert sample_value(metrics, "indexer_cursor_seq", {"relay": "wss://one.example"}) == 9
    assert sample_value(metrics, "indexer_repos", {"sync_status": "synchronized"}) == 3
    assert sample_value(metrics, "indexer_repos", {"sync_status": "in-progress"}) == 0
    assert sample_value(metrics, "indexer_resync_queue") == 2
    assert sample_value(metrics, "indexer_scope_incomplete_repos") == 5
    assert sample_value(metrics, "indexer_repos_desynchronized", {"reason": "behind"}) == 1
    metrics.repos({SyncStatus.SYNCHRONIZED: 4}, {}, resync_queue=0, incomplete=0)
    assert sample_value(metrics, "indexer_repos_desynchronized", {"reason": "behind"}) == 0


def test_progress_of_links_is_complete_while_none_are_kept() -> None:
    metrics = Metrics()
    assert sample_value(metrics, "indexer_links_progress_ratio") == 1
    metrics.links(0.25, 7)
    assert sample_value(metrics, "indexer_links_progress_ratio") == 0.25
    assert sample_value(metrics, "indexer_links_open_deltas") == 7
    metrics.links(None, 0)
    assert sample_value(metrics, "indexer_links_progress_ratio") == 1


def test_gauge_with_labels_is_read_at_each_scrape() -> None:
    metrics = Metrics()
    connected: dict[tuple[str, ...], float] = {("wss://one.example",): 1.0, ("wss://two.example",): 0.0}
    metrics.watch({"indexer_relay_connected": lambda: connected})
    for (relay,), value in connected.items():
        assert sample_value(metrics, "indexer_relay_connected", {"relay": relay}) == value
    del connected["wss://two.example",]
    assert sample_value(metrics, "indexer_relay_connected", {"relay": "wss://two.example"}) is None


def test_only_gauges_without_a_value_of_their_own_can_be_read_from_the_stages() -> None:
    for name in ("indexer_unknown", "indexer_database_up"):
        with pytest.raises(KeyError, match=name):
            Metrics().watch({name: lambda: 1.0})


def test_each_lagging_consumer_has_a_series_and_their_number_is_bounded() -> None:
    metrics = Metrics()
    metrics.change_log(5_000, [ConsumerLag(f"c{number}", number, 10 * number) for number in range(30)], cut_off=1)
    assert sample_value(metrics, "indexer_change_log_bytes") == 5_000
    assert sample_value(metrics, "indexer_consumer_lag_seconds") == 29
    assert sample_value(metrics, "indexer_consumers", {"state": "following"}) == 30
    assert sample_value(metrics, "indexer_consumers", {"state": "cut-off"}) == 1
    assert sample_value(metrics, "indexer_consumer_behind_seconds", {"consumer": "c29"}) == 29
    assert sample_value(metrics, "indexer_consumer_behind_changes", {"consumer": "c29"}) == 290
    listed = [
        sample
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "indexer_consumer_behind_seconds"
    ]
    assert len(listed) == MAX_LISTED
    metrics.change_log(5_000, [], cut_off=0)
    assert sample_value(metrics, "indexer_consumer_behind_seconds", {"consumer": "c29"}) is None


def test_postponed_resyncs_are_counted_without_a_duration() -> None:
    metrics = Metrics()
    for result in ("postponed", "postponed", "new-accounts"):
        metrics.postponed(result)
    assert sample_value(metrics, "indexer_resync_total", {"result": "postponed"}) == 2
    assert sample_value(metrics, "indexer_resync_total", {"result": "new-accounts"}) == 1
    assert sample_value(metrics, "indexer_resync_seconds_count") == 0


def test_failed_stage_is_measured() -> None:
    metrics = Metrics()
    with pytest.raises(ZeroDivisionError), metrics.stage("apply"):
        _ = 1 / 0
    assert sample_value(metrics, "indexer_batch_seconds_count", {"stage": "apply"}) == 1


def test_label_outside_the_closed_set_is_an_error() -> None:
    metrics = Metrics()
    with pytest.raises(KeyError):
        metrics.received("telegram")
    with pytest.raises(KeyError):
        metrics.stage("lunch")


def test_two_instances_share_no_state() -> None:
    one, other = Metrics(), Metrics()
    one.received("commit")
    assert sample_value(other, "indexer_events_received_total", {"kind": "commit"}) == 0
