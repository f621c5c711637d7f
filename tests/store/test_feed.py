"""The change feed: every change once, in the order of commits, whoever is slow, late, or killed."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import asyncpg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from indexer.store import Store
from indexer.store.feed import log_changes
from indexer.sync.identity import StoredIdentity
from indexer.sync.plan import Batch, RepoWrite
from indexer.sync.repo import SyncStatus
from tests.conftest import Server
from tests.store.following import NEXT, after, change, connected, log, rkeys
from tests.store.rows import delete, did, in_progress, insert, put, synchronized


async def test_a_transaction_that_commits_late_is_not_skipped(database: str, sql: asyncpg.Connection) -> None:
    """Nor does it keep the others waiting."""
    await sql.execute("select atproto.register_reader('one')")
    async with connected(database) as slow:
        late = slow.transaction()
        await late.start()
        await log_changes(slow, [change("slow", 1), change("slow", 2)])
        await log(sql, change("fast", 3))
        place = (await after(sql))[-1]["seq"]
        assert rkeys(await after(sql)) == ["3"]
        assert rkeys(await sql.fetch(NEXT, "one", 10)) == ["3"]
        await log_changes(slow, [change("slow", 4)])
        await log(sql, change("fast", 5))
        assert rkeys(await sql.fetch(NEXT, "one", 10)) == ["5"]
        await late.commit()
    assert rkeys(await after(sql, place)) == ["5", "1", "2", "4"]
    assert rkeys(await sql.fetch(NEXT, "one", 10)) == ["1", "2", "4"]
    assert rkeys(await after(sql)) == ["3", "5", "1", "2", "4"]


@pytest.mark.parametrize("end", ["rollback", "kill"])
async def test_what_never_commits_is_never_given_out(database: str, sql: asyncpg.Connection, end: str) -> None:
    async with connected(database) as lost:
        transaction = lost.transaction()
        await transaction.start()
        await log_changes(lost, [change("lost", 1)])
        await lost.execute("set constraints all immediate")  # its numbers are given, and nobody may pass it any more
        following = asyncio.create_task(log(sql, change("next", 2)))
        async with connected(database) as third:
            waiting = "select count(*) from pg_locks where relation = 'indexer.turn'::regclass and not granted"
            while not await third.fetchval(waiting):
                assert not following.done()
            assert await after(third) == []
            if end == "rollback":
                await transaction.rollback()
            else:
                await third.execute("select pg_terminate_backend($1)", lost.get_server_pid())
        await following
    [row] = await after(sql)
    assert (row["rkey"], row["seq"]) == ("2", 2)


async def test_a_snapshot_of_records_and_the_feed_meet_exactly(
    store: Store, database: str, sql: asyncpg.Connection
) -> None:
    await insert(store, synchronized(1), changes=(put("app.test/a"),))
    async with sql.transaction(isolation="repeatable_read", readonly=True):
        place = await sql.fetchval("select atproto.latest_seq()")
        await store.apply(Batch((RepoWrite(1, synchronized(1, version=2), (delete("app.test/a"), put("b.c/d"))),)))
        assert [row[0] for row in await sql.fetch("select rkey from atproto.records")] == ["a"]
        assert await after(sql, place) == []
        assert await sql.fetchval("select atproto.latest_seq()") == place
    assert [(row["action"], row["rkey"]) for row in await after(sql, place)] == [("delete", "a"), ("create", "d")]


async def test_pages_of_any_size_give_the_same(store: Store, sql: asyncpg.Connection) -> None:
    for number in range(5):
        await log(sql, *[change(number, 10 * number + n) for n in range(number + 1)])
    everything = [tuple(row) for row in await after(sql)]
    assert len(everything) == 15
    assert everything == [tuple(row) for row in await sql.fetch("select * from atproto.changes order by seq")]
    for size in (1, 2, 4, 7, 15):
        place, paged = None, []
        while page := await after(sql, place, size):
            assert len(page) <= size
            paged += [tuple(row) for row in page]
            place = page[-1]["seq"]
        assert paged == everything
    assert await after(sql, 0, 0) == []
    assert await after(sql, 0, -1) == []
    assert await after(sql, 10**15) == []


async def test_the_end_is_the_newest_number(store: Store, sql: asyncpg.Connection) -> None:
    assert await sql.fetchval("select atproto.latest_seq()") == 0
    await log(sql, change(1), change(2))
    assert await sql.fetchval("select atproto.latest_seq()") == 2
    assert await sql.fetchval("select atproto.register_reader('now')") == 2
    assert await sql.fetchval("select atproto.register_reader('before', 1)") == 1
    assert await sql.fetchval("select atproto.register_reader('before', 2)") == 1, "a registered one keeps its place"


async def test_a_reader_is_given_again_what_it_rolled_back(sql: asyncpg.Connection) -> None:
    await sql.execute("select atproto.register_reader('one', 0)")
    await log(sql, *[change(1, n) for n in range(4)])
    assert rkeys(await sql.fetch(NEXT, "one", 3)) == ["0", "1", "2"]
    transaction = sql.transaction()
    await transaction.start()
    assert rkeys(await sql.fetch(NEXT, "one", 3)) == ["3"]
    assert rkeys(await sql.fetch(NEXT, "one", 3)) == []
    await transaction.rollback()
    assert rkeys(await sql.fetch(NEXT, "one", 3)) == ["3"]


async def test_two_of_one_name_share_the_changes(database: str, sql: asyncpg.Connection) -> None:
    """The second waits for the first one's commit, and goes on from there."""
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


async def test_a_stranger_and_an_unregistered_reader_are_told_so(sql: asyncpg.Connection) -> None:
    await sql.execute("select atproto.register_reader('one')")
    assert await sql.fetchval("select atproto.unregister_reader('one')")
    assert not await sql.fetchval("select atproto.unregister_reader('one')")
    with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError, match="no reader is registered as 'one'"):
        await sql.fetch(NEXT, "one", 1)
    with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError, match="as null"):
        await sql.fetch(NEXT, None, 1)
    with pytest.raises(asyncpg.InvalidParameterValueError):
        await sql.execute("select atproto.register_reader('')")


@pytest.mark.parametrize("step", range(5))
async def test_a_reader_killed_at_any_step_has_everything_once(
    database: str, sql: asyncpg.Connection, step: int
) -> None:
    """Its own rows and its place are one transaction: what it wrote is what it was given."""
    await sql.execute("create table public.mine (seq bigint, rkey text)")
    await sql.execute("select atproto.register_reader('one', 0)")
    killed = False
    for number in range(6):
        await log(sql, change(1, 2 * number), change(2, 2 * number + 1))
    while True:
        async with connected(database) as connection:
            try:
                if await digest(connection, None if killed else step):
                    break
            except asyncpg.PostgresConnectionError:
                killed = True
    assert killed
    rows = await sql.fetch("select rkey from public.mine order by seq")
    assert [row[0] for row in rows] == [str(n) for n in range(12)]


async def digest(connection: asyncpg.Connection, step: int | None) -> bool:
    """Pages, written down; the connection is killed before this step of the second one. Whether all were read."""
    for page in range(4):
        transaction, rows = connection.transaction(), []
        for number in range(5):
            if (page, number) == (1, step):
                await connection.execute("select pg_terminate_backend(pg_backend_pid())")
            match number:
                case 0:
                    await transaction.start()
                case 1:
                    rows = await connection.fetch(NEXT, "one", 5)
                case 2:
                    seen = [(row["seq"], row["rkey"]) for row in rows]
                    await connection.executemany("insert into public.mine values ($1, $2)", seen)
                case 3:
                    await transaction.commit()
                case _:
                    await connection.execute("select 1")
        if not rows:
            return True
    return False


OPEN, WRITE, COMMIT, ROLLBACK, KILL, READ, PAGE = "open", "write", "commit", "rollback", "kill", "read", "page"
STEPS = st.lists(
    st.tuples(st.sampled_from((OPEN, WRITE, WRITE, COMMIT, COMMIT, ROLLBACK, KILL, READ, PAGE)), st.integers(0, 3)),
    max_size=40,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
async def test_any_interleaving_of_writers_gives_the_order_of_commits(
    postgres: Server, steps: list[tuple[str, int]]
) -> None:
    """Four writers, a reader with a transaction and one with a place of its own, against a list."""
    dsn = postgres.create(migrated=True)
    try:
        async with AsyncExitStack() as stack:
            await Interleaving(dsn, stack).play(steps)
    finally:
        postgres.drop(dsn)


class Interleaving:
    """The oracle: what a writer logs goes behind `committed`, as a whole, when it commits."""

    def __init__(self, dsn: str, stack: AsyncExitStack) -> None:
        self.dsn = dsn
        self.stack = stack
        self.writers: dict[int, asyncpg.Connection] = {}
        self.open: dict[int, list[str]] = {}
        self.committed: list[str] = []
        self.numbers = iter(range(1_000))
        self.registered: list[str] = []
        self.own: list[str] = []
        self.place: int | None = None

    async def play(self, steps: list[tuple[str, int]]) -> None:
        self.reader = await self.stack.enter_async_context(connected(self.dsn))
        await self.reader.execute("select atproto.register_reader('one', 0)")
        for step, writer in steps:
            await self.step(step, writer)
        for writer in list(self.open):
            await self.step(COMMIT, writer)
        while self.registered != self.committed or self.own != self.committed:
            before = len(self.registered), len(self.own)
            await self.step(READ, 3)
            await self.step(PAGE, 3)
            assert before != (len(self.registered), len(self.own)), "nothing more comes, and something is missing"

    async def step(self, step: str, writer: int) -> None:
        if step == READ:
            self.registered += rkeys(await self.reader.fetch(NEXT, "one", writer + 1))
            assert self.registered == self.committed[: len(self.registered)]
        elif step == PAGE:
            rows = await after(self.reader, self.place, writer + 1)
            self.place = rows[-1]["seq"] if rows else self.place
            self.own += rkeys(rows)
            assert self.own == self.committed[: len(self.own)]
        elif step == OPEN and writer not in self.open:
            if writer not in self.writers:
                self.writers[writer] = await self.stack.enter_async_context(connected(self.dsn))
            await self.writers[writer].execute("begin")
            self.open[writer] = []
        elif writer in self.open:
            await self.go_on(step, writer)

    async def go_on(self, step: str, writer: int) -> None:
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
            await self.reader.execute("select pg_terminate_backend($1)", connection.get_server_pid())
            del self.open[writer], self.writers[writer]


@pytest.mark.slow
async def test_writers_and_readers_at_full_speed(database: str) -> None:
    """Really at once: each repo's changes in their order, each once, for a reader that never stops."""
    writers, rounds = 6, 60

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
                place = rows[-1]["seq"] if rows else None
                page = await (connection.fetch(NEXT, "one", 7) if registered else after(connection, place, 7))
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


async def test_a_resync_ends_behind_its_changes(store: Store, sql: asyncpg.Connection) -> None:
    claimed = await in_progress(store, 1)
    async with store.resync(claimed) as transaction:
        await transaction.write([put("app.test/a")])
        await transaction.write([put("app.test/b")])
        locked = await transaction.lock()
        assert locked is not None
        whole = synchronized(1, version=locked.version + 1, lease=locked.lease)
        await transaction.finish(Batch((RepoWrite(locked.version, whole, (delete("app.test/a"),)),)))
    assert [(row["action"], row["rkey"], row["live"]) for row in await after(sql)] == [
        ("create", "a", False),
        ("create", "b", False),
        ("delete", "a", True),
        ("completed", None, False),
    ]


async def test_takedowns_and_moves_are_in_the_feed(store: Store, sql: asyncpg.Connection) -> None:
    await insert(store, synchronized(1), synchronized("left", active=False, hosting_status="deleted"))
    place = await sql.fetchval("select atproto.latest_seq()")
    for _ in range(2):
        assert await store.takedown(did(1), on=True)
    assert await store.takedown(did("left"), on=True)
    await store.apply(Batch((RepoWrite(2, synchronized(1, version=3, takedown=True), (put("app.test/a"),)),)))
    assert await store.takedown(did(1), on=False)
    back = synchronized(1, version=5, status=SyncStatus.DESYNCHRONIZED, active=False, hosting_status="suspended")
    await store.apply(Batch((RepoWrite(4, replace(back, synchronized_at=None)),)))
    rows = await after(sql, place)
    assert [(row["action"], row["rkey"]) for row in rows] == [
        ("hidden", None),
        ("create", "a"),
        ("visible", None),
        ("hidden", None),
    ]
    assert {(row["did"], row["live"]) for row in rows} == {(did(1), True)}


async def test_a_move_to_another_pds_is_told_and_nothing_else_of_an_identity(
    store: Store, sql: asyncpg.Connection
) -> None:
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
        await store.save([identity(at, pds, handle), StoredIdentity(did(2), None, None, None, at, False, "gone")])
    assert [(row["did"], row["action"], row["rkey"]) for row in await after(sql)] == [(did(1), "moved", None)]
