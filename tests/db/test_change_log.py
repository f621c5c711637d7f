"""The change log: consumers get every change once, in commit order, whichever writer or consumer is slow or killed."""

import asyncio
from contextlib import AsyncExitStack
from itertools import pairwise

import asyncpg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from indexer.db import Database
from indexer.db.change_log import log_changes
from indexer.sync.changes import Batch, RepoWrite
from indexer.sync.identity import HandleCheck, HandleClaim, StoredIdentity
from indexer.sync.repo import SyncStatus
from tests.database_server import DatabaseServer
from tests.db.change_log_helpers import NEXT, after, batches, change, connected, log, rkeys
from tests.db.repo_rows import delete, did, insert, put, synchronized
from tests.profiles import scaled

pytestmark = pytest.mark.slow


async def test_changes_of_an_aborted_transaction_are_never_returned(database: str, sql: asyncpg.Connection) -> None:
    async with connected(database) as lost:
        transaction = lost.transaction()
        await transaction.start()
        await log_changes(lost, [change("lost", 1)])
        await lost.execute("set constraints all immediate")  # assigns its numbers, and locks out other commits
        following = asyncio.create_task(log(sql, change("next", 2)))
        async with connected(database) as third:
            waiting = (
                "select count(*) from pg_locks where relation = 'indexer.numbering_lock'::regclass and not granted"
            )
            while not await third.fetchval(waiting):
                assert not following.done()
            assert await after(third) == []
            await third.execute("select pg_terminate_backend($1)", lost.get_server_pid())
        await following
    [row] = await after(sql)
    assert (row["rkey"], row["seq"]) == ("2", 2)


async def test_a_snapshot_of_records_and_the_changes_after_it_fit_together(
    db: Database, sql: asyncpg.Connection
) -> None:
    await insert(db, synchronized(1), changes=(put("app.test/a"),))
    async with sql.transaction(isolation="repeatable_read", readonly=True):
        position = await sql.fetchval("select atproto.latest_seq()")
        changes = (delete("app.test/a"), put("b.c/d"))
        await db.write(Batch((RepoWrite(synchronized(1), synchronized(1, version=2), changes),)))
        assert [row[0] for row in await sql.fetch("select rkey from atproto.records")] == ["a"]
        assert await after(sql, position) == []
        assert await sql.fetchval("select atproto.latest_seq()") == position
    assert [(row["action"], row["rkey"]) for row in await after(sql, position)] == [("delete", "a"), ("create", "d")]


async def test_the_latest_seq_is_the_newest_number(sql: asyncpg.Connection) -> None:
    assert await sql.fetchval("select atproto.latest_seq()") == 0
    await log(sql, change(1), change(2))
    assert await sql.fetchval("select atproto.latest_seq()") == 2
    assert [await after(sql, *page) for page in ((0, 0), (0, -1), (10**15, 1))] == [[], [], []]
    assert await sql.fetchval("select atproto.register_reader('now')") == 2
    assert await sql.fetchval("select atproto.register_reader('before', 1)") == 1
    assert await sql.fetchval("select atproto.register_reader('before', 2)") == 1, "it keeps its position"


async def test_a_consumer_gets_changes_again_after_a_rollback(sql: asyncpg.Connection) -> None:
    await sql.execute("select atproto.register_reader('one', 0)")
    await log(sql, *[change(1, n) for n in range(4)])
    assert rkeys(await sql.fetch(NEXT, "one", 3)) == ["0", "1", "2"]
    transaction = sql.transaction()
    await transaction.start()
    assert rkeys(await sql.fetch(NEXT, "one", 3)) == ["3"]
    assert rkeys(await sql.fetch(NEXT, "one", 3)) == []
    await transaction.rollback()
    assert rkeys(await sql.fetch(NEXT, "one", 3)) == ["3"]


async def test_two_connections_of_one_consumer_share_the_changes(database: str, sql: asyncpg.Connection) -> None:
    """The second call waits for the commit of the first one, and continues after its changes."""
    await sql.execute("select atproto.register_reader('one', 0)")
    await log(sql, *[change(1, n) for n in range(4)])
    async with connected(database) as other:
        async with other.transaction():
            assert rkeys(await other.fetch(NEXT, "one", 2)) == ["0", "1"]
            second = asyncio.create_task(sql.fetch(NEXT, "one", 10))
            async with connected(database) as third:
                while not await third.fetchval("select count(*) from pg_locks where not granted"):
                    assert not second.done()
        assert rkeys(await second) == ["2", "3"]


async def test_an_unregistered_consumer_gets_an_error(sql: asyncpg.Connection) -> None:
    await sql.execute("select atproto.register_reader('one')")
    assert await sql.fetchval("select atproto.unregister_reader('one')")
    assert not await sql.fetchval("select atproto.unregister_reader('one')")
    with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError, match="no consumer is registered as 'one'"):
        await sql.fetch(NEXT, "one", 1)
    with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError, match="as null"):
        await sql.fetch(NEXT, None, 1)
    with pytest.raises(asyncpg.InvalidParameterValueError):
        await sql.execute("select atproto.register_reader('')")


OPEN, WRITE, COMMIT, ROLLBACK, KILL, READ, PAGE = "open", "write", "commit", "rollback", "kill", "read", "page"
STEPS = st.lists(
    st.tuples(st.sampled_from((OPEN, WRITE, WRITE, COMMIT, COMMIT, ROLLBACK, KILL, READ, PAGE)), st.integers(0, 3)),
    max_size=40,
)


@settings(max_examples=scaled(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
async def test_any_interleaving_of_writers_gives_commit_order(
    postgres: DatabaseServer, steps: list[tuple[str, int]]
) -> None:
    """Compare four writers, a registered consumer, and one that stores its own position, with a list."""
    dsn = postgres.create(migrated=True)
    try:
        async with AsyncExitStack() as stack:
            await Interleaving(dsn, stack).play(steps)
    finally:
        postgres.drop(dsn)


class Interleaving:
    """Executes steps on the database and on a model: a commit appends all changes of its writer to `committed`."""

    def __init__(self, dsn: str, stack: AsyncExitStack) -> None:
        self.dsn = dsn
        self.stack = stack
        self.writers: dict[int, asyncpg.Connection] = {}
        self.open: dict[int, list[str]] = {}
        self.committed: list[str] = []
        self.numbers = iter(range(1_000))
        self.registered: list[str] = []
        self.own: list[str] = []
        self.position: int | None = None

    async def play(self, steps: list[tuple[str, int]]) -> None:
        self.consumer = await self.stack.enter_async_context(connected(self.dsn))
        await self.consumer.execute("select atproto.register_reader('one', 0)")
        for step, writer in steps:
            await self.step(step, writer)
        for writer in list(self.open):
            await self.step(COMMIT, writer)
        while self.registered != self.committed or self.own != self.committed:
            before = len(self.registered), len(self.own)
            await self.step(READ, 3)
            await self.step(PAGE, 3)
            assert before != (len(self.registered), len(self.own)), "no more changes are returned, but some are missing"

    async def step(self, step: str, writer: int) -> None:
        if step == READ:
            self.registered += rkeys(await self.consumer.fetch(NEXT, "one", writer + 1))
            assert self.registered == self.committed[: len(self.registered)]
        elif step == PAGE:
            rows = await after(self.consumer, self.position, writer + 1)
            self.position = rows[-1]["seq"] if rows else self.position
            self.own += rkeys(rows)
            assert self.own == self.committed[: len(self.own)]
        elif step == OPEN and writer not in self.open:
            if writer not in self.writers:
                self.writers[writer] = await self.stack.enter_async_context(connected(self.dsn))
            await self.writers[writer].execute("begin")
            self.open[writer] = []
        elif writer in self.open:
            await self.continue_transaction(step, writer)

    async def continue_transaction(self, step: str, writer: int) -> None:
        connection = self.writers[writer]
        if step == WRITE:
            numbers = [next(self.numbers) for _ in range(1 + writer)]
            await log_changes(connection, [change(writer, number) for number in numbers])
            self.open[writer] += map(str, numbers)
        elif step == COMMIT:
            await connection.execute("commit")
            self.committed += self.open.pop(writer)
        elif step == ROLLBACK:
            await connection.execute("rollback")
            del self.open[writer]
        elif step == KILL:
            await self.consumer.execute("select pg_terminate_backend($1)", connection.get_server_pid())
            del self.open[writer], self.writers[writer]


async def test_concurrent_writers_and_consumers(database: str) -> None:
    """Consumers that read all the time get each change once, and the changes of each repo in order."""
    writers, rounds = 6, 30

    async def write(writer: int) -> None:
        async with connected(database) as connection:
            for number in range(rounds):
                async with connection.transaction():
                    await log_changes(connection, [change(writer, 2 * number)])
                    await log_changes(connection, [change(writer, 2 * number + 1)])

    async def follow(*, registered: bool) -> list[asyncpg.Record]:
        async with connected(database) as connection:
            if registered:
                await connection.execute("select atproto.register_reader('one', 0)")
            rows = await after(connection, 0, 0)
            while len(rows) < 2 * writers * rounds:
                position = rows[-1]["seq"] if rows else None
                page = await (connection.fetch(NEXT, "one", 7) if registered else after(connection, position, 7))
                rows.extend(page)
            return rows

    async with asyncio.TaskGroup() as group:
        following = [group.create_task(follow(registered=registered)) for registered in (True, False)]
        for writer in range(writers):
            group.create_task(write(writer))
    one, two = [task.result() for task in following]
    assert one == two
    assert [row["seq"] for row in one] == sorted({row["seq"] for row in one})
    for writer in range(writers):
        assert rkeys([row for row in one if row["did"] == did(writer)]) == [str(n) for n in range(2 * rounds)]


async def test_takedowns_and_account_statuses_are_logged(db: Database, sql: asyncpg.Connection) -> None:
    await insert(db, synchronized(1), synchronized("inactive", active=False, hosting_status="deleted"))
    position = await sql.fetchval("select atproto.latest_seq()")
    for _ in range(2):
        assert await db.repos.set_takedown(did(1), on=True)
    assert await db.repos.set_takedown(did("inactive"), on=True)
    assert not await db.repos.set_takedown(did("unknown"), on=True)
    hidden = synchronized(1, version=2, takedown=True)
    await db.write(Batch((RepoWrite(hidden, hidden._replace(version=3), (put("app.test/a"),)),)))
    assert await db.repos.set_takedown(did(1), on=False)
    back = synchronized(1, version=5, sync_status=SyncStatus.DESYNCHRONIZED, active=False, hosting_status="suspended")
    await db.write(Batch((RepoWrite(synchronized(1, version=4), back._replace(synchronized_at=None)),)))
    rows = await after(sql, position)
    assert [(row["action"], row["rkey"]) for row in rows] == [
        ("hidden", None),
        ("create", "a"),
        ("visible", None),
        ("hidden", None),
    ]
    assert {(row["did"], row["live"]) for row in rows} == {(did(1), True)}


async def test_a_change_of_the_pds_is_logged_and_a_claim_is_not(db: Database, sql: asyncpg.Connection) -> None:
    def identity(at: float, pds: str | None, handle: str = "alice.test") -> StoredIdentity:
        return StoredIdentity(did(1), handle, pds, "did:key:zabc", at, stale=False, problem=None)

    for at, pds, handle in (
        (1.0, "https://one.test", "alice.test"),
        (2.0, "https://one.test", "bob.test"),
        (3.0, "https://two.test", "bob.test"),
        (2.5, "https://one.test", "bob.test"),
        (4.0, None, "bob.test"),
        (5.0, "https://two.test", "bob.test"),
    ):
        await db.identities.save(
            [identity(at, pds, handle), StoredIdentity(did(2), None, None, None, at, False, "gone")]
        )
    assert [(row["did"], row["action"], row["rkey"]) for row in await after(sql)] == [(did(1), "moved", None)]


async def test_each_change_of_a_verified_handle_is_logged_once(db: Database, sql: asyncpg.Connection) -> None:
    async def claim(at: float, handle: str | None) -> None:
        await db.identities.save([StoredIdentity(did(1), handle, "https://one.test", "did:key:zabc", at)])

    async def check(claimed: str, known: str | None, result: str | None) -> None:
        await db.identities.save_handle_check(HandleCheck(HandleClaim(did(1), claimed, known, 0), result, 0, 9.0))

    async def logged() -> list[tuple[str, str, bool]]:
        return [(row["did"], row["action"], row["live"]) for row in await after(sql)]

    entry = (did(1), "identity", True)
    await claim(1.0, "alice.test")
    assert await logged() == [], "the handle is not known yet"
    await check("alice.test", None, "alice.test")
    await check("alice.test", "alice.test", "alice.test")
    assert await logged() == [entry]
    await claim(2.0, "bob.test")
    await check("alice.test", "alice.test", "alice.test")
    assert await logged() == [entry], "the check of an earlier claim has no effect"
    await check("bob.test", None, "handle.invalid")
    assert await logged() == [entry] * 2
    await check("bob.test", "handle.invalid", "bob.test")
    await claim(3.0, None)
    assert await logged() == [entry] * 4, "without a claim, the handle is invalid"
    await claim(4.0, None)
    assert await logged() == [entry] * 4


async def test_no_two_changes_have_the_same_time(database: str, sql: asyncpg.Connection) -> None:
    """Batches are so large that the next one commits before as many microseconds have passed."""

    async def write(name: str) -> None:
        async with connected(database) as connection:
            for _ in range(10):
                await log(connection, *[change(name, number) for number in range(50)])

    await asyncio.gather(write("a"), write("b"), write("c"))
    await log(sql, *[change("d", number) for number in range(20_000)])
    await log(sql, change("e"))
    found = await batches(sql)
    assert len(found) == 32
    for (first, size, time), (next_first, _, next_time) in pairwise(found):
        assert next_first >= first + size
        assert next_time >= time + size


async def test_times_do_not_go_back_with_the_clock(sql: asyncpg.Connection) -> None:
    await log(sql, change(1), change(2))
    await sql.execute("select setval('indexer.change_time', last_value + 3600000000) from indexer.change_time")
    later = await sql.fetchval("select last_value from indexer.change_time")
    await log(sql, change(3), change(4))
    await log(sql, change(5))
    assert [time for _, _, time in await batches(sql)][1:] == [later + 1, later + 3]
