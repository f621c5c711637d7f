"""Reconciliation closes gaps."""

import asyncio
from dataclasses import replace
from time import time
from typing import Self

import asyncpg
import pytest
import stamina

from indexer.errors import UnavailableError
from indexer.monitoring.metrics import Metrics
from indexer.outbound import OutboundClient
from indexer.reasons import Desync, GapReason
from indexer.service.crawl.reconcile import Reconciliation, ReconciliationSettings
from indexer.service.open_gaps import OpenGaps
from indexer.store import Store
from indexer.sync.crawl_progress import CrawlProgress
from indexer.sync.gap import Gap
from indexer.sync.repo_state import SyncStatus
from indexer.sync.scope import Track
from indexer.sync.shard import Shard
from tests.outbound.scripted_host import ScriptedHost, http_response
from tests.service.crawl.reconciliations import (
    NEWER,
    NO_WAIT,
    STORED,
    behind,
    ignore_progress,
    scope_of,
    status_path,
    stored,
)
from tests.service.crawl.repo_list_responses import FAILURE, page, path, requested_cursors
from tests.store.repo_rows import did, insert
from tests.waiting import until

pytestmark = pytest.mark.slow

CLOSED_BY = "select closed_by from atproto.gaps order by opened_at"


def gap(relay: str = "wss://relay.test", shard: str = "0/1") -> Gap:
    return Gap(relay, shard, GapReason.CURSOR_OUTDATED, first_seq=6)


class Reconciling:
    """A running reconciliation and its gaps. The stream of the first source is open."""

    def __init__(
        self, store: Store, outbound: OutboundClient, *sources: str, settings: ReconciliationSettings = NO_WAIT
    ) -> None:
        self.metrics = Metrics()
        self.gaps = OpenGaps(store, settings.shard, self.metrics)
        self.sources = list(sources)
        scope = scope_of(store, Track.LISTED)
        self.reconciliation = Reconciliation(
            store, outbound, self.metrics, self.gaps, lambda: self.sources, lambda _: None, scope, settings
        )

    async def __aenter__(self) -> Self:
        await self.gaps.refresh()
        self._task = asyncio.create_task(self.reconciliation.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert not self._task.done()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def wait_until_closed(self) -> None:
        await until(lambda: self.gaps.gaps == [])


async def test_gap_starts_a_reconciliation_that_closes_it(
    store: Store, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient
) -> None:
    await insert(store, stored("behind"))
    host.pages[path()] = page((did(1), STORED), cursor="x")
    host.pages[path("x")] = page((did("behind"), NEWER))
    async with Reconciling(store, outbound, host.url) as reconciling:
        assert host.requests == []
        await reconciling.gaps.open(gap())
        assert reconciling.metrics.registry.get_sample_value("indexer_gaps_open") == 1
        await reconciling.wait_until_closed()
        assert reconciling.metrics.registry.get_sample_value("indexer_gaps_open") == 0
    assert await behind(sql) == {did("behind"): NEWER}
    assert [row[0] for row in await sql.fetch(CLOSED_BY)] == [host.url]
    assert requested_cursors(host) == [None, "x"]


async def test_gap_opened_during_a_reconciliation_needs_another_one(
    store: Store, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient
) -> None:
    """The first page was read before the second gap was opened."""
    opened_again = asyncio.Event()

    async def open_again(writer: asyncio.StreamWriter) -> None:
        if not opened_again.is_set():
            opened_again.set()
            await reconciling.gaps.open(gap())
        writer.write(page((did(2), STORED)))
        await writer.drain()

    host.pages[path()] = page((did(1), STORED), cursor="x")
    host.pages[path("x")] = open_again
    async with Reconciling(store, outbound, host.url) as reconciling:
        await reconciling.gaps.open(gap())
        await opened_again.wait()
        await reconciling.wait_until_closed()
    assert requested_cursors(host) == [None, "x", None, "x"]
    assert await sql.fetchval("select count(*) from atproto.gaps where closed_at is not null") == 2


async def test_gap_is_not_closed_by_a_reconciliation_that_began_before_it(
    store: Store, host: ScriptedHost, outbound: OutboundClient
) -> None:
    """The interrupted reconciliation is not resumed: its first page was read too early."""
    await store.save_crawl_progress(CrawlProgress("sweep", host.url, "", "x", 7, 3, began_at=time()))
    await store.open_gap(gap())
    host.pages[path()] = page((did(1), STORED))
    async with Reconciling(store, outbound, host.url) as reconciling:
        await reconciling.wait_until_closed()
    assert requested_cursors(host) == [None]


async def test_interrupted_reconciliation_starts_again_after_a_gap_was_opened(
    store: Store, host: ScriptedHost, outbound: OutboundClient
) -> None:
    host.pages[path()] = page((did(1), STORED), cursor="x")
    host.pages[path("x")] = FAILURE
    gaps, scope = OpenGaps(store, NO_WAIT.shard, Metrics()), scope_of(store, Track.LISTED)
    reconciliation = Reconciliation(
        store, outbound, Metrics(), gaps, lambda: (host.url,), lambda _: None, scope, NO_WAIT
    )
    with stamina.set_testing(True, attempts=1), pytest.raises(UnavailableError):
        await reconciliation.reconcile(host.url, ignore_progress)
    opened = await gaps.open(gap())
    host.pages[path("x")] = page((did(2), STORED))
    progress = await reconciliation.reconcile(host.url, ignore_progress)
    assert requested_cursors(host) == [None, "x", None, "x"]
    assert progress.last_gap == opened.id


async def test_gap_stays_open_while_no_stream_is_open(
    store: Store, host: ScriptedHost, outbound: OutboundClient
) -> None:
    await store.open_gap(gap())
    host.pages[path()] = page((did(1), STORED))
    async with Reconciling(store, outbound) as reconciling:
        await reconciling.gaps.refresh()
        assert host.requests == []
        reconciling.sources.append(host.url)
        await reconciling.wait_until_closed()


async def test_gap_stays_open_if_the_stream_changes_to_another_relay(
    store: Store, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient
) -> None:
    async with ScriptedHost() as other:

        async def change_relay(writer: asyncio.StreamWriter) -> None:
            reconciling.sources[:] = [other.url, host.url]
            writer.write(page((did(1), STORED)))
            await writer.drain()

        host.pages[path()] = change_relay
        other.pages[path()] = page((did(1), STORED))
        async with Reconciling(store, outbound, host.url) as reconciling:
            await reconciling.gaps.open(gap())
            await reconciling.wait_until_closed()
        assert [row[0] for row in await sql.fetch(CLOSED_BY)] == [other.url]
        assert len(host.requests) == 1


async def test_next_relay_is_compared_once_if_the_connected_one_does_not_answer(
    store: Store, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient
) -> None:
    await insert(store, stored("behind"))
    async with ScriptedHost() as other:
        host.pages[path()] = FAILURE
        other.pages[path()] = page((did("behind"), NEWER))
        with stamina.set_testing(True, attempts=1):
            async with Reconciling(store, outbound, host.url, other.url) as reconciling:
                await reconciling.gaps.open(gap())
                await until(lambda: len(host.requests) == 3)
                assert await behind(sql) == {did("behind"): NEWER}
                assert len(other.requests) == 1
                assert reconciling.gaps.newest == 1, "only the relay whose stream is open closes the gap"
                assert f"failed and will be retried: {host.url}: http-status" in (
                    reconciling.reconciliation.progress or ""
                )
                host.pages[path()] = page((did("behind"), NEWER))
                await reconciling.wait_until_closed()


async def test_next_relay_is_compared_in_each_interval_if_the_connected_one_does_not_answer(
    store: Store, host: ScriptedHost, outbound: OutboundClient
) -> None:
    async with ScriptedHost() as other:
        host.pages[path()] = FAILURE
        other.pages[path()] = page((did("unknown"), NEWER))
        settings = replace(NO_WAIT, interval=0.5)
        with stamina.set_testing(True, attempts=1):
            async with Reconciling(store, outbound, host.url, other.url, settings=settings):
                await until(lambda: len(other.requests) == 2)
                assert len(host.requests) > 2, "it is asked again sooner"


async def test_shard_compares_its_own_repos_and_closes_its_own_gaps(
    store: Store, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient
) -> None:
    first, second = Shard(0, 2), Shard(1, 2)
    await insert(store, *[stored(name) for name in "abcdefgh"])
    host.pages[path()] = page(*[(did(name), NEWER) for name in "abcdefgh"])
    await store.open_gap(gap(shard=str(second)))
    async with Reconciling(store, outbound, host.url, settings=replace(NO_WAIT, shard=first)) as reconciling:
        await reconciling.gaps.open(gap(shard=str(first)))
        await reconciling.wait_until_closed()
    marked = await behind(sql)
    assert 0 < len(marked) < 8
    assert all(first.owns(marked_did) for marked_did in marked)
    assert [opened.gap.shard for opened in await store.open_gaps()] == [str(second)]


async def test_failed_reconciliation_is_resumed(store: Store, host: ScriptedHost, outbound: OutboundClient) -> None:
    host.pages[path()] = page((did(1), STORED), cursor="x")
    host.pages[path("x")] = FAILURE
    with stamina.set_testing(True, attempts=1):
        async with Reconciling(store, outbound, host.url) as reconciling:
            await reconciling.gaps.open(gap())
            await until(lambda: requested_cursors(host)[-2:] == ["x", "x"])
            host.pages[path("x")] = page()
            await reconciling.wait_until_closed()
            await until(lambda: reconciling.reconciliation.progress == "done; accounts listed: 1, different: 0")
    assert requested_cursors(host).count(None) == 1


async def test_gap_is_closed_although_the_relay_never_tells_the_status_of_an_account(
    store: Store, host: ScriptedHost, outbound: OutboundClient
) -> None:
    await insert(store, stored("unlisted"))
    host.pages[path()] = page()
    host.pages[status_path("unlisted")] = http_response(status=500)
    async with Reconciling(store, outbound, host.url) as reconciling:
        await reconciling.gaps.open(gap())
        await reconciling.wait_until_closed()
    repo = (await store.repos([did("unlisted")]))[did("unlisted")]
    assert (repo.sync_status, repo.sync_reason) == (SyncStatus.DESYNCHRONIZED, Desync.STATUS_UNKNOWN)
