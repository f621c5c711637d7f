"""The scope changes while daemons run: narrowing, widening, untracking, signal collections."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from indexer.demo.local_pds import GET_RECORD
from indexer.demo.local_relay import LIST_REPOS_BY_COLLECTION
from indexer.sync.scope import Track
from indexer.sync.shard import Shard
from tests.daemon.running_daemon import LIKE, POST, FilteredNetwork, RunningDaemon, post, running_daemon
from tests.database_checks import assert_change_log_consistent, assert_log_gives_records
from tests.db.change_log_helpers import connected
from tests.faulty_network import FaultyAccount
from tests.quick_tuning import QUICK
from tests.waiting import until

FOLLOW = "app.bsky.graph.follow"


@asynccontextmanager
async def daemon_of(
    dsn: str, directory: Path, collections: list[str], **settings: Any
) -> AsyncIterator[tuple[RunningDaemon, FilteredNetwork]]:
    async with (
        FilteredNetwork(collections=collections) as network,
        running_daemon(
            dsn, directory, network, collections=",".join(collections), sparse_resync="always", **settings
        ) as daemon,
    ):
        yield daemon, network


def fetches(daemon: RunningDaemon) -> int:
    """Return the number of repos whose chosen records were fetched; no export was."""
    assert daemon.export_requests == 0
    return sum(pds.requests[GET_RECORD] for pds in daemon.network.pdses)


def create_like(account: FaultyAccount, rkey: str) -> None:
    account.create(LIKE, {"$type": LIKE, "createdAt": rkey}, rkey=rkey)


async def wait_until_complete(daemon: RunningDaemon) -> None:
    """Wait until all tracked repos have all records of the scope."""

    async def complete() -> bool:
        return all(row.complete == row.repos for row in await daemon.db.scope.progress())

    await until(complete)


@pytest.mark.slow
async def test_collections_and_repos_are_added_and_removed(database: str, tmp_path: Path) -> None:
    """Only repos with records of an added collection are fetched. What is removed is deleted, with log entries."""
    async with daemon_of(database, tmp_path, [POST]) as (daemon, network):
        with_likes, without = daemon.create_account("ada.test"), daemon.create_account("bob.test")
        create_like(with_likes, "one")
        await daemon.wait_until_equal()
        rows = {row["rkey"]: row["indexed_at"] for row in await daemon.record_rows(with_likes)}
        await daemon.db.scope.change(collections=[POST, LIKE])
        network.collections = {POST, LIKE}
        await daemon.wait_until_equal()
        await wait_until_complete(daemon)
        progress = [(row.collection, row.repos, row.complete) for row in await daemon.db.scope.progress()]
        assert progress == [(LIKE, 2, 2), (POST, 2, 2)]
        assert fetches(daemon) == 1
        assert (await daemon.repo_row(without))["sync_status"] == "synchronized"
        assert network.relay.requests[LIST_REPOS_BY_COLLECTION] == 1
        after = {row["rkey"]: row["indexed_at"] for row in await daemon.record_rows(with_likes)}
        assert {rkey: after[rkey] for rkey in rows} == rows, "records that were right are not written again"
        create_like(without, "live")
        await daemon.wait_until_equal()

        await daemon.db.scope.change(collections=[POST])
        network.collections = {POST}
        await daemon.wait_until_equal()
        create_like(without, "not stored")
        without.create(POST, post("stored"))
        await daemon.wait_until_equal()
        logged = await daemon.execute("select action, rkey from atproto.changes where collection = $1", LIKE)
        assert Counter(map(tuple, logged)) == Counter(
            [(action, rkey) for action in ("create", "delete") for rkey in ("one", "live")]
        )
        assert fetches(daemon) == 1, "nothing was fetched to delete records"

        assert await daemon.db.scope.untrack([with_likes.did]) == 1
        assert await daemon.db.reports.visible_records(with_likes.did) == {}, "hidden at once"
        network.dids = {without.did}

        async def erased() -> bool:
            return await daemon.record_rows(with_likes) == []

        await until(erased)
        with_likes.create(POST, post("ignored"))
        with_likes.deactivate()
        with_likes.activate()
        await daemon.wait_until_equal()
        assert set(await daemon.db.reports.visible_repos()) == {without.did}
        await assert_change_log_consistent(database)
        assert await daemon.db.scope.track([with_likes.did]) == 1
        network.dids = None
        await daemon.wait_until_equal()
        with_likes.create(POST, post("applied"))
        await daemon.wait_until_equal()
        assert len(await daemon.record_rows(with_likes)) == 7


@pytest.mark.proof("daemon")
async def test_repo_that_a_lagging_list_lacked_is_fetched_when_the_list_is_compared_again(
    database: str, tmp_path: Path
) -> None:
    async with FilteredNetwork(collections=[POST]) as network:
        async with running_daemon(database, tmp_path / "first", network, collections=POST) as daemon:
            listed, lagging, without = (daemon.create_account(f"{name}.test") for name in ("ada", "bob", "eve"))
            for account in (listed, lagging):
                create_like(account, "one")
            await daemon.wait_until_equal()
            network.relay.lagging = {lagging.did}
            await daemon.db.scope.change(collections=[POST, LIKE])
            await until(lambda: fetches(daemon) == 1)
            await wait_until_complete(daemon)
            assert LIKE not in {row["collection"] for row in await daemon.record_rows(lagging)}, "the list is trusted"
        network.relay.lagging.clear()
        network.collections = {POST, LIKE}
        compares_soon = replace(QUICK, scope=replace(QUICK.scope, rechecks=(0.0, 0.5), recheck_poll=0.1))
        with capture_logs() as lines:
            async with running_daemon(database, tmp_path / "second", network, tuning=compares_soon) as daemon:
                await daemon.wait_until_equal()
                await until(lambda: [line["event"] for line in lines].count("scope.compared-again") == 2)
                assert await daemon.db.crawls.rechecks(Shard()) == []
                await wait_until_complete(daemon)
                assert fetches(daemon) == 2, "no other repo is fetched"
                assert (await daemon.repo_row(without))["scope_version"] == 2
        found = [line["incomplete"] for line in lines if line["event"] == "scope.compared-again"]
        assert found == [1, 0]
        await assert_change_log_consistent(database)


@pytest.mark.proof("daemon")
async def test_signal_tracks_repos_that_write_or_have_a_record(database: str, tmp_path: Path) -> None:
    async with FilteredNetwork(dids=[], collections=[POST]) as network:
        settings: dict[str, Any] = {
            "track": "signal",
            "signal_collections": f"{FOLLOW},com.example.*",
            "collections": POST,
        }
        early = network.create_account("early.test")
        early.create(FOLLOW, {"$type": FOLLOW}, rkey="a")
        early.create(POST, post("earlier"))
        async with running_daemon(database, tmp_path, network, start="live", **settings) as daemon:
            network.dids = {early.did}

            async def found() -> bool:
                return set(await daemon.db.reports.visible_repos()) == {early.did}

            await until(found)  # in the list: the stream is read from its end
            other, late = daemon.create_account("other.test"), daemon.create_account("late.test")
            create_like(other, "no signal")
            await daemon.wait_until_equal()
            assert set(await daemon.db.reports.visible_repos()) == {early.did}
            late.create("com.example.thing", {"$type": "com.example.thing"}, rkey="b")
            network.dids |= {late.did}
            await daemon.wait_until_equal()
            assert set(await daemon.db.reports.visible_repos()) == {early.did, late.did}
            late.delete("com.example.thing/b")
            await daemon.wait_until_equal()
            await daemon.db.scope.change(signal_collections=[LIKE])
            network.dids = {other.did}
            await daemon.wait_until_equal()
        await assert_change_log_consistent(database)


async def wait_until_erased(daemon: RunningDaemon) -> None:
    """Wait until no record is stored that the public views hide."""
    query = "select (select count(*) from indexer.record) = (select count(*) from atproto.records) as equal"

    async def erased() -> bool:
        [row] = await daemon.execute(query)
        return bool(row["equal"])

    await until(erased)


@pytest.mark.proof("daemon")
async def test_repos_that_a_narrower_scope_does_not_want_are_untracked(database: str, tmp_path: Path) -> None:
    """The likes are not stored, so that only the list shows who has some."""
    async with daemon_of(database, tmp_path, [POST]) as (daemon, network):
        names = ("chosen", "fan", "neither", "late")
        chosen, fan, neither, late = (daemon.create_account(f"{name}.test") for name in names)
        create_like(fan, "one")
        await daemon.wait_until_equal()
        await daemon.db.scope.track([chosen.did])
        await daemon.db.scope.change(track=Track.SIGNAL, signal_collections=[LIKE])
        network.dids = {chosen.did, fan.did}
        await daemon.wait_until_equal()
        await wait_until_erased(daemon)
        neither.create(POST, post("not stored"))
        create_like(late, "a signal tracks it again")
        network.dids = {chosen.did, fan.did, late.did}
        await daemon.wait_until_equal()
        await daemon.db.scope.change(track=Track.LISTED)
        network.dids = {chosen.did}
        await daemon.wait_until_equal()
        await wait_until_erased(daemon)
        await daemon.db.scope.change(track=Track.ALL)
        await until(lambda: daemon.stages.scope.scope.track is Track.ALL)
        for account in (fan, neither, late):
            account.create(POST, post("all repos are wanted"))
        network.dids = None
        await daemon.wait_until_equal()
        async with connected(database) as sql:
            await assert_log_gives_records(sql)
