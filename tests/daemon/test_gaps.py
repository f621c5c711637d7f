"""Missed messages: every repo is found again, and until then the daemon says that repos may be outdated."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from indexer.cli.demo import compare
from tests.daemon.running_daemon import POST, RunningDaemon, post
from tests.daemon.test_two_relays import daemon_of
from tests.faulty_network import FaultyAccount, FaultyNetwork
from tests.quick_tuning import QUICK
from tests.waiting import until


async def is_equal(daemon: RunningDaemon) -> bool:
    return not await compare(daemon.network, daemon.db)


async def create_synchronized(daemon: RunningDaemon, count: int) -> list[FaultyAccount]:
    accounts = [daemon.create_account(f"account{number}.test", records=2) for number in range(count)]
    await until(lambda: is_equal(daemon))
    return accounts


async def wait_until_equal_and_ready(daemon: RunningDaemon) -> None:
    """Wait until the database equals the network. A daemon that is ready must not have differences."""

    async def repaired() -> bool:
        ready = daemon.stages.probe.not_ready() == []
        differences = await compare(daemon.network, daemon.db)
        return ready and not differences

    await until(repaired, daemon.stages.probe.not_ready)


async def gaps(daemon: RunningDaemon) -> list[tuple[Any, ...]]:
    """Return relay, reason, first seq, last seq, and True if it is closed, of each gap."""
    rows = await daemon.execute(
        "select relay, reason, first_seq, last_seq, closed_at is not null from atproto.gaps order by opened_at"
    )
    return [tuple(row) for row in rows]


def commit_each(accounts: Sequence[FaultyAccount], text: str) -> None:
    for account in accounts:
        account.create(POST, post(text))


def relay_of(daemon: RunningDaemon) -> str | None:
    connection = daemon.stages.streams[0].subscription.connection
    return None if connection is None else connection.relay


@pytest.mark.slow
async def test_change_over_to_another_relay_loses_nothing(database: str, tmp_path: Path) -> None:
    """The second relay has no cursor, and sends only new messages; the first one is resumed at its cursor."""
    async with (
        FaultyNetwork(relays=2) as network,
        daemon_of(network, database, tmp_path, start="live", relay_mode="failover") as daemon,
    ):
        await until(lambda: relay_of(daemon) == network.relay_urls[0])
        accounts = await create_synchronized(daemon, 5)
        await network.relay.stop()
        commit_each(accounts, "while no relay is connected")
        await until(lambda: relay_of(daemon) == network.relay_urls[1])
        accounts[0].create(POST, post("on the second relay"))
        await wait_until_equal_and_ready(daemon)
        assert await gaps(daemon) == [(network.relay_urls[1], "no-cursor", None, None, True)]
        await network.relay.start()
        await network.relays[1].stop()
        await until(lambda: relay_of(daemon) == network.relay_urls[0])
        commit_each(accounts, "on the first relay again")
        await wait_until_equal_and_ready(daemon)
        assert len(await gaps(daemon)) == 1


@pytest.mark.slow
async def test_all_that_a_relay_forgot_is_found(database: str, tmp_path: Path) -> None:
    """The daemon is stopped for longer than the relay keeps messages, and the relay sends no OutdatedCursor.

    Missed were the commits of an account, a takedown, and new accounts.
    """
    async with FaultyNetwork() as network:
        network.relay.announces = False
        async with daemon_of(network, database, tmp_path) as daemon:
            active, quiet, hidden = await create_synchronized(daemon, 3)
            await daemon.wait_for_cursor()
            seq = network.relay.seq
        network.relay.window = 3
        born = [network.create_account(f"new{number}.test") for number in range(3)]
        commit_each([quiet, active, *born], "in the gap")
        hidden.set_status("takendown")
        for _ in range(4):
            active.create(POST, post("in the window"))
        async with daemon_of(network, database, tmp_path) as daemon:
            await wait_until_equal_and_ready(daemon)
            assert await gaps(daemon) == [(network.relay_url, "cursor-outdated", seq + 1, network.relay.seq - 3, True)]
            assert {account.did for account in (active, quiet, *born)} == set(await daemon.db.reports.visible_repos())
            assert (await daemon.repo_row(hidden))["hosting_status"] == "takendown"


@pytest.mark.proof("daemon")
@pytest.mark.parametrize("announces", [True, False])
@pytest.mark.parametrize("events_of_the_new_sequence", ["fewer", "more"])
async def test_restarted_sequence_is_entered_anew(
    database: str, tmp_path: Path, events_of_the_new_sequence: str, *, announces: bool
) -> None:
    """The new sequence is below the stored cursor, or has passed it already when the daemon returns.

    A takedown in it is applied, although it has a lower number than the last #account message of the account.
    """
    async with FaultyNetwork() as network:
        network.relay.announces = announces
        async with daemon_of(network, database, tmp_path) as daemon:
            hidden, *accounts = await create_synchronized(daemon, 20)
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
            hidden.set_status("takendown")
            await daemon.wait_for_cursor()
            row = await daemon.repo_row(hidden)
            assert (row["active"], row["hosting_status"], row["hosting_epoch"]) == (False, "takendown", 1)


@pytest.mark.proof("daemon")
async def test_silent_relay_that_does_not_know_the_cursor_opens_a_gap(database: str, tmp_path: Path) -> None:
    """The relay reports no future cursor, and no message shows that it has started a new sequence."""
    async with FaultyNetwork() as network:
        network.relay.announces = False
        async with daemon_of(network, database, tmp_path) as daemon:
            accounts = await create_synchronized(daemon, 3)
            await daemon.wait_for_cursor()
            cursor = network.relay.seq
        network.relay.restart_sequence()
        commit_each(accounts, "below the old cursor")
        async with daemon_of(network, database, tmp_path, tuning=replace(QUICK, proof_timeout=0.5)) as daemon:
            await until(lambda: is_closed(daemon), daemon.stages.probe.not_ready)
            assert await gaps(daemon) == [(network.relay_url, "cursor-unproven", cursor + 1, None, True)]
            await wait_until_equal_and_ready(daemon)


async def is_closed(daemon: RunningDaemon) -> bool:
    return [gap[-1] for gap in await gaps(daemon)] == [True]
