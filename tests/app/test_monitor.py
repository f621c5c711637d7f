"""Shares of rejected messages and of failed lookups within a minute, and failing hosts."""

from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from structlog.testing import capture_logs

from indexer.app.monitor import MIN_LOOKUPS, MIN_MESSAGES, WINDOW_SECONDS, DaemonMonitor, RecentTotals
from indexer.errors import UnavailableError
from indexer.live.batch_writer import SettledTotals
from indexer.net.http.host_limits import FAILURE_THRESHOLD, HostLimits, RateLimits
from indexer.net.identity.identity_cache import LookupTotals
from indexer.reasons import FetchFailure, Rejection
from indexer.telemetry.conditions import Conditions
from tests.app.fake_daemon import fake_stream


class Monitored:
    def __init__(self) -> None:
        self.now = 1_000.0
        self.settled, self.lookups = SettledTotals(), {"plc": LookupTotals(), "web": LookupTotals()}
        self.hosts = HostLimits(RateLimits(host=1_000), lambda: self.now, lambda _result: None)
        self.conditions = Conditions(lambda: self.now)
        self.streams = [fake_stream("wss://one.example")]
        lookups: Any = self.lookups
        self.monitor = DaemonMonitor(self.settled, lookups, self.hosts, self.streams, self.conditions, lambda: self.now)

    async def after(self, seconds: float, *, rejected: int = 0, applied: int = 0) -> list[tuple[str, str]]:
        """Settle messages, check after some time, and return the active conditions."""
        self.settled.settled += rejected + applied
        self.settled.rejected.update({Rejection.WRONG_HOST: rejected} if rejected else {})
        self.settled.examples[Rejection.WRONG_HOST] = "did:plc:a, seq 7: hosted at two.example"
        self.now += seconds
        self.monitor.check()
        return [(condition.kind.name, condition.subject) for condition in self.conditions.active()]


@pytest.fixture
def monitored() -> Monitored:
    return Monitored()


REJECTED = [("messages-rejected", "wrong-host")]


async def test_reason_for_more_than_half_of_a_minutes_messages_is_a_condition_until_it_is_not(
    monitored: Monitored,
) -> None:
    with capture_logs() as lines:
        assert await monitored.after(2, rejected=50, applied=50) == []
        assert await monitored.after(2, rejected=1) == REJECTED
        assert await monitored.after(2, rejected=10) == REJECTED
        assert await monitored.after(2, applied=30) == []
    assert [(line["event"], line["log_level"]) for line in lines] == [
        ("condition.began", "warning"),
        ("condition.ended", "info"),
    ]
    assert "did:plc:a, seq 7" in lines[0]["message"]


async def test_few_messages_are_not_judged(monitored: Monitored) -> None:
    assert await monitored.after(2, rejected=MIN_MESSAGES - 1) == []
    assert await monitored.after(61, rejected=1) == []
    assert await monitored.after(2, rejected=MIN_MESSAGES - 1) == REJECTED


async def test_rejections_end_with_the_stream(monitored: Monitored) -> None:
    assert await monitored.after(2, rejected=30) == REJECTED
    assert await monitored.after(50) == REJECTED
    assert await monitored.after(15) == REJECTED
    assert await monitored.after(50) == []


async def test_failing_directory_is_a_condition_until_most_lookups_succeed(monitored: Monitored) -> None:
    directory = monitored.lookups["plc"]
    directory.failed, directory.last_error = MIN_LOOKUPS - 1, "timeout: no response"
    assert await monitored.after(2) == []
    directory.failed += 1
    assert await monitored.after(2) == [("identity-lookups-failing", "")]
    [condition] = monitored.conditions.active()
    assert condition.value == 1
    directory.answered += 4
    assert await monitored.after(2) != []
    directory.answered += 1
    assert await monitored.after(2) == []


async def test_hosts_of_did_web_do_not_make_the_directory_fail(monitored: Monitored) -> None:
    monitored.lookups["web"].failed = 1_000
    assert await monitored.after(2) == []


async def test_host_is_failing_until_it_responds(monitored: Monitored) -> None:
    for _ in range(FAILURE_THRESHOLD):
        async with monitored.hosts.slot("one.example") as slot:
            with suppress(UnavailableError), slot.record_errors():
                raise UnavailableError(FetchFailure.UNREACHABLE, "refused")
    for _ in range(50):  # also when the pause is over
        assert await monitored.after(2) == [("host-failing", "one.example")]
    async with monitored.hosts.slot("one.example") as slot:
        slot.record_response(200, None)
    await monitored.after(2)
    assert await monitored.after(20) == []


def test_growth_is_counted_within_the_window() -> None:
    recent = RecentTotals(0.0)
    assert recent.add(2.0, {"a": 3, "b": 1}) == Counter(a=3, b=1)
    assert recent.add(30.0, {"a": 5, "b": 1}) == Counter(a=5, b=1)
    assert recent.add(2.0 + WINDOW_SECONDS, {"a": 6, "b": 1}) == Counter(a=3)
    assert recent.add(30.0 + WINDOW_SECONDS, {"a": 6, "b": 1}) == Counter(a=1)
    assert recent.add(1_000.0, {"a": 6, "b": 1}) == Counter()


async def test_a_relay_of_several_that_delivers_nothing_is_a_condition_until_it_does(monitored: Monitored) -> None:
    lost: dict[str, Any] = {"subscription": {"connection": None, "last_error": "503"}}
    monitored.streams[:] = [fake_stream(**lost)]
    assert await monitored.after(2) == [], "the only one makes the daemon unready"
    monitored.streams[:] = [fake_stream(), fake_stream("wss://two.example", **lost)]
    assert await monitored.after(2) == [("relay-failing", "wss://two.example")]
    [condition] = monitored.conditions.active()
    assert "not connected; last error: 503" in condition.message
    monitored.streams[1] = fake_stream("wss://two.example", consumer={"last_error": "FutureCursor"})
    assert await monitored.after(100) == [("relay-failing", "wss://two.example")]
    monitored.streams[1] = fake_stream("wss://two.example")
    assert await monitored.after(2) == []
