"""Discovery: tracking listed accounts, and resuming an interrupted crawl."""

import asyncio
from time import monotonic

import asyncpg
import pytest
import stamina
from structlog.testing import capture_logs

from indexer.db import Database
from indexer.db.crawls import CrawlProgress
from indexer.errors import UnavailableError
from indexer.net.http.http_client import OutboundClient
from indexer.sync.repo import CHOSEN
from indexer.tasks.discover import Discovery
from tests.db.repo_rows import did, insert, synchronized
from tests.net.http.scripted_host import ScriptedHost
from tests.tasks.crawl_scenario import FAILURE, page, path, requested_cursors
from tests.telemetry.log_events import listed_events
from tests.waiting import until

pytestmark = pytest.mark.slow

REV = "3laaaaaaaaa22"


async def discover(db: Database, outbound: OutboundClient, host: ScriptedHost) -> list[CrawlProgress]:
    """Run a discovery, and return the progress after each page."""
    discovery, pages = Discovery(db, outbound), list[CrawlProgress]()
    final = await discovery.run(await discovery.begin(host.url, ""), pages.append)
    assert final == pages[-1]
    return pages


async def tracked(sql: asyncpg.Connection) -> set[str]:
    return {row["did"] for row in await sql.fetch("select did from indexer.repo where sync_status = 'desynchronized'")}


async def test_active_listed_accounts_are_tracked(
    db: Database, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient
) -> None:
    await insert(db, synchronized("known"))
    gone = {"did": did("gone"), "rev": REV, "active": False, "status": "deactivated"}
    host.pages[path()] = page((did(1), REV), (did("known"), REV), {"did": "nobody"}, cursor="x")
    host.pages[path("x")] = page(gone, (did(2), REV), (did(1), REV))
    pages = await discover(db, outbound, host)
    assert await tracked(sql) == {did(1), did(2)}
    assert [(progress.listed, progress.found, progress.cursor) for progress in pages] == [
        (2, 1, "x"),
        (5, 2, None),
    ]
    assert (await db.repos.load([did("known")]))[did("known")] == synchronized("known", version=2, wanted_in=CHOSEN)


async def test_accounts_that_the_relay_withholds_are_tracked_too(
    db: Database, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient
) -> None:
    entries: list[dict[str, object]] = [
        {"did": did(status), "rev": REV, "active": False} | ({"status": status} if status else {})
        for status in ("throttled", "desynchronized", "word-of-tomorrow", "suspended", "inactive", "")
    ]
    host.pages[path()] = page(*entries)
    await discover(db, outbound, host)
    rows = await sql.fetch("select hosting_status, visible from atproto.repos where withheld_since is not null")
    assert {tuple(row) for row in rows} == {
        ("throttled", True), ("desynchronized", True), ("word-of-tomorrow", True)
    }  # fmt: skip
    assert len(await tracked(sql)) == len(rows)


async def test_interrupted_crawl_is_resumed_and_a_finished_one_starts_again(
    db: Database, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient
) -> None:
    host.pages[path()] = page((did(1), REV), cursor="x")
    host.pages[path("x")] = FAILURE
    failed = pytest.raises(UnavailableError, match="http-status: 404")
    with stamina.set_testing(True, attempts=2), capture_logs() as lines, failed:
        await discover(db, outbound, host)
    assert {line["event"] for line in lines if line["log_level"] != "debug"} <= listed_events().keys(), (
        "docs/logs.md has every event, also of libraries"
    )
    assert [line["attempt"] for line in lines if line["event"] == "repo-list.page-failed"] == [1, 2]
    assert requested_cursors(host) == [None, "x", "x"]
    assert await tracked(sql) == {did(1)}
    host.pages[path("x")] = page((did(2), REV))
    [progress] = await discover(db, outbound, host)
    assert (progress.listed, progress.found) == (2, 2)
    assert await tracked(sql) == {did(1), did(2)}
    assert requested_cursors(host)[3:] == ["x"]
    [*_, again] = await discover(db, outbound, host)
    assert requested_cursors(host)[4:] == [None, "x"]
    assert (again.listed, again.found) == (2, 0)
    assert again.began_at > progress.began_at


async def test_accounts_and_progress_of_a_page_are_saved_in_one_transaction(
    db: Database, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient
) -> None:
    host.pages[path()] = page((did(1), REV), cursor="x")
    await sql.execute("alter table indexer.crawl_progress add check (listed = 0)")
    with pytest.raises(asyncpg.CheckViolationError):
        await discover(db, outbound, host)
    assert await tracked(sql) == set()


async def test_host_that_does_not_answer_is_work_without_progress_until_it_does(
    db: Database, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient
) -> None:
    answer = asyncio.Event()

    async def late(writer: asyncio.StreamWriter) -> None:
        await answer.wait()
        writer.write(page((did(1), REV)))
        await writer.drain()

    host.pages[path()] = late
    discovery, began = Discovery(db, outbound), monotonic()
    running = asyncio.create_task(discovery.run(await discovery.begin(host.url, ""), lambda _: None))
    await until(lambda: discovery.stage.seconds_without_progress(began) > 0.1)
    answer.set()
    await running
    assert discovery.stage.seconds_without_progress(began) == 0.0
    assert await tracked(sql) == {did(1)}
