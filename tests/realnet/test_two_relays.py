"""Two of Bluesky's relays at once: one loses commits, is stopped for a minute, and starts a new sequence."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from time import monotonic

import pytest

from indexer.app.daemon import Daemon
from tests.background import running
from tests.daemon_harness import run_daemon, settings_for
from tests.database_checks import assert_change_log_consistent, fetch
from tests.database_server import DatabaseServer
from tests.realnet.compare_with_pdses import records_of, wait_until_equal
from tests.realnet.real_network import RealAccount, real_network
from tests.realnet.real_relay import real_relay, require_relay
from tests.realnet.test_network import NOTE
from tests.relay_proxy import RelayProxy
from tests.waiting import until

ACCOUNTS = 10
STOP_SECONDS = 60.0
MAX_LAG = 5.0
GAPS = "select relay, reason, closed_by from atproto.gaps order by opened_at"
CHANGES = "select did, collection, rkey, rev, action from atproto.changes where live and collection is not null"


@pytest.mark.proof("realnet")
@pytest.mark.timeout(900)
async def test_one_relay_is_charged_and_its_gap_is_covered_by_the_other_one(
    database: str, postgres: DatabaseServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No gap stays open, no repo is fetched again, nothing is logged twice, and the daemon does not lag."""
    require_relay()
    monkeypatch.setattr("tests.waiting.TIMEOUT", 240.0)
    databases = [postgres.create(migrated=False) for _ in range(2)]
    with real_network(2, tmp_path) as network:
        pdses = network.pds
        accounts = [
            await asyncio.to_thread(pdses[number % 2].create_account, f"account{number}") for number in range(ACCOUNTS)
        ]
        async with (
            real_relay(network, databases[0], tmp_path / "one") as first,
            real_relay(network, databases[1], tmp_path / "two") as second,
            proxy_of(first.port) as one,
            proxy_of(second.port) as two,
        ):
            relays = f"{one.relay_url},{two.relay_url}"
            settings = settings_for(one.relay_url, network.plc_url, tmp_path, relays=relays, resync_source="pds")
            async with run_daemon(settings, database) as daemon:
                await start(daemon, accounts, database, one, two)
                fetched, lags = counter_sum(daemon, "resync"), list[float]()
                async with running(write(accounts, one, daemon, lags)):
                    two.lose_every = 100
                    await until(lambda: len(two.lost) >= 2)
                    await second.stop()
                    stopped_at = monotonic()
                    await until(lambda: monotonic() - stopped_at > STOP_SECONDS)
                    await second.forget_everything()
                    await second.start()
                    for pds in pdses:
                        await second.subscribe(pds)
                    await until(lambda: gap_is_closed(database), second.log_tail)
                    assert two.last_seq < len(one.passed), "it started a new sequence"
                    await until(lambda: len(two.lost) >= 4)
                await wait_until_equal(database, await records_of(*accounts))
                await until(
                    lambda: charged(daemon, one, two) == lacked(one, two),
                    lambda: (charged(daemon, one, two), lacked(one, two)),
                )
                assert lacked(one, two)[0] == 0
                assert lacked(one, two)[1] > len(two.lost), (
                    "it brought nothing of what was written while it was stopped"
                )
                rows = [tuple(row) for row in await fetch(database, GAPS)]
                assert rows == [(two.relay_url, "sequence-restarted", one.relay_url)]
                assert counter_sum(daemon, "resync") == fetched
                assert counter_sum(daemon, "desynchronized", reason="chain-break") == 0
                assert max(lags) < MAX_LAG
                assert daemon.probe.not_ready() == []
    changes = [tuple(row) for row in await fetch(database, CHANGES)]
    assert len(changes) == len(set(changes)) > 0
    await assert_change_log_consistent(database)
    for dsn in databases:
        postgres.drop(dsn)


@asynccontextmanager
async def proxy_of(port: int) -> AsyncIterator[RelayProxy]:
    proxy = RelayProxy(port)
    async with proxy.serve():
        yield proxy


async def start(daemon: Daemon, accounts: list[RealAccount], database: str, *proxies: RelayProxy) -> None:
    """Wait until all accounts are synchronized and both streams are compared. The relays name those that write."""
    for account in accounts:
        await asyncio.to_thread(account.create, NOTE, {"n": -1})
    async with running(write(accounts, proxies[0], daemon, [])):
        await until(lambda: all(daemon.comparison.lacking.is_compared(proxy.relay_url) for proxy in proxies))
    await wait_until_equal(database, await records_of(*accounts))


async def write(accounts: list[RealAccount], relay: RelayProxy, daemon: Daemon, lags: list[float]) -> None:
    """Let the accounts write all the time, as fast as the relay sends, and note the lags. A write that has begun ends.

    The relay loses nothing, and `lags` is empty.
    """
    sent = len(relay.passed)
    for number in count():
        await asyncio.shield(asyncio.to_thread(accounts[number % len(accounts)].create, NOTE, {"n": number}))
        await until(lambda: len(relay.passed) > sent + len(lags))
        lags.append(daemon.batch_writer.lag or 0.0)


async def gap_is_closed(database: str) -> bool:
    rows = await fetch(database, GAPS)
    return bool(rows) and all(row["closed_by"] for row in rows)


def counter_sum(daemon: Daemon, name: str, **labels: str) -> float:
    """Return the sum of the counter `indexer_{name}_total` over all its series with these labels."""
    samples = [sample for family in daemon.metrics.registry.collect() for sample in family.samples]
    named = [one for one in samples if one.name == f"indexer_{name}_total"]
    return sum(one.value for one in named if labels.items() <= one.labels.items())


def lacked(one: RelayProxy, two: RelayProxy) -> list[float]:
    """Return how many commits each relay lacks that the other one has passed on. The last ones may still come."""
    return [len(two.passed - one.passed), len(one.passed - two.passed)]


def charged(daemon: Daemon, *proxies: RelayProxy) -> list[float]:
    return [counter_sum(daemon, "relay_missing_messages", relay=proxy.relay_url) for proxy in proxies]
