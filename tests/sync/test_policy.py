"""When a rev counts as being in the future, and an identity as recent."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.syntax import MAX_CLOCK_ID, MAX_TID_MICROS, tid_micros, tid_of
from indexer.sync.policy import MAX_IDENTITY_AGE, KeyState, is_future


@given(st.integers(0, MAX_TID_MICROS), st.integers(0, MAX_CLOCK_ID), st.floats(0, 1e11))
def test_rev_is_in_the_future_if_its_time_is(micros: int, clock_id: int, now: float) -> None:
    rev = tid_of(micros, clock_id)
    limit = (now + DEFAULT_LIMITS.clock_drift_seconds) * 1_000_000
    assert is_future(rev, now, DEFAULT_LIMITS) == (tid_micros(rev) > limit)


def test_limit_is_exact_and_may_be_beyond_all_revs() -> None:
    limits = replace(DEFAULT_LIMITS, clock_drift_seconds=300)
    for step in (-1, 0, 1):
        assert is_future(tid_of(1_300_000_000 + step, MAX_CLOCK_ID), 1_000.0, limits) == (step > 0)
    limits = replace(DEFAULT_LIMITS, clock_drift_seconds=10**12)
    assert not is_future(tid_of(MAX_TID_MICROS, MAX_CLOCK_ID), 0.0, limits)


@pytest.mark.parametrize(("age", "recent"), [(-1, False), (0, True), (MAX_IDENTITY_AGE, True), (121, False)])
def test_identity_is_recent_for_two_minutes(age: float, recent: bool) -> None:
    identity = KeyState(None, fetched_at=1_000.0)
    assert identity.is_recent(1_000.0 + age) is recent
    assert not identity._replace(available=False).is_recent(1_000.0 + age)
    assert not identity._replace(stale=True).is_recent(1_000.0 + age)
