"""Which of several reports about an account counts: messages of several relays, and answers of a relay."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.sync.account import plan_active, plan_hidden
from indexer.sync.repo import Outcome, Repo, StreamPoint
from indexer.sync.stream import Origin
from tests.sync.signing_account import CONTEXT, NOW, RELAY, SigningAccount, plan

OTHER = "wss://other.test"
CONTEXTS = {relay: replace(CONTEXT, origin=Origin(relay)) for relay in (RELAY, OTHER)}


def message(alice: SigningAccount, seq: int, seconds: float, *, active: bool = False) -> dict[str, Any]:
    """Return a message that was sent so many seconds after `NOW`."""
    time = datetime.fromtimestamp(NOW + seconds, UTC).isoformat()
    return alice.account_event(active=active) | {"seq": seq, "time": time}


def is_replayed(repo: Repo, payload: dict[str, Any], relay: str, **context: Any) -> bool:
    return plan(repo, "account", payload, None, replace(CONTEXTS[relay], **context)).outcome is Outcome.REPLAYED


@given(
    st.lists(st.booleans(), min_size=1, max_size=8),
    st.lists(st.sampled_from([RELAY, OTHER]), max_size=16),
    st.integers(-20, 20),
    st.integers(-10_000, 240),
)
def test_the_latest_message_counts_however_the_program_changes_between_relays(
    statuses: Sequence[bool], reads: Sequence[str], offset: int, ahead: int
) -> None:
    """Both relays pass on the same messages with numbers of their own. Each is read from its beginning, in order.

    The host of the account sends a message per second. Its clock is slow, or fast by at most four minutes.
    """
    alice = SigningAccount()
    repo, passed = alice.row(), {RELAY: 0, OTHER: 0}
    for relay in reads:
        if (number := passed[relay]) < len(statuses):
            seq = 100 + number + (offset if relay == OTHER else 0)
            sent = message(alice, seq, number + ahead, active=statuses[number])
            context = replace(CONTEXTS[relay], now=NOW + max(number, *passed.values()))
            repo = plan(repo, "account", sent, None, context).repo
            passed[relay] += 1
    if any(passed.values()):
        assert repo.active == statuses[max(passed.values()) - 1]


def test_time_in_the_future_does_not_stop_later_messages() -> None:
    alice, drift = SigningAccount(), CONTEXT.policy.limits.clock_drift_seconds
    hidden = plan(alice.row(), "account", message(alice, 5, 10_000_000), None).repo
    assert hidden.hosting_time == NOW + drift
    assert not is_replayed(hidden, message(alice, 1, drift + 1, active=True), OTHER, now=NOW + drift + 1)


def test_message_of_another_relay_counts_if_its_time_is_the_latest_one() -> None:
    """Two messages may have the same time, and this may be the second one."""
    alice = SigningAccount()
    hidden = plan(alice.row(), "account", message(alice, 5, 0), None).repo
    assert not is_replayed(hidden, message(alice, 1, 0, active=True), OTHER)


@pytest.mark.parametrize(("stored", "sent"), [("never", "2026-09-21T00:00:00Z"), ("2026-09-21T00:00:00Z", "never")])
def test_message_of_another_relay_counts_if_a_time_is_unknown(stored: str, sent: str) -> None:
    alice = SigningAccount()
    hidden = plan(alice.row(), "account", message(alice, 5, 0) | {"time": stored}, None).repo
    assert not is_replayed(hidden, message(alice, 1, 0, active=True) | {"time": sent}, OTHER)


def test_times_of_two_hosts_are_not_compared() -> None:
    """An account may move to a host whose clock is slow. Messages of former hosts are rejected before."""
    alice = SigningAccount()
    pdses = replace(CONTEXT, policy=replace(CONTEXT.policy, upstream_is_pds=True))
    former = replace(pdses, origin=Origin(RELAY, host="former.test"))
    later = replace(pdses, origin=Origin(OTHER, host="later.test"))
    keys = [alice.key_state._replace(host=host, final=True, fetched_at=NOW) for host in ("former.test", "later.test")]
    hidden = plan(alice.row(), "account", message(alice, 5, 0), keys[0], former).repo
    assert not hidden.active
    assert plan(hidden, "account", message(alice, 1, -60, active=True), keys[1], later).repo.active


class TestAnswers:
    """A relay was asked for the hosting status of an account. Its message 50, sent a minute ago, was stored."""

    POINT = StreamPoint(RELAY, 0, 50, NOW - 60)

    @pytest.mark.parametrize("active", [True, False])
    def test_answer_is_as_new_as_the_stream_of_the_relay(self, active: bool) -> None:
        alice = SigningAccount()
        before = alice.row(active=not active, hosting_relay=OTHER, hosting_seq=900, hosting_time=NOW - 600)
        after = plan_active(before, NOW, self.POINT) if active else plan_hidden(before, None, NOW, 0, self.POINT)
        assert after.active == active
        contrary = not active
        assert is_replayed(after, message(alice, 950, -90, active=contrary), OTHER)
        assert not is_replayed(after, message(alice, 950, -30, active=contrary), OTHER)
        assert is_replayed(after, message(alice, 50, -30, active=contrary), RELAY)
        assert not is_replayed(after, message(alice, 51, -90, active=contrary), RELAY)

    def test_answer_does_not_make_the_last_message_older(self) -> None:
        """Messages may be stored in another order than they arrived: that of the row may be after the cursor."""
        before = SigningAccount().row(hosting_relay=RELAY, hosting_seq=60, hosting_time=NOW - 30)
        after = plan_hidden(before, None, NOW, 0, self.POINT)
        assert (after.active, after.hosting_seq, after.hosting_time) == (False, 60, NOW - 30)

    @pytest.mark.parametrize("last", [-30, 200])
    @pytest.mark.parametrize("time", [None, NOW - 600])
    def test_answer_keeps_the_time_of_a_later_message(self, time: float | None, last: int) -> None:
        """The stream of the relay may be behind, and the clock of the host that sent the last message may be fast."""
        before = SigningAccount().row(hosting_relay=OTHER, hosting_seq=60, hosting_time=NOW + last)
        after = plan_hidden(before, None, NOW, 0, self.POINT._replace(time=time))
        assert (after.hosting_relay, after.hosting_seq, after.hosting_time) == (RELAY, 50, NOW + last)

    def test_time_of_an_answer_is_at_most_the_present_one(self) -> None:
        after = plan_hidden(SigningAccount().row(), None, NOW, 0, self.POINT._replace(time=NOW + 10_000))
        assert after.hosting_time == NOW

    def test_answer_of_a_relay_whose_stream_is_not_open_leaves_the_last_message(self) -> None:
        before = SigningAccount().row(hosting_relay=OTHER, hosting_seq=60, hosting_time=NOW - 30)
        after = plan_hidden(before, None, NOW, 0)
        assert (after.active, after.hosting_relay, after.hosting_seq) == (False, OTHER, 60)
