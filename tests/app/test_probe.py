from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from indexer.app.stages import Stage, all_stages
from indexer.app.status import DaemonProbe
from indexer.concurrency import stage_progress
from indexer.concurrency.stage_progress import StageProgress
from indexer.telemetry.conditions import DATABASE_UNAVAILABLE, HOST_FAILING, IDENTITY_LOOKUPS_FAILING, Conditions
from tests.app.fake_daemon import fake_daemon


def probe_of(
    roles: tuple[str, ...] = ("live", "resync"), *, watched: Sequence[StageProgress] = (), **stages: Any
) -> DaemonProbe:
    """Return a probe of an idle, connected daemon, with some attributes of stages replaced."""
    daemon = fake_daemon(roles, **stages)
    listed = [
        *(replace(stage, progress=()) for stage in all_stages(daemon, ()) if stage.role in {None, *roles}),
        *(Stage(progress.name, progress=[progress]) for progress in watched),
    ]
    return DaemonProbe(listed, daemon.database_monitor, daemon.shard_ownership, daemon.started_at)


def ago(seconds: float) -> float:
    return monotonic() - seconds


def waiting(name: str = "a stage", *, needs_database: bool = True, needs_shard: bool = False) -> StageProgress:
    """Return a stage that has waited for 130 seconds."""
    stage = StageProgress(name, needs_database=needs_database, needs_shard=needs_shard)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stage_progress, "monotonic", lambda: ago(130))
        stage.begin()
    return stage


def test_idle_daemon_is_healthy_and_ready() -> None:
    probe = probe_of(watched=[StageProgress("a stage")])
    assert (probe.stalled(), probe.not_ready()) == ([], [])


def test_every_stage_that_stalled_is_named_with_its_time() -> None:
    reasons = probe_of(watched=[waiting("inbox"), StageProgress("idle"), waiting("resync pool")]).stalled()
    assert [reason.message for reason in reasons] == [
        "inbox stalled: it has work and made no progress for 130 s",
        "resync pool stalled: it has work and made no progress for 130 s",
    ]
    assert {reason.code for reason in reasons} == {"stage-stalled"}
    assert all(130 <= reason.value < 140 for reason in reasons)


def test_no_stage_counts_as_stalled_because_the_database_does_not_answer() -> None:
    stage = waiting()
    assert probe_of(watched=[stage], database_monitor={"answering_since": None}).stalled() == []
    back: dict[str, Any] = {"answering_since": ago(10)}
    assert probe_of(watched=[stage], database_monitor=back).stalled() == [], "it just came back"
    without = waiting(needs_database=False)
    assert probe_of(watched=[without], database_monitor={"answering_since": None}).stalled() != []


def test_no_stage_counts_as_stalled_because_another_process_owns_the_shard() -> None:
    stage = waiting(needs_shard=True)
    assert probe_of(watched=[stage]).stalled() != []
    assert probe_of(watched=[stage], shard_ownership={"owned_since": None}).stalled() == []
    assert probe_of(watched=[stage], shard_ownership={"owned_since": ago(10)}).stalled() == []


def failing() -> SimpleNamespace:
    """Return work that has failed for 20 seconds."""
    return SimpleNamespace(name="a stage", last_error="unreachable: no row", failing_since=ago(20))


@pytest.mark.parametrize(
    ("make_stages", "message", "value"),
    [
        (
            lambda: {"resync_pool": {"claims": failing()}},
            "the last claim of repos failed and is retried: unreachable: no row",
            20,
        ),
        (
            lambda: {"batch_writer": {"stage": failing()}},
            "the last batch was not written and is retried: unreachable: no row",
            20,
        ),
        (
            lambda: {"streams": [{"consumer": {"last_error": "FutureCursor", "failing_since": ago(30)}}]},
            "FutureCursor",
            30,
        ),
        (lambda: {"streams": [{"subscription": {"connection": None}}]}, "no relay is connected", 40),
        (
            lambda: {"streams": [{"subscription": {"connection": None, "last_error": "401"}}]},
            "no relay is connected; last error: 401",
            40,
        ),
        (lambda: {"batch_writer": {"lag": 75.0}}, "the newest stored event is 75 s old", 75),
        (
            lambda: {"batch_writer": {"lag": None, "cursor_age": 7_200.0, "totals": SimpleNamespace(settled=0)}},
            "the newest stored event is 7200 s old",
            7_200,
        ),
        (
            lambda: {"batch_writer": {"lag": None}},
            "the lag is unknown: no event of the relay has a possible time",
            3,
        ),
        (lambda: {"open_gaps": {"gaps": None}}, "it is not known yet whether gaps are open", 1_000),
        (lambda: {"shard_ownership": {"last_error": "another process"}}, "another process", 950),
    ],
)
def test_reason_why_the_daemon_is_not_ready_has_a_number(
    make_stages: Callable[[], dict[str, Any]], message: str, value: float
) -> None:
    [found] = probe_of(**make_stages()).not_ready()
    assert found.message == message
    assert value <= found.value < value + 100


def test_daemon_is_ready_while_one_of_two_streams_works() -> None:
    works: dict[str, Any] = {}
    lost = {"subscription": {"connection": None}}
    failing = {"consumer": {"last_error": "FutureCursor", "failing_since": ago(30)}}
    for streams, codes in (
        ([works, lost], []),
        ([failing, works], []),
        ([lost, failing], ["stream-error"]),
        ([lost, lost], ["relay-disconnected"]),
    ):
        assert [reason.code for reason in probe_of(streams=streams).not_ready()] == codes


def test_all_reasons_are_given_at_once() -> None:
    conditions = Conditions()
    conditions.report(IDENTITY_LOOKUPS_FAILING, message="identity lookups fail", value=0.98)
    conditions.report(DATABASE_UNAVAILABLE, message="the database does not answer")
    conditions.report(HOST_FAILING, "one.example", message="requests to one.example fail")
    probe = probe_of(
        conditions={"active": conditions.active},
        streams=[{"subscription": {"connection": None}}],
        batch_writer={"lag": 75.04},
    )
    reasons = probe.not_ready()
    assert [reason.code for reason in reasons] == [
        "identity-lookups-failing",
        "database-unavailable",
        "relay-disconnected",
        "lag",
    ]
    assert (reasons[0].value, reasons[3].value) == (0.98, 75.0)
    assert 0 <= reasons[1].value < 60, "seconds since it began"
