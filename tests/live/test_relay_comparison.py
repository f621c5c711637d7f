"""The streams of relays are compared: their states, what is settled, and what is shown of it."""

from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from indexer.live.relay_comparison import CAUGHT_UP_LAG, SILENT_SECONDS, ComparisonSettings, RelayComparison
from indexer.reasons import GapReason
from indexer.sync.batch import ReceivedMessage, SettledMessage
from indexer.sync.repo import Outcome
from indexer.sync.stream import Gap, Origin
from indexer.telemetry.conditions import RELAY_LACKS_MESSAGES, Conditions
from indexer.telemetry.metrics import Metrics
from tests.app.fake_daemon import fake_stream
from tests.live.test_covered_gaps import GapsInMemory
from tests.sync.signing_account import SigningAccount, received_message

ONE, TWO, HOST = "wss://one.test", "wss://two.test", "wss://host.test"


def stream(
    relay: str, *, opened: float | None = 60.0, lag: float | None = 0.1, silent: float | None = 0.1, known: bool = True
) -> Any:
    """Return a stream that was opened, and has sent its last message, so many seconds ago."""
    connection = None if opened is None else SimpleNamespace(relay=relay, opened_at=monotonic() - opened)
    return fake_stream(
        relay,
        subscription={"connection": connection},
        position={"lag": lag, "is_known": lambda: known, "clock": SimpleNamespace(reached=0.0)},
        consumer={"last_message": {} if silent is None else {relay: monotonic() - silent}},
    )


def comparison_of(*streams: Any) -> RelayComparison:
    relays = {one.position.origin.relay: one for one in streams}
    return RelayComparison(relays, GapsInMemory(), Metrics(), Conditions(), ComparisonSettings(missing=0.0))


def settled(relay: str, message: ReceivedMessage, *, is_new: bool = True) -> SettledMessage:
    return SettledMessage(message._replace(origin=Origin(relay)), Outcome.APPLIED, is_new=is_new)


def missing(comparison: RelayComparison, relay: str, name: str = "missing") -> float | None:
    return comparison.metrics.registry.get_sample_value(f"indexer_relay_{name}_messages_total", {"relay": relay})


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({}, True),
        ({"lag": CAUGHT_UP_LAG + 1.0}, False),
        ({"lag": None}, False),
        ({"lag": 3_600.0, "silent": SILENT_SECONDS + 1.0}, True),
        ({"lag": 3_600.0, "silent": 3_600.0, "opened": SILENT_SECONDS - 5.0}, False),
        ({"lag": None, "silent": None}, True),
        ({"opened": None}, False),
        ({"known": False}, False),
    ],
)
async def test_stream_is_compared_if_it_is_connected_and_sends_nothing_old(
    state: dict[str, Any], expected: bool
) -> None:
    comparison = comparison_of(stream(ONE), stream(TWO, **state))
    await comparison.check()
    assert comparison.lacking.is_compared(ONE)
    assert comparison.lacking.is_compared(TWO) == expected


async def test_relay_that_lacks_messages_is_shown() -> None:
    comparison, alice = comparison_of(stream(ONE), stream(TWO)), SigningAccount()
    await comparison.check()
    assert [missing(comparison, relay) for relay in (ONE, TWO)] == [0, 0]
    posts = [received_message("commit", alice.commit_post(rkey)) for rkey in "abc"]
    sync = received_message("sync", alice.sync_event())
    comparison.add([settled(ONE, posts[0]), settled(TWO, posts[1])], [posts[0]._replace(origin=Origin(TWO))])
    comparison.add([settled(ONE, posts[1], is_new=False), settled(ONE, posts[2]), settled(HOST, sync)], ())
    await comparison.check()
    assert [missing(comparison, relay) for relay in (ONE, TWO)] == [0, 1]
    comparison.add([settled(TWO, sync)], ())
    await comparison.check()
    assert [missing(comparison, relay) for relay in (ONE, TWO)] == [1, 1]
    condition, _ = comparison.conditions.active()
    assert (condition.kind, condition.subject, condition.count) == (RELAY_LACKS_MESSAGES, TWO, 1)
    assert f"the commit {posts[2].event.rev} of {alice.did}" in condition.message  # type: ignore[union-attr]
    assert comparison.show(TWO) == {"compared": True, "missing_messages": 1}
    assert comparison.lacking.omits(TWO, monotonic())


async def test_messages_beyond_the_limit_are_counted() -> None:
    comparison = comparison_of(stream(ONE), stream(TWO))
    await comparison.check()
    comparison.lacking.not_compared[TWO] = 3
    for _ in range(2):
        await comparison.check()
    assert [missing(comparison, relay, "uncompared") for relay in (ONE, TWO)] == [0, 3]


@pytest.mark.parametrize(("status", "omits"), [("throttled", True), ("takendown", False), (None, False)])
async def test_relay_owes_no_message_of_an_account_that_it_calls_inactive(status: str | None, *, omits: bool) -> None:
    """One that withholds an account omits its messages: its stream covers no gap."""
    comparison, alice = comparison_of(stream(ONE), stream(TWO)), SigningAccount()
    await comparison.check()
    account = received_message("account", alice.account_event(active=False, status=status))
    post = received_message("commit", alice.commit_post("a"))
    comparison.add([settled(TWO, account, is_new=False), settled(ONE, post)], ())
    await comparison.check()
    assert (missing(comparison, TWO), comparison.lacking.omits(TWO, monotonic())) == (0, omits)
    active = received_message("account", alice.account_event(active=True))
    comparison.add((), [active._replace(origin=Origin(TWO))])
    comparison.add([settled(ONE, received_message("commit", alice.commit_post("b")))], ())
    assert not comparison.lacking.omits(TWO, monotonic())
    await comparison.check()
    assert missing(comparison, TWO) == 1


async def test_single_stream_is_compared_with_nothing() -> None:
    comparison, alice = comparison_of(stream(ONE)), SigningAccount()
    await comparison.check()
    comparison.add([settled(ONE, received_message("commit", alice.commit_post("a")))], ())
    await comparison.check()
    assert missing(comparison, ONE) is None
    assert comparison.lacking.newest(ONE) < 0.0, "it costs nothing"
    assert comparison.show(ONE) == {"compared": None, "missing_messages": None}
    await comparison.gaps.open(Gap(TWO, "0/1", GapReason.NO_CURSOR))
    assert not comparison.covered.may_close_all(), "a relay that is no longer in the settings has a gap"
