"""Two relays at once: both bring everything, one omits, floods, forges or is lost."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from indexer.app.daemon import open_daemon
from indexer.cli.demo import compare
from indexer.demo.local_relay import message_frame
from indexer.demo.local_repo import Write
from indexer.demo.scenario import Scenario
from tests.daemon.running_daemon import POST, RunningDaemon, commit_payload, post, running_daemon
from tests.daemon_harness import settings_for, wait_for_cursor
from tests.database_checks import assert_change_log_consistent
from tests.faulty_network import FaultyNetwork
from tests.waiting import until

JUNK = message_frame("#commit", {"junk": bytes(20_000)})
LIVE_CHANGES = "select did, collection, rkey, rev, action from atproto.changes where live and collection is not null"


@asynccontextmanager
async def two_relays(database: str, directory: Path, **settings: Any) -> AsyncIterator[RunningDaemon]:
    """Run a daemon that consumes both relays of a network."""
    async with FaultyNetwork(relays=2) as network, daemon_of(network, database, directory, **settings) as daemon:
        yield daemon


@asynccontextmanager
async def daemon_of(
    network: FaultyNetwork, database: str, directory: Path, **settings: Any
) -> AsyncIterator[RunningDaemon]:
    relays = ",".join(network.relay_urls)
    async with running_daemon(database, directory, network, relays=relays, **settings) as daemon:
        yield daemon


async def wait_until_read(daemon: RunningDaemon, *numbers: int) -> None:
    """Wait until the cursors are at the ends of the streams of these relays, and the database equals the network."""
    for number in numbers:
        await wait_for_cursor(
            daemon.stages, daemon.network.relay_urls[number], daemon.network.relays[number].log[-1].seq
        )

    async def equal() -> bool:
        return not await compare(daemon.network, daemon.db)

    await until(equal)


async def assert_nothing_was_lost_or_doubled(daemon: RunningDaemon) -> None:
    """Check that no gap was opened and no repo fetched, and that each change is in the change log once."""
    assert daemon.stages.probe.not_ready() == []
    assert await daemon.execute("select * from atproto.gaps") == []
    assert daemon.export_requests == 0
    assert daemon.counter_sum("desynchronized") == 0
    changes = [tuple(row) for row in await daemon.execute(LIVE_CHANGES)]
    assert len(changes) == len(set(changes)) > 0
    await until(lambda: daemon.counter_sum("events_received") == daemon.counter_sum("events"))
    await assert_change_log_consistent(daemon.dsn)


@pytest.mark.slow
async def test_both_relays_bring_everything_and_each_change_is_logged_once(database: str, tmp_path: Path) -> None:
    """Also after a restart with both cursors."""
    async with FaultyNetwork(relays=2) as network:
        scenario = Scenario(network, seed=3)
        for part in (0, 1):
            async with daemon_of(network, database, tmp_path) as daemon:
                for step in range(60 * part, 60 * part + 60):
                    scenario.perform(step, 120)
                await wait_until_read(daemon, 0, 1)
                assert daemon.stages.probe.not_ready() == []
                assert daemon.counter_sum("duplicate_events") >= 60
                assert daemon.counter_sum("events_received") == daemon.counter_sum("events")
                assert await daemon.execute("select * from atproto.gaps") == []
                connected = daemon.stages.metrics.registry.get_sample_value
                for url in network.relay_urls:
                    assert connected("indexer_relay_connected", {"relay": url}) == 1
        await assert_change_log_consistent(database)


@pytest.mark.slow
async def test_losing_one_of_two_relays_opens_no_gap_and_causes_no_resync_and_no_lag(
    database: str, tmp_path: Path
) -> None:
    """The lost one is resumed at its cursor."""
    async with two_relays(database, tmp_path) as daemon:
        accounts = [daemon.create_account(f"account{number}.test") for number in range(5)]
        await wait_until_read(daemon, 0, 1)
        for lost, other in ((0, 1), (1, 0)):
            await daemon.network.relays[lost].stop()
            await until(lambda: any(stream.trouble for stream in daemon.stages.streams))
            for number in range(10):
                for account in accounts:
                    account.create(POST, post(number))
            await wait_until_read(daemon, other)
            assert daemon.stages.probe.not_ready() == []
            assert (daemon.stages.batch_writer.lag or 0.0) < 60
            await until(lambda: "relay-failing" in str(daemon.stages.conditions.active()))
            await daemon.network.relays[lost].start()
            await wait_until_read(daemon, lost)
        await until(lambda: "relay-failing" not in str(daemon.stages.conditions.active()))
        await assert_nothing_was_lost_or_doubled(daemon)


async def test_streams_of_all_relays_wait_for_the_first_entry_of_each(database: str, tmp_path: Path) -> None:
    relays = "ws://127.0.0.1:1,ws://127.0.0.1:2"
    async with open_daemon(settings_for("", "http://127.0.0.1:3", tmp_path, relays=relays), database) as daemon:
        first, second = [stream.continuity for stream in daemon.streams]
        assert first is not None
        assert second is not None
        assert first.first_entries is not None
        assert first.first_entries is second.first_entries
        assert first.first_entries.parties == 2


@pytest.mark.slow
async def test_one_relay_brings_what_the_other_one_omits(database: str, tmp_path: Path) -> None:
    """Each relay omits every tenth commit."""
    async with two_relays(database, tmp_path) as daemon:
        accounts = [daemon.create_account(f"account{number}.test") for number in range(5)]
        await wait_until_read(daemon, 0, 1)
        omitted = 0
        for number in range(200):
            account = accounts[number % len(accounts)]
            if number % 5 == 0:
                daemon.network.relays[omitted % 2].drop(account.did)
                omitted += 1
            account.create(POST, post(number))
            if number % 20 == 19:
                await wait_until_read(daemon, 0, 1)
        assert sum(relay.dropped.total() for relay in daemon.network.relays) == omitted == 40
        await assert_nothing_was_lost_or_doubled(daemon)


@pytest.mark.slow
async def test_forged_copies_that_come_first_do_not_displace_the_real_commits(database: str, tmp_path: Path) -> None:
    """One relay sends commits with real revs and false blocks, before the other one sends the real ones."""
    async with two_relays(database, tmp_path) as daemon:
        account, network = daemon.create_account("ada.test"), daemon.network
        await wait_until_read(daemon, 0, 1)
        for number in range(10):
            liar, honest = network.relays[number % 2], network.relays[1 - number % 2]
            change = account.apply_writes([Write.create(f"{POST}/{number}", post(number))], lost=True)
            flipped = change.blocks[:-1] + bytes([change.blocks[-1] ^ 1])
            payload = commit_payload(account.did, change, network.clock.now())
            liar.inject(message_frame("#commit", payload | {"seq": liar.seq + 1, "blocks": flipped}))
            await wait_for_cursor(daemon.stages, network.relay_urls[number % 2], liar.seq)
            honest.inject(message_frame("#commit", payload | {"seq": honest.seq + 1}))
        await wait_until_read(daemon, 0, 1)
        assert daemon.counter_sum("rejected") == 10
        await assert_nothing_was_lost_or_doubled(daemon)


@pytest.mark.slow
async def test_a_relay_that_floods_does_not_delay_the_messages_of_the_other(database: str, tmp_path: Path) -> None:
    async with two_relays(database, tmp_path) as daemon:
        account = daemon.create_account("ada.test")
        await wait_until_read(daemon, 0, 1)
        flood, other = daemon.network.relays
        for _ in range(50_000):
            flood.inject(JUNK)
        flood.drop(account.did, events=20)
        await until(lambda: daemon.stages.inbox.unsettled > 50)
        for number in range(20):
            account.create(POST, post(number))
            await wait_for_cursor(daemon.stages, daemon.network.relay_urls[1], other.seq)
        assert daemon.stages.inbox.unsettled > 50, "the flood was not over"
