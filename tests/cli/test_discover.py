"""The commands that read the repo lists of hosts, on a small network."""

from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import time

import pytest

from indexer.db import Database
from indexer.db.crawls import CrawlProgress
from indexer.reasons import Desync
from indexer.sync.repo import SyncStatus
from indexer.tasks.reconcile import ReconciliationSettings
from tests.cli.command_line import Session
from tests.daemon_harness import run_daemon, settings_for, wait_for_cursor
from tests.faulty_network import FaultyNetwork
from tests.waiting import until

pytestmark = pytest.mark.slow

NOTE = "com.example.note"


@pytest.fixture
async def network(session: Session, tmp_path: Path) -> AsyncIterator[FaultyNetwork]:
    """Run a network of three accounts, each with a record in a collection of its own; commands use it."""
    async with FaultyNetwork() as network:
        session.configure(
            INDEXER_RELAYS=network.relay_url,
            INDEXER_PLC_URL=network.plc_url,
            INDEXER_DATA_DIR=str(tmp_path),
            INDEXER_HOST_RATE="1000",
            INDEXER_ALLOW_PRIVATE_HOSTS="true",
        )
        for name in ("ada", "bob", "cyd"):
            network.create_account(f"{name}.test").create(f"com.example.{name}", {"text": "hello"})
        yield network


async def tracked(db: Database, network: FaultyNetwork) -> list[str]:
    """Return the DIDs of the accounts that the database has, in their order in the network."""
    repos = await db.repos.load(list(network.accounts))
    return [did for did in network.accounts if did in repos]


async def test_discover_adds_accounts_by_collection_by_pds_and_by_relay(
    network: FaultyNetwork, session: Session, db: Database
) -> None:
    ada, bob, cyd = network.accounts.values()
    result = await session.run("discover", "--collection", "com.example.ada", "--collection", "com.example.bob")
    assert [line.rpartition(": ")[2] for line in result.stdout.splitlines()] == ["1 listed, 1 added"] * 2
    assert await tracked(db, network) == [ada.did, bob.did]
    result = await session.run("discover", "--relay", f"{network.relay_url}/")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"all accounts of {network.relay.url}: 3 listed, 1 added\n"
    assert await tracked(db, network) == list(network.accounts)
    assert (await session.run("discover", "--pds", cyd.pds.url)).stdout.endswith(" 0 added\n")


async def test_interrupted_discover_continues_at_its_cursor(
    network: FaultyNetwork, session: Session, db: Database
) -> None:
    await db.crawls.save(CrawlProgress("discover", network.relay.url, "", "2", 2, 2, began_at=time()))
    result = await session.run("discover")
    assert (result.returncode, result.stdout) == (0, f"all accounts of {network.relay.url}: 3 listed, 3 added\n")
    assert "continuing; accounts listed before: 2" in result.stderr
    *_, cyd = network.accounts
    assert await tracked(db, network) == [cyd]


async def test_resync_is_requested_for_repos_that_are_behind(
    network: FaultyNetwork,
    session: Session,
    db: Database,
    database: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def all_synchronized() -> bool:
        repos = await db.repos.load(list(network.accounts))
        return {repo.sync_status for repo in repos.values()} == {SyncStatus.SYNCHRONIZED}

    async with run_daemon(settings_for(network.relay_url, network.plc_url, tmp_path / "daemon"), database) as daemon:
        await wait_for_cursor(daemon, network.relay_url, network.relay.log[-1].seq)
        await until(all_synchronized)
    ada, *_ = network.accounts.values()
    ada.create(NOTE, {"text": "written while no daemon runs"})
    monkeypatch.setattr("indexer.cli.repo_commands.ReconciliationSettings", partial(ReconciliationSettings, settle=0.1))
    result = await session.run("resync", "--behind")
    assert (result.returncode, result.stdout) == (0, "resyncs: 1 requested\n")
    repos = await db.repos.load(list(network.accounts))
    assert {did: repo.sync_reason for did, repo in repos.items() if repo.sync_reason} == {ada.did: Desync.BEHIND}


async def test_discover_hosts_adds_accounts_that_the_relay_does_not_list(
    network: FaultyNetwork, session: Session, db: Database
) -> None:
    network.relay.listed.clear()
    assert (await session.run("discover")).stdout.endswith(": 0 listed, 0 added\n")
    result = await session.run("discover", "--hosts")
    assert (result.returncode, result.stdout) == (0, "hosts: 2 listed, 0 failed, 3 accounts added\n")
    assert await tracked(db, network) == list(network.accounts)
    assert (await session.run("discover", "--hosts")).stdout == "hosts: 2 listed, 0 failed, 0 accounts added\n"


async def test_interrupted_discover_hosts_reads_only_the_lists_that_are_left(
    network: FaultyNetwork, session: Session, db: Database
) -> None:
    await session.run("discover", "--hosts")
    await network.pdses[0].stop()
    assert "2 listed, 1 failed" in (await session.run("discover", "--hosts")).stdout
    progress = await db.crawls.progress("hosts", "")
    assert progress is not None
    await db.crawls.save(replace(progress, finished_at=None))
    await network.pdses[0].start()
    before = await list_times(db)
    await session.run("discover", "--hosts")
    assert await list_times(db) == before
    await session.run("discover", "--hosts")
    assert all(after > at for at, after in zip(before, await list_times(db), strict=True)), "it is a new one"


async def list_times(db: Database) -> list[float]:
    async with db.connection() as connection:
        rows = await connection.fetch("select ended_at from indexer.host_list order by host")
    return [row["ended_at"].timestamp() for row in rows]
