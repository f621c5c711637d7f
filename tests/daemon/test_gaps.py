"""Missed messages: every repo is found again, and until then the daemon says that repos may be outdated."""

from collections.abc import AsyncIterator, MutableMapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from structlog.testing import capture_logs

from indexer.cli.demo import compare
from indexer.localnet.http_server import Fault
from indexer.localnet.local_account import LocalAccount
from indexer.localnet.local_network import LocalNetwork
from indexer.localnet.local_pds import LIST_REPOS
from indexer.localnet.local_relay import message_frame
from indexer.service.crawl.reconcile import ReconciliationSettings
from indexer.service.live.stream_continuity import StreamContinuity
from tests.daemon.running_daemon import POST, RunningDaemon, post, running_daemon
from tests.database_server import DatabaseServer
from tests.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def quick_reconciliation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait less for the stream, for a relay, and after a failure."""
    quick = partial(ReconciliationSettings, settle=0.3, poll=0.05, first_retry=0.1)
    monkeypatch.setattr("indexer.daemon.ReconciliationSettings", quick)


@asynccontextmanager
async def daemon_of(
    network: LocalNetwork, database: str, directory: Path, **settings: Any
) -> AsyncIterator[RunningDaemon]:
    relays = ",".join(network.relay_urls)
    async with running_daemon(database, directory, network, relays=relays, **settings) as daemon:
        yield daemon


async def is_equal(daemon: RunningDaemon) -> bool:
    return not (await compare(daemon.network, daemon.store)).differences


async def create_synchronized(daemon: RunningDaemon, count: int) -> list[LocalAccount]:
    accounts = [daemon.create_account(f"account{number}.test", records=2) for number in range(count)]
    await until(lambda: is_equal(daemon))
    return accounts


async def wait_until_equal_and_ready(daemon: RunningDaemon) -> None:
    """Wait until the database equals the network. A daemon that is ready must not have differences."""

    async def repaired() -> bool:
        ready = daemon.stages.probe.ready() == []
        differences = (await compare(daemon.network, daemon.store)).differences
        return ready and not differences

    await until(repaired, daemon.stages.probe.ready)


async def gaps(daemon: RunningDaemon) -> list[tuple[Any, ...]]:
    """Return relay, reason, first seq, last seq, and True if it is closed, of each gap."""
    rows = await daemon.execute(
        "select relay, reason, first_seq, last_seq, closed_at is not null from atproto.gaps order by opened_at"
    )
    return [tuple(row) for row in rows]


def commit_each(accounts: Sequence[LocalAccount], text: str) -> None:
    for account in accounts:
        account.create(POST, post(text))


def relay_of(daemon: RunningDaemon) -> str | None:
    connection = daemon.stages.subscription.connection
    return None if connection is None else connection.relay


async def test_change_over_to_another_relay_loses_nothing(database: str, tmp_path: Path) -> None:
    """The second relay has no cursor. Its stream is entered where the first one ended, although START is `live`."""
    async with LocalNetwork(relays=2) as network, daemon_of(network, database, tmp_path, start="live") as daemon:
        await until(lambda: relay_of(daemon) == network.relay_urls[0])
        accounts = await create_synchronized(daemon, 5)
        await network.relay.stop()
        commit_each(accounts, "while no relay is connected")
        await until(lambda: relay_of(daemon) == network.relay_urls[1])
        await until(lambda: is_equal(daemon))
        await wait_until_equal_and_ready(daemon)
        assert await gaps(daemon) == []
        assert daemon.counter_sum("desynchronized") == 0
        assert daemon.export_requests == 0


async def test_change_over_to_a_relay_that_lost_the_span_opens_a_gap(database: str, tmp_path: Path) -> None:
    async with LocalNetwork(relays=2) as network, daemon_of(network, database, tmp_path, start="live") as daemon:
        await until(lambda: relay_of(daemon) == network.relay_urls[0])
        accounts = await create_synchronized(daemon, 5)
        network.relays[1].restart_sequence(5_000)  # it has none of the messages
        await network.relay.stop()
        commit_each(accounts, "lost")
        network.relays[1].restart_sequence(7_000)
        await wait_until_equal_and_ready(daemon)
        assert await gaps(daemon) == [(network.relay_urls[1], "no-cursor", None, None, True)]
        assert daemon.counter("desynchronized", reason="behind") == 5


async def test_old_account_message_of_another_relay_does_not_show_a_hidden_account(
    database: str, tmp_path: Path
) -> None:
    """It has a higher number than the message that took the account down, and an earlier time."""
    async with LocalNetwork(relays=2) as network, daemon_of(network, database, tmp_path) as daemon:
        await until(lambda: relay_of(daemon) == network.relay_urls[0])
        before = network.clock.now()
        [account, *_] = await create_synchronized(daemon, 2)
        account.takedown()
        await until(lambda: is_taken_down(daemon, account, epoch=0))
        network.relays[1].restart_sequence(5_000)
        await network.relay.stop()
        await until(lambda: relay_of(daemon) == network.relay_urls[1])
        old = {"did": account.did, "active": True, "time": before, "seq": network.relays[1].seq + 1}
        replayed = daemon.counter("events", kind="account", outcome="replayed")
        network.relays[1].inject(message_frame("#account", old))
        await until(lambda: daemon.counter("events", kind="account", outcome="replayed") == replayed + 1)
        assert await is_taken_down(daemon, account, epoch=0)


async def test_reconciliation_asks_the_connected_relay(database: str, tmp_path: Path) -> None:
    """The first relay is dead, and the cursor of the second one is older than its window."""
    async with LocalNetwork(relays=2) as network:
        async with daemon_of(network, database, tmp_path) as daemon:
            await network.relay.stop()
            accounts = await create_synchronized(daemon, 8)
            seq = network.relays[1].seq
            await until(lambda: daemon.stages.stream_position.watermark.position == seq)
        network.relays[1].window = 1
        commit_each(accounts, "in the gap")
        accounts[0].create(POST, post("in the window"))
        async with daemon_of(network, database, tmp_path) as daemon:
            await wait_until_equal_and_ready(daemon)
            [gap] = await gaps(daemon)
            assert gap == (network.relay_urls[1], "cursor-outdated", seq + 1, network.relays[1].seq - 1, True)
            assert daemon.counter("desynchronized", reason="behind") >= 7


async def test_failed_reconciliation_is_shown_and_the_next_relay_is_asked(database: str, tmp_path: Path) -> None:
    async with LocalNetwork(relays=2) as network:
        async with daemon_of(network, database, tmp_path) as daemon:
            accounts = await create_synchronized(daemon, 3)
            await daemon.wait_for_cursor()
        network.relay.window = 1
        commit_each(accounts, "in the gap")
        accounts[0].create(POST, post("in the window"))
        network.relay.faults.append(Fault(LIST_REPOS, times=None, status=404))
        async with daemon_of(network, database, tmp_path) as daemon:
            await until(lambda: is_equal(daemon), daemon.stages.probe.ready)
            await until(lambda: "http-status" in str(daemon.stages.probe.ready()), daemon.stages.probe.ready)
            [gap] = await gaps(daemon)
            assert gap[-1] is False, "only the list of the connected relay closes it"


async def test_relay_that_no_longer_has_the_span_and_says_nothing_opens_a_gap(database: str, tmp_path: Path) -> None:
    """Stop for longer than the relay's retention; the relay sends no OutdatedCursor."""
    async with LocalNetwork() as network:
        network.relay.announces = False
        async with daemon_of(network, database, tmp_path) as daemon:
            active, quiet = daemon.create_account("ada.test"), daemon.create_account("bob.test")
            await until(lambda: is_equal(daemon))
            await daemon.wait_for_cursor()
            seq = network.relay.seq
        network.relay.window = 3
        commit_each([quiet, active], "in the gap")
        for _ in range(4):
            active.create(POST, post("in the window"))
        async with daemon_of(network, database, tmp_path) as daemon:
            await wait_until_equal_and_ready(daemon)
            assert await gaps(daemon) == [(network.relay_url, "cursor-outdated", seq + 1, network.relay.seq - 3, True)]


@pytest.mark.parametrize("announces", [True, False])
@pytest.mark.parametrize("events_of_the_new_sequence", ["fewer", "more"])
async def test_restarted_sequence_is_entered_anew(
    database: str, tmp_path: Path, events_of_the_new_sequence: str, *, announces: bool
) -> None:
    """The new sequence is below the stored cursor, or has passed it already when the daemon returns."""
    async with LocalNetwork() as network:
        network.relay.announces = announces
        async with daemon_of(network, database, tmp_path) as daemon:
            accounts = await create_synchronized(daemon, 20)
            await daemon.wait_for_cursor()
        network.relay.restart_sequence()
        commit_each(accounts[:11], "below the old cursor")
        if events_of_the_new_sequence == "more":
            for number in range(150):
                accounts[-1].create(POST, post(number))
        async with daemon_of(network, database, tmp_path) as daemon:
            if not announces and events_of_the_new_sequence == "fewer":
                await until(lambda: relay_of(daemon) is not None)
                accounts[-1].create(POST, post("the first message after the silent relay"))
            await wait_until_equal_and_ready(daemon)
            assert [(reason, closed) for _, reason, _, _, closed in await gaps(daemon)] == [
                ("sequence-restarted", True)
            ]


async def test_silent_relay_that_does_not_know_the_cursor_opens_a_gap(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relay reports no future cursor, and no message shows that it has started a new sequence."""
    monkeypatch.setattr("indexer.daemon.StreamContinuity", partial(StreamContinuity, proof_timeout=0.5))
    async with LocalNetwork() as network:
        network.relay.announces = False
        async with daemon_of(network, database, tmp_path) as daemon:
            accounts = await create_synchronized(daemon, 3)
            await daemon.wait_for_cursor()
            cursor = network.relay.seq
        network.relay.restart_sequence()
        commit_each(accounts, "below the old cursor")
        async with daemon_of(network, database, tmp_path) as daemon:
            await until(lambda: is_closed(daemon), daemon.stages.probe.ready)
            assert await gaps(daemon) == [(network.relay_url, "cursor-unproven", cursor + 1, None, True)]
            await wait_until_equal_and_ready(daemon)


async def test_takedown_in_a_restarted_sequence_is_applied(database: str, tmp_path: Path) -> None:
    """Its sequence number is lower than that of the last #account message of the account."""
    async with LocalNetwork() as network:
        async with daemon_of(network, database, tmp_path) as daemon:
            [account, *_] = await create_synchronized(daemon, 5)
            await daemon.wait_for_cursor()
        network.relay.restart_sequence()
        async with daemon_of(network, database, tmp_path) as daemon:
            stages = daemon.stages
            await until(lambda: stages.stream_position.epoch == 1 and stages.subscription.connection is not None)
            account.takedown()
            await until(lambda: is_taken_down(daemon, account, epoch=1))


async def is_taken_down(daemon: RunningDaemon, account: LocalAccount, epoch: int) -> bool:
    """Return True if the account is hidden as taken down, and the last report about it belongs to this epoch."""
    row = await daemon.repo_row(account)
    return (row["active"], row["hosting_status"], row["hosting_epoch"]) == (False, "takendown", epoch)


async def test_accounts_that_appeared_in_a_gap_are_found(database: str, tmp_path: Path) -> None:
    async with LocalNetwork() as network:
        async with daemon_of(network, database, tmp_path) as daemon:
            [known, *_] = await create_synchronized(daemon, 2)
            await daemon.wait_for_cursor()
        network.relay.window = 1
        born = [network.create_account(f"new{number}.test") for number in range(3)]
        commit_each(born, "the only record")
        known.create(POST, post("in the window"))
        async with daemon_of(network, database, tmp_path) as daemon:
            await wait_until_equal_and_ready(daemon)
            assert {account.did for account in born} <= set(await daemon.store.visible_repos())


@pytest.mark.parametrize("answering", [0, 1])
async def test_takedown_in_a_gap_is_found(database: str, tmp_path: Path, answering: int) -> None:
    """Relay 0 is connected. If it answers, the row gets the place in its stream; else the row keeps its place."""
    async with LocalNetwork(relays=2) as network:
        async with daemon_of(network, database, tmp_path) as daemon:
            await until(lambda: relay_of(daemon) == network.relay_urls[0])
            active, hidden = await create_synchronized(daemon, 2)
            await daemon.wait_for_cursor()
            before = await daemon.repo_row(hidden)
        for relay in network.relays:
            relay.window = 1
        hidden.takedown()
        active.create(POST, post("in the window"))
        network.relays[0].faults.extend([Fault(LIST_REPOS, times=None, status=404)] * answering)
        async with daemon_of(network, database, tmp_path) as daemon:
            await until(lambda: is_taken_down(daemon, hidden, epoch=0), daemon.stages.probe.ready)
            await until(lambda: is_equal(daemon))
            after = await daemon.repo_row(hidden)
            assert relay_of(daemon) == after["hosting_relay"] == network.relay_urls[0]
            assert (after["hosting_seq"] > before["hosting_seq"]) == (answering == 0)


async def test_only_tracked_accounts_are_compared_if_accounts_are_listed(database: str, tmp_path: Path) -> None:
    async with LocalNetwork() as network:
        async with daemon_of(network, database, tmp_path) as daemon:
            [known] = await create_synchronized(daemon, 1)
            await daemon.wait_for_cursor()
            await daemon.execute("select atproto.track($1)", [known.did])
            await daemon.execute("select atproto.set_track('listed')")
        network.relay.window = 1
        other = network.create_account("other.test")
        commit_each([other, known, known], "in the gap")
        async with daemon_of(network, database, tmp_path) as daemon:
            await until(lambda: is_closed(daemon))
            assert list(await daemon.store.visible_repos()) == [known.did]


async def is_closed(daemon: RunningDaemon) -> bool:
    return [gap[-1] for gap in await gaps(daemon)] == [True]


async def test_start_without_any_cursor_on_a_database_with_repos_opens_a_gap(database: str, tmp_path: Path) -> None:
    async with LocalNetwork() as network:
        async with daemon_of(network, database, tmp_path) as daemon:
            accounts = await create_synchronized(daemon, 3)
            await daemon.wait_for_cursor()
        commit_each(accounts, "while the daemon was stopped")
        await forget_cursors(database)
        async with daemon_of(network, database, tmp_path, start="live") as daemon:
            await wait_until_equal_and_ready(daemon)
            assert await gaps(daemon) == [(network.relay_url, "no-cursor", None, None, True)]
            assert daemon.counter("desynchronized", reason="behind") == 3


async def test_gap_is_closed_once_by_all_shards_after_their_number_has_changed(database: str, tmp_path: Path) -> None:
    """The first of the new shards that has compared its repos neither closes the gap nor says so."""
    async with LocalNetwork() as network:
        async with daemon_of(network, database, tmp_path) as daemon:
            accounts = await create_synchronized(daemon, 12)
            await daemon.wait_for_cursor()
        network.relay.window = 1
        commit_each(accounts, "in the gap")
        accounts[0].create(POST, post("in the window"))
        fault = Fault(LIST_REPOS, times=None, status=404)
        network.relay.faults.append(fault)
        async with daemon_of(network, database, tmp_path, shard="0/1") as daemon:
            await until(lambda: codes(daemon) == ["open-gaps"], daemon.stages.probe.ready)
            await until(lambda: network.relay.requests[LIST_REPOS] > 0)
        network.relay.faults.remove(fault)
        with capture_logs() as lines:
            async with daemon_of(network, database, tmp_path / "0", shard="0/2") as daemon:
                await until(lambda: daemon.stages.probe.ready() == [], daemon.stages.probe.ready)
                assert daemon.counter("desynchronized", reason="behind") > 0
                assert [gap[-1] for gap in await gaps(daemon)] == [False]
                assert events(lines, "gap.closed") == []
                async with daemon_of(network, database, tmp_path / "1", shard="1/2") as other:
                    await wait_until_equal_and_ready(other)
                    assert [gap[-1] for gap in await gaps(other)] == [True]
        assert len(events(lines, "gap.closed")) == 1


def codes(daemon: RunningDaemon) -> list[str]:
    return [reason.code for reason in daemon.stages.probe.ready()]


def events(lines: Sequence[MutableMapping[str, Any]], name: str) -> list[MutableMapping[str, Any]]:
    return [line for line in lines if line["event"] == name]


async def forget_cursors(database: str) -> None:
    connection = await asyncpg.connect(database)
    try:
        await connection.execute("delete from indexer.cursor")
    finally:
        await connection.close()


async def test_restored_older_database_catches_up(database: str, tmp_path: Path, postgres: DatabaseServer) -> None:
    """The relay still has the span since the backup, so the stream alone repairs it, without a gap."""
    async with LocalNetwork() as network:
        async with daemon_of(network, database, tmp_path) as daemon:
            accounts = await create_synchronized(daemon, 3)
            await daemon.wait_for_cursor()
        backup = postgres.copy(database)
        try:
            async with daemon_of(network, database, tmp_path) as daemon:
                commit_each(accounts, "after the backup")
                await until(lambda: is_equal(daemon))
            async with daemon_of(network, backup, tmp_path) as daemon:
                await wait_until_equal_and_ready(daemon)
                assert await gaps(daemon) == []
        finally:
            postgres.drop(backup)


async def test_first_start_opens_no_gap(database: str, tmp_path: Path) -> None:
    async with LocalNetwork() as network:
        network.create_account("before.test")
        async with daemon_of(network, database, tmp_path, start="live") as daemon:
            await until(lambda: relay_of(daemon) is not None)
            await create_synchronized_after(daemon)
            assert await gaps(daemon) == []


async def create_synchronized_after(daemon: RunningDaemon) -> None:
    account = daemon.create_account("after.test")
    await until(lambda: has_records(daemon, account))


async def has_records(daemon: RunningDaemon, account: LocalAccount) -> bool:
    return len(await daemon.store.visible_records(account.did)) == len(account.records)
