"""Reconciliation closes gaps."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from time import time
from typing import NamedTuple

import pytest
import stamina

from indexer.db.crawls import CrawlProgress
from indexer.db.gaps import OpenGaps
from indexer.errors import UnavailableError
from indexer.reasons import Desync, GapReason
from indexer.sync.repo import SyncStatus
from indexer.sync.shard import Shard
from indexer.sync.stream import Gap
from indexer.tasks.reconcile import Reconciliation, ReconciliationSettings
from tests.db.repo_rows import did, insert
from tests.net.http.scripted_host import ScriptedHost, http_response
from tests.tasks.crawl_scenario import (
    FAILURE,
    NEWER,
    NO_WAIT,
    STORED,
    Crawl,
    after,
    page,
    path,
    requested_cursors,
    running,
    status_path,
    stored,
)
from tests.waiting import until

pytestmark = pytest.mark.slow


def gap(shard: str = "0/1") -> Gap:
    return Gap("wss://relay.test", shard, GapReason.CURSOR_OUTDATED, first_seq=6)


class Reconciling(NamedTuple):
    """A running reconciliation and its gaps."""

    gaps: OpenGaps
    reconciliation: Reconciliation

    async def wait_until_closed(self) -> None:
        await until(lambda: self.gaps.gaps == [])


@asynccontextmanager
async def reconciling(
    crawl: Crawl, sources: Sequence[str] | None = None, settings: ReconciliationSettings = NO_WAIT
) -> AsyncIterator[Reconciling]:
    """Run a reconciliation. The stream of the first source, or else of the host, is open."""
    gaps = crawl.gaps(settings)
    await gaps.refresh()
    reconciliation = crawl.reconciliation(settings, gaps=gaps, sources=sources)
    async with running(reconciliation):
        yield Reconciling(gaps, reconciliation)


async def closed_by(crawl: Crawl) -> list[str | None]:
    return [row[0] for row in await crawl.sql.fetch("select closed_by from atproto.gaps order by opened_at")]


async def test_gap_starts_a_reconciliation_that_closes_it(crawl: Crawl) -> None:
    await insert(crawl.db, stored("behind"))
    crawl.lists((did(1), STORED), cursor="x")
    crawl.host.pages[path("x")] = page((did("behind"), NEWER))
    async with reconciling(crawl) as process:
        assert crawl.host.requests == []
        await process.gaps.open(gap())
        assert crawl.metrics.registry.get_sample_value("indexer_gaps_open") == 1
        await process.wait_until_closed()
        assert crawl.metrics.registry.get_sample_value("indexer_gaps_open") == 0
    assert await crawl.behind() == {did("behind"): NEWER}
    assert await closed_by(crawl) == [crawl.host.url]
    assert requested_cursors(crawl.host) == [None, "x"]


async def test_no_reconciliation_begins_while_another_stream_may_cover_the_gap(crawl: Crawl) -> None:
    asked = 0

    def may_be_covered() -> bool:
        nonlocal asked
        asked += 1
        assert crawl.host.requests == []
        return asked < 3

    crawl.lists((did(1), STORED))
    async with reconciling(crawl) as process:
        process.reconciliation.may_be_covered = may_be_covered
        await process.gaps.open(gap())
        await process.wait_until_closed()
    assert asked == 3


async def test_gap_opened_during_a_reconciliation_needs_another_one(crawl: Crawl) -> None:
    """The first page was read before the second gap was opened."""

    async def open_again() -> None:
        crawl.host.pages[path("x")] = page((did(2), STORED))
        await process.gaps.open(gap())

    crawl.lists((did(1), STORED), cursor="x")
    crawl.host.pages[path("x")] = after(open_again, page((did(2), STORED)))
    async with reconciling(crawl) as process:
        await process.gaps.open(gap())
        await until(lambda: len(requested_cursors(crawl.host)) == 4)
        await process.wait_until_closed()
    assert requested_cursors(crawl.host) == [None, "x", None, "x"]
    assert await closed_by(crawl) == [crawl.host.url] * 2


async def test_gap_is_not_closed_by_a_reconciliation_that_began_before_it(crawl: Crawl) -> None:
    """The interrupted reconciliation is not resumed: its first page was read too early."""
    await crawl.db.crawls.save(CrawlProgress("sweep", crawl.host.url, "", "x", 7, 3, began_at=time()))
    await crawl.db.gaps.open(gap())
    crawl.lists((did(1), STORED))
    async with reconciling(crawl) as process:
        await process.wait_until_closed()
    assert requested_cursors(crawl.host) == [None]


async def test_interrupted_reconciliation_starts_again_after_a_gap_was_opened(crawl: Crawl) -> None:
    crawl.lists((did(1), STORED), cursor="x")
    crawl.host.pages[path("x")] = FAILURE
    gaps = crawl.gaps()
    reconciliation = crawl.reconciliation(gaps=gaps)
    with stamina.set_testing(True, attempts=1), pytest.raises(UnavailableError):
        await crawl.reconcile(reconciliation)
    opened = await gaps.open(gap())
    crawl.host.pages[path("x")] = page((did(2), STORED))
    progress = await crawl.reconcile(reconciliation)
    assert requested_cursors(crawl.host) == [None, "x", None, "x"]
    assert progress.last_gap == opened.id


async def test_gap_stays_open_while_no_stream_is_open(crawl: Crawl) -> None:
    await crawl.db.gaps.open(gap())
    crawl.lists((did(1), STORED))
    sources: list[str] = []
    async with reconciling(crawl, sources) as process:
        await process.gaps.refresh()
        assert crawl.host.requests == []
        sources.append(crawl.host.url)
        await process.wait_until_closed()


async def test_gap_stays_open_if_the_stream_changes_to_another_relay(crawl: Crawl) -> None:
    sources = [crawl.host.url]
    async with ScriptedHost() as other:

        async def change_relay() -> None:
            sources[:] = [other.url, crawl.host.url]

        crawl.host.pages[path()] = after(change_relay, page((did(1), STORED)))
        other.pages[path()] = page((did(1), STORED))
        async with reconciling(crawl, sources) as process:
            await process.gaps.open(gap())
            await process.wait_until_closed()
        assert await closed_by(crawl) == [other.url]
        assert len(crawl.host.requests) == 1


async def test_failure_of_the_connected_relay_is_reported_and_no_other_relay_closes_the_gap(crawl: Crawl) -> None:
    async with ScriptedHost() as other:
        crawl.host.pages[path()] = FAILURE
        with stamina.set_testing(True, attempts=1):
            async with reconciling(crawl, [crawl.host.url, other.url]) as process:
                await process.gaps.open(gap())
                await until(lambda: len(crawl.host.requests) == 3)
                failed = f"failed and will be retried: {crawl.host.url}: http-status"
                assert failed in (process.reconciliation.progress or "")
                crawl.lists((did("behind"), NEWER))
                await process.wait_until_closed()
        assert other.requests == []


async def test_shard_compares_its_own_repos_and_closes_its_own_gaps(crawl: Crawl) -> None:
    first, second = Shard(0, 2), Shard(1, 2)
    await insert(crawl.db, *[stored(name) for name in "abcdefgh"])
    crawl.lists(*[(did(name), NEWER) for name in "abcdefgh"])
    await crawl.db.gaps.open(gap(shard=str(second)))
    async with reconciling(crawl, settings=replace(NO_WAIT, shard=first)) as process:
        await process.gaps.open(gap(shard=str(first)))
        await process.wait_until_closed()
    marked = await crawl.behind()
    assert 0 < len(marked) < 8
    assert all(map(first.owns, marked))
    assert [opened.gap.shard for opened in await crawl.db.gaps.load_open()] == [str(second)]


async def test_failed_reconciliation_is_resumed(crawl: Crawl) -> None:
    crawl.lists((did(1), STORED), cursor="x")
    crawl.host.pages[path("x")] = FAILURE
    with stamina.set_testing(True, attempts=1):
        async with reconciling(crawl) as process:
            await process.gaps.open(gap())
            await until(lambda: requested_cursors(crawl.host)[-2:] == ["x", "x"])
            crawl.host.pages[path("x")] = page()
            await process.wait_until_closed()
            await until(lambda: process.reconciliation.progress == "done; accounts listed: 1, different: 0")
    assert requested_cursors(crawl.host).count(None) == 1


async def test_gap_is_closed_although_the_relay_never_tells_the_status_of_an_account(crawl: Crawl) -> None:
    await insert(crawl.db, stored("unlisted"))
    crawl.lists()
    crawl.host.pages[status_path("unlisted")] = http_response(status=500)
    async with reconciling(crawl) as process:
        await process.gaps.open(gap())
        await process.wait_until_closed()
    repo = await crawl.row("unlisted")
    assert (repo.sync_status, repo.sync_reason) == (SyncStatus.DESYNCHRONIZED, Desync.STATUS_UNKNOWN)
