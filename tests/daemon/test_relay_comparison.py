"""Two relays are compared: one is charged with what it lacks, and the other one covers its gaps."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path

import pytest

from indexer.cli.demo import compare
from indexer.live.relay_comparison import ComparisonSettings
from indexer.telemetry.conditions import RELAY_LACKS_MESSAGES
from tests.background import running
from tests.daemon.running_daemon import POST, RunningDaemon, post, running_daemon
from tests.daemon_harness import wait_for_cursor
from tests.database_checks import assert_change_log_consistent
from tests.faulty_network import FaultyAccount, FaultyNetwork
from tests.quick_tuning import QUICK
from tests.relay_proxy import RelayProxy
from tests.waiting import until

TUNING = replace(QUICK, comparison=ComparisonSettings(missing=2.0, margin=1.0))
GAPS = "select relay, reason, closed_by from atproto.gaps order by opened_at"
LIVE_CHANGES = "select did, collection, rkey, rev, action from atproto.changes where live and collection is not null"


@dataclass
class Relays:
    """A network with two relays, each behind a proxy."""

    network: FaultyNetwork
    one: RelayProxy
    two: RelayProxy
    accounts: list[FaultyAccount]

    @asynccontextmanager
    async def daemon(self, database: str, directory: Path) -> AsyncIterator[RunningDaemon]:
        """Run a daemon; wait until both streams are compared."""
        urls = f"{self.one.relay_url},{self.two.relay_url}"
        async with running_daemon(database, directory, self.network, tuning=TUNING, relays=urls) as daemon:
            lacking = daemon.stages.comparison.lacking
            async with self.writing():
                await until(lambda: all(lacking.is_compared(proxy.relay_url) for proxy in (self.one, self.two)))
            yield daemon

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Let the accounts write all the time, as fast as the first relay sends."""

        async def write() -> None:
            for account in cycle(self.accounts):
                account.create(POST, post("hello"))
                await until(partial(self.one.has_read, account.did, account.rev))

        async with running(write()):
            yield


@asynccontextmanager
async def relays_behind_proxies() -> AsyncIterator[Relays]:
    async with FaultyNetwork(relays=2) as network:
        one, two = (RelayProxy(int(url.rpartition(":")[2])) for url in network.relay_urls)
        async with one.serve(), two.serve():
            accounts = [network.create_account(f"account{number}.test") for number in range(5)]
            yield Relays(network, one, two, accounts)


async def wait_until_equal_and_charged(relays: Relays, daemon: RunningDaemon) -> None:
    """Wait until the database equals the network, and each relay is charged with exactly what it has not sent."""

    async def equal() -> bool:
        return not await compare(daemon.network, daemon.db)

    await until(equal)
    one, two = relays.one, relays.two

    def lacked() -> list[float]:  # the last commits may still come
        return [len(two.passed - one.passed), len(one.passed - two.passed)]

    def charged() -> list[float]:
        return [daemon.counter("relay_missing_messages", relay=proxy.relay_url) for proxy in (one, two)]

    await until(lambda: charged() == lacked(), lambda: (charged(), lacked()))
    assert daemon.counter_sum("relay_uncompared_messages") == 0


async def assert_nothing_was_fetched_or_doubled(daemon: RunningDaemon) -> None:
    """Check that no repo was fetched, and that each change is in the change log once."""
    assert daemon.export_requests == 0
    assert daemon.counter_sum("desynchronized") == 0
    changes = [tuple(row) for row in await daemon.execute(LIVE_CHANGES)]
    assert len(changes) == len(set(changes)) > 0
    await assert_change_log_consistent(daemon.dsn)


@pytest.mark.slow
async def test_relay_is_charged_with_exactly_what_it_loses(database: str, tmp_path: Path) -> None:
    """First the one loses commits, then the other one. No repo is fetched because of it."""
    async with relays_behind_proxies() as relays, relays.daemon(database, tmp_path) as daemon:
        async with relays.writing():
            for proxy in (relays.one, relays.two):
                proxy.lose_every = 20
                await until(partial(has_lost, proxy, 5))
                proxy.lose_every = None
        await wait_until_equal_and_charged(relays, daemon)
        conditions = [one for one in daemon.stages.conditions.active() if one.kind is RELAY_LACKS_MESSAGES]
        assert {one.subject: one.count for one in conditions} == {
            proxy.relay_url: len(proxy.lost) for proxy in (relays.one, relays.two)
        }
        await assert_nothing_was_fetched_or_doubled(daemon)


@pytest.mark.slow
async def test_gap_of_a_restarted_sequence_is_closed_by_the_other_stream(database: str, tmp_path: Path) -> None:
    """One relay loses each hundredth commit, is stopped for a while, and starts a new sequence.

    No reconciliation begins, no repo is fetched, nothing is logged twice, and the daemon does not wait for it.
    """
    async with relays_behind_proxies() as relays, relays.daemon(database, tmp_path) as daemon:
        async with relays.writing():
            relays.two.lose_every = 100
            await until(partial(has_lost, relays.two, 2))
            faulty, sent = daemon.network.relays[1], len(relays.one.passed)
            await faulty.stop()
            await until(lambda: len(relays.one.passed) > sent + 100)
            await wait_for_cursor(daemon.stages, relays.one.relay_url, daemon.network.relays[0].seq)
            faulty.restart_sequence()
            await faulty.start()
            await until(lambda: gaps_closed(daemon), daemon.stages.probe.not_ready)
            await until(partial(has_lost, relays.two, 4))
        await wait_until_equal_and_charged(relays, daemon)
        assert len(relays.one.passed - relays.two.passed) > 100, "the stop was noticed"
        rows = [tuple(row) for row in await daemon.execute(GAPS)]
        assert rows == [(relays.two.relay_url, "sequence-restarted", relays.one.relay_url)]
        assert daemon.stages.reconciliation.crawl_progress is None
        assert daemon.stages.probe.not_ready() == []
        await assert_nothing_was_fetched_or_doubled(daemon)


def has_lost(proxy: RelayProxy, count: int) -> bool:
    return len(proxy.lost) >= count


async def gaps_closed(daemon: RunningDaemon) -> bool:
    """Return True if there were gaps, and all are closed."""
    closed_by = [row[2] for row in await daemon.execute(GAPS)]
    return bool(closed_by) and None not in closed_by
