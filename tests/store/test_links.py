"""Links of records and their counts: after every kind of write they are those of the visible records."""

import asyncio
from time import time

import asyncpg
import pytest

from indexer.atproto.links import links_of
from indexer.store import Store
from indexer.sync.plans import Batch, RepoWrite
from indexer.sync.shard import bucket_of
from tests.store.link_checks import assert_links_exact
from tests.store.link_steps import ALL, LIKE, PATH, claim_again, count, finish_resync, like, post, settle, turn_on
from tests.store.repo_rows import delete, did, in_progress, insert, put, synchronized

pytestmark = pytest.mark.slow


async def test_links_follow_creates_updates_and_deletes(store: Store, sql: asyncpg.Connection) -> None:
    await turn_on(store)
    await insert(store, synchronized(1), changes=(like("a"), like("b"), like("c", "two"), put("app.test/d")))
    assert (await count(sql), await count(sql, "two"), await count(sql, "none")) == (2, 1, 0)
    row = await sql.fetchrow("select * from atproto.links where rkey = 'c'")
    assert tuple(row or ()) == (post("two"), "strong-ref", did(1), LIKE, "c", PATH, bucket_of(did(1)))
    changes = (like("a", "two", action="update"), delete(f"{LIKE}/b"), delete(f"{LIKE}/absent"))
    await store.write(Batch((RepoWrite(1, synchronized(1, version=2), changes),)))
    assert (await count(sql), await count(sql, "two")) == (0, 2)
    await assert_links_exact(sql)
    await settle(store)
    await assert_links_exact(sql)
    assert await sql.fetchval("select count(*) from indexer.link_delta") == 0
    assert await sql.fetchval("select count(*) from indexer.link_count where count = 0") == 0


async def test_the_last_of_several_changes_of_a_record_counts(store: Store, sql: asyncpg.Connection) -> None:
    await turn_on(store)
    changes = (like("a"), delete(f"{LIKE}/a"), like("a", "two"), like("b"), delete(f"{LIKE}/b"))
    await insert(store, synchronized(1), changes=changes)
    assert (await count(sql), await count(sql, "two")) == (0, 1)
    await assert_links_exact(sql)


async def test_links_found_while_planning_are_those_of_the_value(store: Store, sql: asyncpg.Connection) -> None:
    """A process that expects links has found them; in one that does not, the store finds them in the value."""
    await turn_on(store)
    for number, links in enumerate((None, links_of(like("x").value))):
        await insert(store, synchronized(number), changes=(like("a")._replace(links=links),))
    assert await count(sql) == 2


@pytest.mark.parametrize("hide", ["takedown", "account", "sql"])
async def test_links_of_a_hidden_repo_are_neither_shown_nor_counted(
    store: Store, sql: asyncpg.Connection, hide: str
) -> None:
    await turn_on(store)
    changes = tuple(like(number) for number in range(5))
    await insert(store, synchronized(1), synchronized(2), changes=changes)

    async def set_visible(version: int, *, visible: bool) -> None:
        fields = {"takedown": not visible} if hide == "takedown" else {"active": visible}
        if hide == "sql":
            await sql.execute("select atproto.request_takedown($1, $2)", did(1), not visible)
        else:
            assert not (
                await store.write(Batch((RepoWrite(version, synchronized(1, version=version + 1, **fields)),)))
            ).skipped

    await settle(store)
    for settled in (True, False):
        version = await sql.fetchval("select version from indexer.repo where did = $1", did(1))
        await set_visible(version, visible=False)
        assert await count(sql) == 5
        if settled:
            await settle(store)
        assert await count(sql) == 5
        await assert_links_exact(sql)
        await set_visible(version + 1, visible=True)
        if settled:
            await settle(store)
        assert await count(sql) == 10
        await assert_links_exact(sql)
    await settle(store)
    assert await sql.fetchval("select count(*) from indexer.link_recount") == 0
    await assert_links_exact(sql)


async def test_records_written_to_a_hidden_repo_count_when_it_is_shown(store: Store, sql: asyncpg.Connection) -> None:
    await turn_on(store)
    await insert(store, synchronized(1, takedown=True), changes=(like("a"),))
    await settle(store)
    assert await count(sql) == 0
    await store.write(Batch((RepoWrite(1, synchronized(1, version=2), (like("b"), like("a", action="update"))),)))
    assert await count(sql) == 2
    await settle(store)
    assert await count(sql) == 2
    await assert_links_exact(sql)


async def test_links_follow_a_resync_in_all_its_ways(store: Store, sql: asyncpg.Connection) -> None:
    """New records are copied, others are merged, and buffered events are drained."""
    await turn_on(store)
    claimed = await in_progress(store, 1)
    await finish_resync(store, claimed, (like("a"), like("b"), like("c")), drained=(like("d"), delete(f"{LIKE}/a")))
    assert await count(sql) == 3
    again = await claim_again(store, claimed)
    changes = (like("b", "two", action="update"), delete(f"{LIKE}/c"), like("e"))
    await finish_resync(store, again, changes)
    assert (await count(sql), await count(sql, "two")) == (2, 1)
    await assert_links_exact(sql)
    await settle(store)
    await assert_links_exact(sql)


@pytest.mark.parametrize("recounted", [True, False])
async def test_a_takedown_during_a_resync_is_counted(store: Store, sql: asyncpg.Connection, *, recounted: bool) -> None:
    await turn_on(store)
    claimed = await in_progress(store, 1)

    async def take_down() -> None:
        await sql.execute("select atproto.request_takedown($1, true)", did(1))
        if recounted:
            await settle(store)

    await finish_resync(store, claimed, (like("a"), like("b")), before_lock=take_down)
    assert await count(sql) == 0
    await settle(store)
    assert await count(sql) == 0
    await sql.execute("select atproto.request_takedown($1, false)", did(1))
    assert await count(sql) == 2
    await assert_links_exact(sql)


async def test_an_abandoned_resync_leaves_links_as_they_were(store: Store, sql: asyncpg.Connection) -> None:
    await turn_on(store)
    claimed = await in_progress(store, 1)
    async with store.resync(claimed) as transaction:
        await transaction.write((like("a"),))
    assert await count(sql) == 0
    await assert_links_exact(sql)


async def test_an_erasure_removes_links(store: Store, sql: asyncpg.Connection) -> None:
    await turn_on(store)
    hidden = synchronized(1, active=False, hosting_status="deleted", erase_at=5.0)
    await insert(store, hidden, synchronized(2), changes=(like("a"), like("b")))
    await settle(store)
    erased = await store.erase_batch(ALL, 10.0)
    assert erased
    assert erased.records == 2
    assert await count(sql) == 2
    assert await sql.fetchval("select count(*) from indexer.link where did = $1", did(1)) == 0
    await settle(store)
    await assert_links_exact(sql)


@pytest.mark.parametrize("settled", [True, False])
async def test_links_of_an_untracked_repo_are_not_counted_until_it_is_tracked_again(
    store: Store, sql: asyncpg.Connection, *, settled: bool
) -> None:
    """Its records are erased later; meanwhile, it is hidden."""
    await turn_on(store)
    await insert(store, synchronized(1), synchronized(2), changes=(like("a"),))
    await sql.execute("select atproto.untrack(array[$1])", did(1))
    if settled:
        await settle(store)
    assert await count(sql) == 1
    await assert_links_exact(sql)
    await sql.execute("select atproto.track(array[$1])", did(1))
    await assert_links_exact(sql)
    await sql.execute("select atproto.untrack(array[$1])", did(1))
    assert await store.erase_batch(ALL, time() + 10)
    assert await count(sql) == 1
    await settle(store)
    assert await assert_links_exact(sql) == 1
    assert await sql.fetchval("select count(*) from indexer.link_recount") == 0


async def test_two_writers_of_links_to_one_target_do_not_wait_for_each_other(
    store: Store, sql: asyncpg.Connection
) -> None:
    """One transaction with likes of a post is open while another one commits, and the deltas are added."""
    await turn_on(store)
    await insert(store, synchronized(2), changes=(like("before"),))
    await settle(store)
    claimed = await in_progress(store, 1)

    async def write_elsewhere() -> None:
        async with asyncio.timeout(20):
            await insert(store, synchronized(3), changes=(like("a"),))
            await store.fold_link_deltas(ALL, 100)
        assert await count(sql) == 2

    await finish_resync(store, claimed, (like("b"),), before_lock=write_elsewhere)
    assert await count(sql) == 3
