"""Links of records and their counts: after every kind of write they are those of the visible records."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from time import time
from typing import Any

import asyncpg
import pytest

from indexer.db import Database
from indexer.db import links as db_links
from indexer.readers.links import LinkReader
from indexer.sync.changes import Batch, RecordChange, RepoWrite
from indexer.sync.repo import Repo, SyncStatus
from indexer.sync.shard import bucket_of
from tests.db.change_log_helpers import connected
from tests.db.link_checks import assert_links_exact, compare_links, links_at_end
from tests.db.link_steps import (
    ALL,
    LIKE,
    PATH,
    claim_again,
    count,
    finish_resync,
    like,
    number_changes,
    owned_links,
    post,
    settle,
    turn_on,
)
from tests.db.repo_rows import completed, delete, did, in_progress, insert, put, synchronized
from tests.waiting import until

pytestmark = pytest.mark.slow


async def test_links_follow_creates_updates_and_deletes(db: Database, sql: asyncpg.Connection) -> None:
    await turn_on(db)
    await insert(db, synchronized(1), changes=(like("a"), like("b"), like("c", "two"), put("app.test/d")))
    await settle(db)
    assert (await count(sql), await count(sql, "two"), await count(sql, "none")) == (2, 1, 0)
    row = await sql.fetchrow("select * from atproto.links where rkey = 'c'")
    assert tuple(row or ()) == (post("two"), "strong-ref", did(1), LIKE, "c", PATH, bucket_of(did(1)))
    changes = (like("a", "two", action="update"), delete(f"{LIKE}/b"), delete(f"{LIKE}/absent"))
    await db.write(Batch((RepoWrite(synchronized(1), synchronized(1, version=2), changes),)))
    await number_changes(db)
    assert not await links_at_end(sql)
    assert await count(sql) == 2, "they are those of the position"
    await settle(db)
    assert (await count(sql), await count(sql, "two")) == (0, 2)
    await assert_links_exact(sql)
    assert await sql.fetchval("select count(*) from indexer.target_count where count = 0") == 0
    repeated = (like("x"), delete(f"{LIKE}/x"), like("x", "four"), like("y", "four"), delete(f"{LIKE}/y"))
    await insert(db, synchronized(2), changes=repeated)
    await settle(db)
    assert (await count(sql), await count(sql, "four")) == (0, 1), "the last of several changes of a record counts"
    await assert_links_exact(sql)


async def test_links_of_a_hidden_repo_are_neither_shown_nor_counted(db: Database, sql: asyncpg.Connection) -> None:
    await turn_on(db)
    changes = tuple(like(number) for number in range(5))
    await insert(db, synchronized(1), synchronized(2), changes=changes)
    await settle(db)
    repo = synchronized(1)
    for visible, settled in ((False, True), (True, True), (False, False), (True, False)):
        before, repo = repo, repo._replace(version=repo.version + 1, active=visible)
        write = RepoWrite(before, repo)
        assert not (await db.write(Batch((write,)))).skipped
        assert await sql.fetchval("select count(*) from atproto.links") == (10 if visible else 5)
        async with owned_links(db) as session:
            read = session.seq
            assert not await session.read_changes()
            assert session.seq > read
        if settled:
            await settle(db)
        assert await count(sql) == (10 if visible else 5)
        await assert_links_exact(sql)
    await settle(db)
    assert await sql.fetchval("select count(*) from indexer.links_to_recount") == 0
    await assert_links_exact(sql)


async def test_links_follow_a_resync_in_all_its_ways(db: Database, sql: asyncpg.Connection) -> None:
    """New records are copied, others are merged, and buffered events are drained."""
    await turn_on(db)
    claimed = await in_progress(db, 1)
    async with db.resyncs.transaction(claimed) as transaction:
        await transaction.write((like("a"),), "export")  # and is abandoned
    await settle(db)
    assert await assert_links_exact(sql) == 0
    await finish_resync(db, claimed, (like("a"), like("b"), like("c")), drained=(like("d"), delete(f"{LIKE}/a")))
    await settle(db)
    assert await count(sql) == 3
    again = await claim_again(db, claimed)
    changes = (like("b", "two", action="update"), delete(f"{LIKE}/c"), like("e"))
    await finish_resync(db, again, changes)
    await settle(db)
    assert (await count(sql), await count(sql, "two")) == (2, 1)
    await assert_links_exact(sql)


@pytest.mark.parametrize("recounted", [True, False])
async def test_a_takedown_during_a_resync_is_counted(db: Database, sql: asyncpg.Connection, *, recounted: bool) -> None:
    await turn_on(db)
    claimed = await in_progress(db, 1)

    async def take_down() -> None:
        await sql.execute("select atproto.request_takedown($1, true)", did(1))
        if recounted:
            await settle(db)

    await finish_resync(db, claimed, (like("a"), like("b")), before_lock=take_down)
    await settle(db)
    assert await count(sql) == 0
    await sql.execute("select atproto.request_takedown($1, false)", did(1))
    await settle(db)
    assert await count(sql) == 2
    await assert_links_exact(sql)


async def test_an_erasure_removes_links(db: Database, sql: asyncpg.Connection) -> None:
    await turn_on(db)
    hidden = synchronized(1, active=False, hosting_status="deleted", erase_at=5.0)
    await insert(db, hidden, synchronized(2), changes=(like("a"), like("b")))
    await settle(db)
    erased = await db.repos.erase_batch(ALL, 10.0)
    assert erased
    assert erased.records == 2
    await settle(db)
    assert await count(sql) == 2
    assert await sql.fetchval("select count(*) from indexer.record_link where did = $1", did(1)) == 0
    await assert_links_exact(sql)


async def test_links_of_an_untracked_repo_are_not_counted_until_it_is_tracked_again(
    db: Database, sql: asyncpg.Connection
) -> None:
    """Its records are erased later; meanwhile, it is hidden."""
    await turn_on(db)
    await insert(db, synchronized(1), synchronized(2), changes=(like("a"),))
    await sql.execute("select atproto.untrack(array[$1])", did(1))
    await settle(db)
    assert await count(sql) == 1
    await sql.execute("select atproto.track(array[$1])", did(1))
    await settle(db)
    await assert_links_exact(sql)
    await sql.execute("select atproto.untrack(array[$1])", did(1))
    assert await db.repos.erase_batch(ALL, time() + 10)
    await settle(db)
    assert await count(sql) == 1
    assert await assert_links_exact(sql) == 1
    assert await sql.fetchval("select count(*) from indexer.links_to_recount") == 0


async def test_links_take_less_than_ten_times_the_bytes_of_the_records(db: Database, sql: asyncpg.Connection) -> None:
    """The worst records have as many short links as their size allows, each to a target of its own."""
    await turn_on(db)
    tables = "pg_total_relation_size('indexer.record_link') + pg_total_relation_size('indexer.target_count')"
    before, size = await sql.fetchval(f"select {tables}"), 0
    for commit in range(5):
        values = [
            json.dumps({"a": [f"did:a:{commit * 20_000 + record * 100 + number:x}" for number in range(100)]})
            for record in range(200)
        ]
        size += sum(map(len, values))
        changes = tuple(put(f"app.test/{number}", value) for number, value in enumerate(values))
        await insert(db, synchronized(commit), changes=changes)
    await settle(db)
    links = await sql.fetchval("select count(*) from atproto.links")
    assert 4 * 1_000 < links < 100 * 1_000
    if db.layout.commit_numbers:  # the tables are on other nodes
        assert await sql.fetchval(f"select {tables}") - before < 10 * size


class EverythingAtOnce:
    """Writers of every kind on the same few repos, each in a task of its own, until the checker has seen enough."""

    def __init__(self, db: Database, seed: int) -> None:
        self.db = db
        self.numbers = random.Random(seed)
        self.done, self.go = asyncio.Event(), asyncio.Event()
        self.go.set()
        self.writes: Counter[str] = Counter()

    async def repeat(self, name: str, action: Callable[[], Awaitable[object]]) -> None:
        """Run an action again and again; count how often it changed something."""
        while not self.done.is_set():
            if name != "links":
                await self.go.wait()
            changed = await action()
            self.writes[name] += bool(changed)
            await asyncio.sleep(0 if changed else 0.002)

    def any_did(self) -> str:
        return did(self.numbers.randrange(8))

    async def any_repo(self, status: SyncStatus) -> Repo | None:
        name = self.any_did()
        repo = (await self.db.repos.load([name])).get(name)
        return repo if repo is not None and repo.sync_status is status else None

    async def replace(self, repo: Repo, *changes: RecordChange, **fields: Any) -> bool:
        """Write a row as the batch writer does, unless it has changed."""
        after = repo._replace(version=repo.version + 1, **fields)
        return not (await self.db.write(Batch((RepoWrite(repo, after, changes),)))).skipped

    def some_changes(self, stored: set[str] | None = None) -> tuple[RecordChange, ...]:
        """Return changes of random records; with `stored`, those that fit the stored records."""
        changes = []
        for rkey in self.numbers.sample("abcdef", 3):
            known = stored is None or rkey in stored
            if known and self.numbers.random() < 0.4:
                changes.append(delete(f"{LIKE}/{rkey}"))
            else:
                action: Any = "update" if known else "create"
                changes.append(like(rkey, self.numbers.choice(["one", "two"]), action=action))
        return tuple(changes)

    async def live(self) -> bool:
        repo = await self.any_repo(SyncStatus.SYNCHRONIZED)
        return repo is not None and await self.replace(repo, *self.some_changes())

    async def resync(self) -> bool:
        await self.db.repos.request_resyncs([self.any_did()])
        for claimed in await self.db.resyncs.claim(1, ALL, 10.0, 1e10):
            async with self.db.resyncs.transaction(claimed) as transaction:
                paths = [path.decode() async for chunk in transaction.stored() for path, _ in chunk]
                if not await transaction.holds_claim():
                    return False
                await transaction.write(self.some_changes({path.partition("/")[2] for path in paths}), "export")
                locked = await transaction.lock()
                if locked is None:
                    return False
                await transaction.finish(Batch((RepoWrite(locked, completed(locked), live=False),)))
                return True
        return False

    async def take_down(self, sql: asyncpg.Connection) -> bool:
        query = "select atproto.request_takedown($1, $2)"
        return bool(await sql.fetchval(query, self.any_did(), self.numbers.random() < 0.5))

    async def change_scope(self, sql: asyncpg.Connection) -> bool:
        name = self.any_did()
        await sql.execute("select atproto.untrack(array[$1])", name)
        await asyncio.sleep(0.005)
        return bool(await sql.fetchval("select atproto.track(array[$1])", name))

    async def delete_account(self) -> bool:
        repo = await self.any_repo(SyncStatus.SYNCHRONIZED)
        return repo is not None and await self.replace(repo, active=False, hosting_status="deleted", erase_at=5.0)

    async def restore_account(self) -> bool:
        repo = await self.any_repo(SyncStatus.DESYNCHRONIZED)
        return repo is not None and await self.replace(
            repo, active=True, hosting_status=None, erase_at=None, next_attempt_at=None
        )

    async def erase(self) -> bool:
        erased = await self.db.repos.erase_batch(ALL, time() + 10)
        return erased is not None and erased.records > 0

    async def check(self, sql: asyncpg.Connection, times: int) -> None:
        """Compare a number of snapshots with the records. The writers pause until the links have caught up."""

        async def compared() -> bool:
            return await count(sql) is not None and await compare_links(sql) is not None

        try:
            for _ in range(times):
                self.go.clear()
                await until(compared)
                self.go.set()
                await asyncio.sleep(0.05)
        finally:
            self.go.set()
            self.done.set()


@pytest.mark.one_server("its changes get no numbers")
async def test_every_snapshot_is_exact_while_everything_runs_at_once(
    db: Database, sql: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Live writes, resyncs, takedowns, the scope, deletions, erasures, the backfill and the reader of the log."""
    monkeypatch.setattr(db_links, "MAX_BYTES", 200)
    monkeypatch.setattr(db_links, "MAX_CHANGES", 5)
    monkeypatch.setattr(db_links, "MAX_RECOUNTED", 2)
    for number in range(8):
        await insert(db, synchronized(number), changes=tuple(like(rkey) for rkey in "abcdef"))
    many = await Database.open(database, connections=6)
    world = EverythingAtOnce(many, 11)
    try:
        async with (
            owned_links(many) as session, connected(database) as other, connected(database) as third,
            asyncio.timeout(240), asyncio.TaskGroup() as tasks,
        ):  # fmt: skip
            actions: dict[str, Callable[[], Awaitable[object]]] = {
                "live": world.live,
                "resync": world.resync,
                "takedown": lambda: world.take_down(other),
                "scope": lambda: world.change_scope(third),
                "deletion": world.delete_account,
                "restoration": world.restore_account,
                "erasure": world.erase,
                "links": partial(LinkReader.turn, session),
            }
            for name, action in actions.items():
                tasks.create_task(world.repeat(name, action))
            tasks.create_task(world.check(sql, 15))
        assert world.writes.keys() >= {"live", "resync", "takedown", "scope", "deletion", "erasure"}
        await settle(db)
        await assert_links_exact(sql)
    finally:
        await many.close()
