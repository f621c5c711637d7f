"""Links are turned on and off, the backfill of stored records, lost positions, and the progress of that."""

import asyncpg
import pytest

from indexer.db import Database
from indexer.db import links as db_links
from indexer.db.links import LINK_CONSUMER, PositionLostError
from indexer.readers.links import LinkReader
from indexer.sync.changes import Batch, RepoWrite
from tests.background import running
from tests.db.link_checks import assert_links_exact
from tests.db.link_steps import LIKE, count, like, number_changes, owned_links, settle, turn_off, turn_on
from tests.db.repo_rows import delete, did, insert, synchronized
from tests.waiting import until

pytestmark = pytest.mark.slow
STATE = "select state from atproto.link_progress"
LINKS_OFF = {"state": "off", "progress": None, "repos_done": 0, "seconds_left": None, "open_recounts": 0}


async def test_without_links_nothing_is_stored_and_the_count_is_null(db: Database, sql: asyncpg.Connection) -> None:
    assert not await db.links.are_kept()
    await insert(db, synchronized(1), changes=(like("a"),))
    await sql.execute("select atproto.request_takedown($1, true)", did(1))
    for table in ("record_link", "target_count", "links_to_recount", "link_reader", "consumer"):
        assert await sql.fetchval(f"select count(*) from indexer.{table}") == 0  # noqa: S608
    assert await count(sql) is None
    assert await sql.fetchval(STATE) == "off"


async def test_stored_records_are_backfilled_while_others_are_written(
    db: Database, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction ends with the first value beyond its bytes, and a restart continues after the last one."""
    monkeypatch.setattr(db_links, "MAX_CHANGES", 100)
    monkeypatch.setattr(db_links, "MAX_BYTES", 8_000)
    changes = tuple(like(f"r{number:04}", number % 3) for number in range(300))
    await insert(db, *[synchronized(number) for number in range(3)], changes=changes[:40])
    await insert(db, synchronized("large"), synchronized("hidden", takedown=True), changes=changes)
    async with owned_links(db) as session:
        assert await session.backfill()
        assert 0 < session.links < 100
        assert await count(sql, 0) is None
        assert await sql.fetchval(STATE) == "backfill"
    touched = (like("r0000", "new", action="update"), delete(f"{LIKE}/r0001"), like("later"))
    await db.write(Batch((RepoWrite(synchronized("large"), synchronized("large", version=2), touched),)))
    async with owned_links(db) as session:
        assert session.backfilled_to > ("", "", "")
        await session.backfill()
        before, repo = synchronized("large", version=2), synchronized("large", version=3)
        await db.write(Batch((RepoWrite(before, repo, (delete(f"{LIKE}/r0299"),)),)))
        while await session.backfill():
            pass
    await settle(db)
    await assert_links_exact(sql)
    progress = await sql.fetchrow("select state, repos_done, buckets_done, buckets from atproto.link_progress")
    assert tuple(progress or ()) == ("complete", 5, 256, 256)
    assert await count(sql, "new") == 1


async def test_turning_links_off_removes_them_and_on_again_brings_them_back(
    db: Database, sql: asyncpg.Connection
) -> None:
    """A consumer that reads links delays their removal only for a moment; it is tried again."""
    await turn_on(db)
    await insert(db, synchronized(1), changes=(like("a"),))
    await settle(db)
    assert await count(sql) == 1
    async with sql.transaction():
        await sql.fetch("select * from atproto.links")
        with pytest.raises(Exception, match="lock timeout"):
            await turn_off(db)
    await turn_off(db)
    assert await count(sql) is None
    assert await sql.fetchval("select count(*) from indexer.record_link") == 0
    assert await sql.fetchval("select count(*) from atproto.readers") == 0
    changes = (like("b"), delete(f"{LIKE}/a"))
    await db.write(Batch((RepoWrite(synchronized(1), synchronized(1, version=2), changes),)))
    await turn_on(db)
    assert await count(sql) == 1
    await assert_links_exact(sql)


async def test_one_session_follows_several_pages_and_later_changes_of_visibility(
    db: Database, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db_links, "MAX_CHANGES", 3)
    await turn_on(db)
    await insert(db, synchronized(1), changes=tuple(like(number) for number in range(8)))
    await number_changes(db)
    async with owned_links(db) as session:
        assert not await session.recount()
        while await session.read_changes():
            pass
        assert await count(sql) == 8
        await sql.execute("select atproto.request_takedown($1, true)", did(1))
        await number_changes(db)
        await session.read_changes()
        assert await session.recount()
    await assert_links_exact(sql)


async def test_one_process_keeps_links_at_a_time(db: Database) -> None:
    async with owned_links(db), db.links.session() as other:
        assert not await other.lock.claim()


LOSSES = {
    "removed": "select atproto.unregister_reader('links')",
    "disconnected": "insert into indexer.disconnected_consumer (id) select id from indexer.consumer",
    "trimmed": "select setval('indexer.trimmed_seq', atproto.latest_seq())",
}


@pytest.mark.parametrize("loss", LOSSES)
async def test_a_reader_that_lost_its_position_begins_again(db: Database, sql: asyncpg.Connection, loss: str) -> None:
    """Nothing of the transaction that found it out is stored. A daemon then adds the links of all stored records."""
    await insert(db, synchronized(1), changes=(like("a"), like("b")))
    await turn_on(db)
    await db.write(Batch((RepoWrite(synchronized(1), synchronized(1, version=2), (delete(f"{LIKE}/a"),)),)))
    await number_changes(db)
    await sql.execute(LOSSES[loss])
    async with owned_links(db) as session:
        with pytest.raises(PositionLostError):
            await session.read_changes()
        assert await count(sql) == 2

    async def is_complete() -> bool:
        return await count(sql) == 1

    async with running(LinkReader(db, wanted=True).run()):
        await until(is_complete)
    await settle(db)
    await assert_links_exact(sql)
    assert await sql.fetchval("select seq from atproto.readers where name = $1", LINK_CONSUMER) is not None


async def test_the_log_waits_for_links(db: Database, sql: asyncpg.Connection) -> None:
    await turn_on(db)
    await insert(db, synchronized(1), changes=(like("a"),))
    query = "select name, seq, behind from atproto.readers"
    before = await sql.fetchrow(query)
    await settle(db)
    after = await sql.fetchrow(query)
    assert before is not None
    assert after is not None
    assert (before["name"], after["behind"]) == (LINK_CONSUMER, 0)
    assert before["seq"] < after["seq"] == await sql.fetchval("select seq from atproto.link_progress")


async def test_progress_of_links_in_each_state(
    db: Database, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await db.reports.state())[0]["links"] == LINKS_OFF
    await insert(db, synchronized(1), changes=(like("a"),))
    await insert(db, *[synchronized(number) for number in (4, 5, 6)])
    await sql.execute("analyze indexer.repo")
    async with owned_links(db):
        links = (await db.reports.state())[0]["links"]
    assert (links["state"], links["progress"], links["repos_done"], links["seconds_left"]) == ("backfill", 0.0, 0, None)
    await sql.execute("update indexer.link_reader set repos = 3")
    links = (await db.reports.state())[0]["links"]
    assert (links["state"], links["progress"], links["repos_done"]) == ("backfill", 3 / 4, 3)
    since = await sql.fetchval("select date_part('epoch', clock_timestamp() - enabled_at) from atproto.link_progress")
    assert links["seconds_left"] == pytest.approx(since / 3, abs=1)
    await turn_on(db)
    links = (await db.reports.state())[0]["links"]
    assert (links["state"], links["progress"], links["open_recounts"]) == ("complete", 1.0, 0)
    await insert(db, synchronized(2), synchronized(3))
    for number in (2, 3):
        await sql.execute("select atproto.request_takedown($1, true)", did(number))
    async with owned_links(db) as session:
        await session.read_changes()
    assert (await db.reports.state())[0]["links"]["open_recounts"] == 2
    monkeypatch.setattr(db_links, "MAX_OPEN", 1)
    assert (await db.reports.state())[0]["links"]["open_recounts"] == 1
    await turn_off(db)
    assert (await db.reports.state())[0]["links"] == LINKS_OFF
