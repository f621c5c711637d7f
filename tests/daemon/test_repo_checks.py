"""A daemon whose Jetstream tells nothing: in each pass, the hosts themselves say what has changed."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from indexer.cli.demo import compare
from indexer.demo.local_relay import LIST_REPOS_BY_COLLECTION
from indexer.sync.hints import JETSTREAM
from tests.background import running
from tests.daemon.running_daemon import LIKE, POST, FilteredNetwork, RunningDaemon, running_daemon
from tests.faulty_network import FaultyAccount
from tests.local_jetstream import local_jetstream
from tests.passed_time import expire_waits
from tests.waiting import until

pytestmark = pytest.mark.slow


def nothing(_event: dict[str, Any]) -> Iterable[dict[str, Any]]:
    return ()


@asynccontextmanager
async def silent_daemon(database: str, directory: Path, **settings: Any) -> AsyncIterator[RunningDaemon]:
    """Run a daemon that indexes likes, of two accounts, with a pass in each second."""
    async with FilteredNetwork(collections=[LIKE]) as network, local_jetstream(network) as jetstream:
        jetstream.rewrite = nothing
        for name in ("ada", "bob"):
            network.create_account(f"{name}.test").create(LIKE, {"$type": LIKE})
        options = {
            "upstream": "jetstream", "jetstreams": jetstream.ws_url, "collections": LIKE, "track": "signal",
            "signal_collections": LIKE, "sweep_interval": "2",
        }  # fmt: skip
        async with (
            running_daemon(database, directory, network, **options | settings) as daemon,
            running(expire_waits(database)),
        ):
            await equal(daemon)
            yield daemon


async def equal(daemon: RunningDaemon) -> None:
    differences = ["not compared"]

    async def has_none() -> bool:
        nonlocal differences
        differences = await compare(daemon.network, daemon.db)
        return not differences

    await until(has_none, lambda: (differences[:5], daemon.stages.probe.not_ready()))


async def column(daemon: RunningDaemon, name: str, account: FaultyAccount) -> Any:
    [row] = await daemon.execute("select * from atproto.repos where did = $1", account.did)
    return row[name]


async def test_commits_deletes_accounts_and_statuses_are_found_without_hints(database: str, tmp_path: Path) -> None:
    async with silent_daemon(database, tmp_path) as daemon:
        ada, bob = daemon.network.accounts.values()
        path = ada.create(LIKE, {"$type": LIKE, "number": 1})
        await equal(daemon)
        ada.delete(path)
        ada.create(POST, {"$type": POST})
        bob.set_status("deactivated")
        new = daemon.network.create_account("new.test")
        new.create(LIKE, {"$type": LIKE})
        await equal(daemon)
        assert await column(daemon, "hosting_status", bob) == "deactivated"
        assert daemon.network.relay.requests[LIST_REPOS_BY_COLLECTION] > 1
        ada.set_status("deleted")
        bob.set_status(None)
        bob.create(LIKE, {"$type": LIKE, "number": 2})
        await equal(daemon)
        assert await column(daemon, "hosting_status", ada) == "deleted"
        [cursor] = await daemon.db.gaps.cursors()
        assert cursor.relay == JETSTREAM

        async def is_complete() -> bool:
            complete = await column(daemon, "complete_at", bob)
            return bool(complete and complete > await column(daemon, "synchronized_at", bob))

        await until(is_complete)
        await until(lambda: not daemon.stages.probe.not_ready(), daemon.stages.probe.not_ready)


async def test_repos_of_a_host_that_was_down_come_back_with_what_they_missed(database: str, tmp_path: Path) -> None:
    async with silent_daemon(database, tmp_path) as daemon:
        ada, bob = daemon.network.accounts.values()
        await ada.pds.stop()

        async def is_unknown() -> bool:
            return bool(await column(daemon, "sync_reason", ada) == "status-unknown")

        await until(is_unknown)
        assert await column(daemon, "complete_at", ada) is None
        assert await column(daemon, "sync_status", bob) == "synchronized"
        ada.create(LIKE, {"$type": LIKE, "number": 1})
        await ada.pds.start()
        await equal(daemon)


async def test_daemon_is_not_ready_while_no_pass_has_ended(database: str, tmp_path: Path) -> None:
    async with silent_daemon(database, tmp_path) as daemon:
        checks = daemon.stages.repo_checks
        await until(lambda: "not-compared" not in codes(daemon))
        checks.began_at = None
        [reason] = [reason for reason in daemon.stages.probe.not_ready() if reason.code == "not-compared"]
        assert reason.value == checks.total - checks.compared
        await until(lambda: "not-compared" not in codes(daemon))


def codes(daemon: RunningDaemon) -> list[str]:
    return [reason.code for reason in daemon.stages.probe.not_ready()]
