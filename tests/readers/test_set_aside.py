"""When a refused event is set aside, and what of it is stored."""

import math
from typing import Any, cast

import pytest

from indexer.db.change_log_reads import LoggedChange
from indexer.db.tap_feed import DeliveryProgress, SetAside
from indexer.readers.tap.deliveries import Deliveries, RefusalLimits
from indexer.readers.tap.delivery_window import FIRST_SNAPSHOT_ID

A, B = "did:plc:a", "did:plc:b"
HIDDEN = SetAside("hidden", A, "", "", "2", "", 0, 0.0, "")


def change(seq: int, did: str = A, rev: str = "1") -> LoggedChange:
    """Return an old change."""
    return LoggedChange(seq, did, "c", f"{seq}", "create", None, rev, live=True, batch_time=0)


async def delivering(*changes: LoggedChange, limits: RefusalLimits = RefusalLimits(2, 0.0)) -> Deliveries:  # noqa: B008
    """Return deliveries whose first changes are in flight."""
    deliveries = Deliveries(cast("Any", None), DeliveryProgress(0, 0), limits, one_per_repo=False)
    deliveries.window.add(changes)
    if changes:
        await deliveries.take(100)
    return deliveries


async def test_changes_that_wait_behind_refused_ones_are_set_aside_before_the_consumer_is_disconnected() -> None:
    deliveries = await delivering(*map(change, range(1, 5)), change(5, B), limits=RefusalLimits(2, 0.0, 2, 3_600.0))
    deliveries.count_failure(1, "status 422")
    deliveries.set_aside_late()
    assert deliveries.window.progress().position == 0, "nothing is known about this repo yet"
    deliveries.acknowledge(5)
    deliveries.count_failure(1, "status 422")
    assert 1 not in deliveries.window
    deliveries.set_aside_late()
    assert deliveries.window.progress() == DeliveryProgress(5, 5)
    added = deliveries.set_aside.changes().added
    assert [(row.rkey, row.attempts) for row in added] == [("1", 2), ("2", 0), ("3", 0), ("4", 0)]
    assert "3600 seconds" in added[-1].failure


async def test_client_that_acknowledges_nothing_lets_nothing_be_set_aside() -> None:
    deliveries = await delivering(change(1), change(2, B))
    for _ in range(100):
        deliveries.count_failure(1, "x")
        deliveries.count_failure(2, "x")
    assert {1, 2} == {seq for seq in (1, 2) if seq in deliveries.window}


async def test_further_events_of_a_repo_are_set_aside_without_the_time_limit() -> None:
    deliveries = await delivering(change(1), change(2), *(change(seq, B) for seq in range(3, 9)))
    for seq in (1, 2):
        for attempt in range(3):
            deliveries.count_failure(seq, "x")
            deliveries.acknowledge(3 + 3 * (seq - 1) + attempt)
        assert seq not in deliveries.window
        deliveries.limits = RefusalLimits(10, 900.0)


@pytest.mark.parametrize(
    ("lag_limit", "seconds", "max_age"), [(0, 900, math.inf), (1_209_600, 900, 604_800), (3_600, 450, 1_800)]
)
def test_limits_are_below_the_lag_at_which_a_consumer_is_disconnected(
    lag_limit: float, seconds: float, max_age: float
) -> None:
    limits = RefusalLimits.below(lag_limit)
    assert (limits.seconds, limits.max_age) == (seconds, max_age)


async def test_what_is_set_aside_again_while_it_is_sent_stays_stored() -> None:
    deliveries = await delivering()
    aside = deliveries.set_aside
    aside.begin(HIDDEN)
    [sending] = aside.sending.values()
    aside.read(sending, [("c", "1"), ("c", "2")], last=True)
    [first, second] = await deliveries.take(10)
    assert (first.seq, first.action, first.rev, first.live) == (FIRST_SNAPSHOT_ID, "create", "2", False)
    deliveries.acknowledge(first.seq)
    assert aside.changes().delivered == []
    aside.add_hidden(second)
    aside.begin(HIDDEN)
    deliveries.window.acknowledge(second.seq)
    changes = aside.changes()
    assert ([row.key for row in changes.added], changes.delivered) == ([HIDDEN.key], [])
    aside.begin(HIDDEN)
    [sending] = aside.sending.values()
    aside.read(sending, [], last=True)
    assert aside.changes().delivered == [HIDDEN.key]
