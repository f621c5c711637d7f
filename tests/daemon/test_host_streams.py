"""A relay withholds accounts, and the daemon reads the stream of their host."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from indexer.demo.local_relay import message_frame
from indexer.live.host_streams import HostStreamSettings
from indexer.reasons import Rejection
from indexer.tasks.hosts import HostSettings
from tests.daemon.running_daemon import POST, RunningDaemon, post, running_daemon
from tests.database_checks import assert_change_log_consistent
from tests.faulty_network import FaultyAccount
from tests.quick_tuning import QUICK
from tests.waiting import until
from tests.withholding_network import WithholdingNetwork

LINGER = 1.0
TUNING = replace(
    QUICK,
    hosts=HostSettings(first_wait=0.0, poll=0.05, settle=0.3, follow=0.2),
    host_streams=HostStreamSettings(interval=0.05, linger=LINGER),
)
JUNK = message_frame("#commit", {"junk": bytes(20_000)})
LIVE_CHANGES = "select did, collection, rkey, rev, action from atproto.changes where live and collection is not null"


@dataclass
class World:
    """A daemon, an account that its relay withholds, and one on another host, which it shows."""

    daemon: RunningDaemon
    network: WithholdingNetwork
    withheld: FaultyAccount
    shown: FaultyAccount

    async def state(self) -> tuple[str, bool, str]:
        """Return the sync status of the withheld account, whether it is withheld, and its rev."""
        row = await self.daemon.repo_row(self.withheld)
        return row["sync_status"], row["withheld_since"] is not None, row["rev"]

    async def wait_until_followed(self) -> None:
        """Wait until the withheld account is synchronized at its present rev."""

        async def followed() -> bool:
            return await self.state() == ("synchronized", True, self.withheld.rev)

        await until(followed)

    async def write(self, text: str) -> None:
        """Let the withheld account write, and wait until a stream has brought something."""
        received = self.daemon.counter_sum("events_received")
        self.withheld.create(POST, post(text))
        await until(lambda: self.daemon.counter_sum("events_received") > received)

    async def subscription(self) -> int | None:
        """Return the number of the time without a gap in the stream of the host; None: it is not subscribed."""
        rows = await self.daemon.execute("select id from indexer.subscribed_host where pds = $1", self.network.host.url)
        return rows[0]["id"] if rows else None

    async def assert_nothing_doubled(self) -> None:
        """Check that each change is logged once, that each message has an outcome, and that no gap was opened."""
        changes = [tuple(row) for row in await self.daemon.execute(LIVE_CHANGES)]
        assert len(changes) == len(set(changes)) > 0
        await assert_change_log_consistent(self.daemon.dsn)
        await until(lambda: self.daemon.counter_sum("events_received") == self.daemon.counter_sum("events"))
        assert await self.daemon.execute("select * from atproto.gaps") == []
        assert self.daemon.stages.probe.not_ready() == []


@asynccontextmanager
async def daemon_of(network: WithholdingNetwork, database: str, directory: Path) -> AsyncIterator[RunningDaemon]:
    async with running_daemon(database, directory, network, tuning=TUNING) as daemon:
        yield daemon


@asynccontextmanager
async def world_of(database: str, directory: Path) -> AsyncIterator[World]:
    """Let the relay withhold an account, and wait until the stream of its host is read."""
    async with WithholdingNetwork() as network, daemon_of(network, database, directory) as daemon:
        withheld, shown = daemon.create_account("ada.test"), daemon.create_account("bea.test")
        assert (withheld.pds, shown.pds) == tuple(network.pdses)
        await daemon.wait_until_equal()
        world = World(daemon, network, withheld, shown)
        network.relay.withhold(withheld)
        await world.wait_until_followed()
        yield world


@pytest.mark.slow
async def test_withheld_account_is_followed_by_the_stream_of_its_host(database: str, tmp_path: Path) -> None:
    """When the relay shows it again, nothing doubles, and the stream ends."""
    async with world_of(database, tmp_path) as world:
        exports = world.daemon.export_requests
        for number in range(5):
            world.withheld.create(POST, post(f"withheld {number}"))
            await world.wait_until_followed()
        assert world.daemon.export_requests == exports, "nothing is fetched"
        process = world.daemon.stages.status.document().process or {}
        shown = [row["relay"] for row in process["streams"]]
        assert shown == [world.network.relay_url, world.network.host.url]
        world.network.relay.show(world.withheld)
        for number in range(20):
            await world.write(f"shown {number}")
        await world.daemon.wait_until_equal()
        assert (await world.state())[:2] == ("synchronized", False)
        assert world.daemon.export_requests <= exports + 1, "it is compared with its host"
        await world.assert_nothing_doubled()
        await until(lambda: not world.daemon.stages.host_streams.streams)
        assert await world.subscription() is None
        world.withheld.create(POST, post("the relay brings it"))
        await world.daemon.wait_until_equal()


@pytest.mark.slow
async def test_gap_in_the_stream_of_a_host_desynchronizes_its_withheld_accounts(database: str, tmp_path: Path) -> None:
    """They are compared with the host. The relay has no gap, and the daemon stays ready."""
    async with world_of(database, tmp_path) as world:
        before, withheld = await world.subscription(), world.daemon.counter("desynchronized", reason="withheld")
        world.withheld.create(POST, post("lost"))
        world.network.host.events.forget_messages(keep=0)
        assert world.network.host.events.abort_connections() == 1
        world.withheld.create(POST, post("after the gap"))
        await world.daemon.wait_for_counter("desynchronized", above=withheld, reason="withheld")
        await world.wait_until_followed()
        assert await world.subscription() not in {before, None}
        await world.daemon.wait_until_equal()
        await world.assert_nothing_doubled()


@pytest.mark.slow
async def test_stream_of_a_host_is_resumed_after_a_restart_without_a_gap(database: str, tmp_path: Path) -> None:
    async with WithholdingNetwork() as network:
        async with daemon_of(network, database, tmp_path) as daemon:
            account = daemon.create_account("ada.test")
            await daemon.wait_until_equal()
            network.relay.withhold(account)
            world = World(daemon, network, account, account)
            await world.wait_until_followed()
            account.create(POST, post("so that there is a cursor"))
            await world.wait_until_followed()
            before = await world.subscription()
        account.create(POST, post("meanwhile"))
        async with daemon_of(network, database, tmp_path) as daemon:
            world = World(daemon, network, account, account)
            await world.wait_until_followed()
            assert (await world.subscription(), daemon.counter_sum("desynchronized")) == (before, 0)
            assert daemon.counter_sum("resync") == 0
            await daemon.wait_until_equal()
            await world.assert_nothing_doubled()


@pytest.mark.slow
async def test_host_that_stays_unreachable_is_left(database: str, tmp_path: Path) -> None:
    """Its stream is begun again after a pause, which is much longer than this test."""
    async with world_of(database, tmp_path) as world:
        streams = world.daemon.stages.host_streams
        streams.settings = replace(streams.settings, patience=0.2)
        await world.network.host.stop()
        await until(lambda: not streams.streams)

        async def left() -> bool:
            return (await world.state())[:2] == ("desynchronized", True) and await world.subscription() is None

        await until(left)
        assert world.daemon.stages.probe.not_ready() == []


@pytest.mark.slow
async def test_host_says_nothing_about_accounts_of_other_hosts(database: str, tmp_path: Path) -> None:
    async with world_of(database, tmp_path) as world:
        relay, liar, other = world.network.relay, world.network.host.events, world.shown
        other.create(POST, post("so that its identity is known"))
        await world.daemon.wait_until_equal()
        lookups = world.network.plc.requests.total()
        rejected = world.daemon.counter("rejected", reason=Rejection.WRONG_HOST)
        for sent in [sent for sent in relay.log if sent.did == other.did]:
            assert sent.payload is not None
            liar.inject(message_frame(sent.kind, sent.payload | {"seq": liar.seq + 1, "time": "2026-01-02T00:00:00Z"}))
        for did in (other.did, "did:plc:" + "a" * 24):
            gone = {"did": did, "active": False, "status": "deleted", "time": "2030-01-01T00:00:00Z"}
            liar.inject(message_frame("#account", gone | {"seq": liar.seq + 1}))
        world.withheld.create(POST, post("the truth"))
        await world.wait_until_followed()
        await world.daemon.wait_for_counter("rejected", above=rejected, reason=Rejection.WRONG_HOST)
        await until(lambda: not world.daemon.stages.inbox.unsettled)
        row = await world.daemon.repo_row(other)
        assert (row["active"], row["sync_status"]) == (True, "synchronized")
        assert world.network.plc.requests.total() == lookups
        await world.daemon.wait_until_equal()


@pytest.mark.slow
async def test_host_that_floods_does_not_delay_others(database: str, tmp_path: Path) -> None:
    async with world_of(database, tmp_path) as world:
        flood = world.network.host.events
        for _ in range(5_000):
            flood.inject(JUNK)
        await until(lambda: world.daemon.counter_sum("rejected") > 0)
        for number in range(10):
            world.shown.create(POST, post(number))
            await world.daemon.wait_for_cursor()
        assert world.daemon.counter_sum("rejected") < 5_000, "the flood is not over"
        assert world.daemon.stages.batch_writer.totals.rejected.total() == 0, "they do not decide readiness"
