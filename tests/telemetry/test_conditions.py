"""A condition is logged when it begins, rarely while it lasts, and when it is over."""

from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
from structlog.testing import capture_logs

from indexer.telemetry.conditions import (
    CLUSTER_NODE_UNAVAILABLE,
    DATABASE_UNAVAILABLE,
    HOST_FAILING,
    MAX_SUBJECTS,
    MESSAGES_REJECTED,
    OTHERS,
    RESYNCS_FAILING,
    Conditions,
)


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def conditions(clock: Clock) -> Conditions:
    return Conditions(clock)


@pytest.fixture
def lines() -> Iterator[list[MutableMapping[str, Any]]]:
    with capture_logs() as captured:
        yield captured


def test_condition_is_logged_once_when_it_begins_and_once_when_it_ends(
    conditions: Conditions, clock: Clock, lines: list[MutableMapping[str, Any]]
) -> None:
    for _ in range(5):
        conditions.report(DATABASE_UNAVAILABLE, message="refused", count=3)
        conditions.update()
        clock.now += 2
    [active] = conditions.active()
    assert (active.kind, active.count) == (DATABASE_UNAVAILABLE, 15)
    conditions.end(DATABASE_UNAVAILABLE)
    conditions.end(DATABASE_UNAVAILABLE)
    assert conditions.active() == []
    common = {"condition": "database-unavailable", "subject": ""}
    assert lines == [
        common | {"event": "condition.began", "log_level": "warning", "message": "refused"},
        common | {"event": "condition.ended", "log_level": "info", "seconds": 10, "count": 15},
    ]


def test_condition_that_is_not_reported_for_a_while_is_over(
    conditions: Conditions, clock: Clock, lines: list[MutableMapping[str, Any]]
) -> None:
    conditions.report(RESYNCS_FAILING, "timeout at one.example", message="did:plc:a: timeout")
    clock.now += RESYNCS_FAILING.quiet_seconds
    conditions.report(RESYNCS_FAILING, "timeout at one.example", message="did:plc:b: timeout")
    clock.now += RESYNCS_FAILING.quiet_seconds
    conditions.update()
    assert conditions.is_active(RESYNCS_FAILING, "timeout at one.example")
    clock.now += 1
    conditions.update()
    assert conditions.active() == []
    assert [(line["event"], line["subject"]) for line in lines] == [
        ("condition.began", "timeout at one.example"),
        ("condition.ended", "timeout at one.example"),
    ]


def test_subjects_are_conditions_of_their_own_up_to_a_limit(
    conditions: Conditions, lines: list[MutableMapping[str, Any]]
) -> None:
    for number in range(1_000):
        for _ in range(2):
            conditions.report(HOST_FAILING, f"host{number}.example", message="requests fail")
    conditions.report(MESSAGES_REJECTED, "wrong-host", message="another kind")
    subjects = [condition.subject for condition in conditions.active()]
    assert subjects == [*(f"host{number}.example" for number in range(MAX_SUBJECTS)), OTHERS, "wrong-host"]
    assert len(lines) == len(subjects)
    assert conditions.active()[MAX_SUBJECTS].count == 2 * (1_000 - MAX_SUBJECTS)


def test_condition_that_only_its_end_ends_is_over_for_each_of_many_subjects() -> None:
    conditions = Conditions()
    nodes = [f"10.0.0.{number}:5432" for number in range(MAX_SUBJECTS + 5)]
    for node in nodes:
        conditions.report(CLUSTER_NODE_UNAVAILABLE, node, message="it does not answer")
    for node in nodes:
        conditions.end(CLUSTER_NODE_UNAVAILABLE, node)
    assert conditions.active() == []
