"""One statement writes a small batch like the several ones of `apply_batch`, or nothing if a row is not as planned."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from time import monotonic
from typing import Any

import asyncpg
import pytest

from indexer.errors import RefusedWriteError
from indexer.reasons import Rejection
from indexer.store import DatabaseError, Store
from indexer.store.apply_batch import STATEMENT_BYTES, AppliedBatch
from indexer.store.apply_small_batch import (
    MAX_CHANGES,
    WRITE,
    NotAsPlannedError,
    SmallBatch,
    apply_small,
    small_batch,
)
from indexer.store.store import SMALL_BATCH_PAUSE
from indexer.sync.plans import Action, Batch, Cursor, DeadLetter, RecordChange, RepoWrite
from indexer.sync.repo_state import Repo
from indexer.sync.shard import Placement
from tests.database_proxy import DatabaseProxy
from tests.store.repo_rows import delete, did, head, insert, put, synchronized, waiting_for_locks
from tests.tcp_proxy import Messages
from tests.waiting import until

RELAY = "wss://relay.test"
OWNERS = range(4)
PATHS = ["app.test/a", "app.test/b", "app.test.more/a", "b.c/d"]
STORED = put("app.test/stored", '"stored"')
TABLES = {
    "repo": "did, version, rev, data, commit, sync_status",
    "record": "did, collection, rkey, cid, rev, value::text, value_problem, original",
    "change": "did, collection, rkey, action, cid, rev, live",
    "cursor": "relay, shard, epoch, seq, event_time, caught_up_at, stored_until",
}


def cursor(seq: int = 1, **fields: Any) -> Cursor:
    return replace(Cursor(RELAY, "0/1", seq, "2026-01-01T00:00:00Z", 1_763_000_000.5, stored_until=1.5), **fields)


def advance(repo: Repo, *changes: RecordChange, rev: str = "3lbbbbbbbbb22", live: bool = True) -> RepoWrite:
    """Return the write of a commit with these changes."""
    after = repo._replace(version=repo.version + 1, head=head(rev))
    return RepoWrite(repo.version, after, changes, live=live, advances=True)


ORDINARY = advance(synchronized(1), put("app.test/a"))


async def content(sql: asyncpg.Connection) -> dict[str, list[tuple[Any, ...]]]:
    """Return the rows of all tables that a small batch writes; the change log in its order."""
    found = {}
    for table, columns in TABLES.items():
        order = "segment, batch, ordinal" if table == "change" else columns
        rows = await sql.fetch(f"select {columns} from indexer.{table} order by {order}")  # noqa: S608
        found[table] = [tuple(row) for row in rows]
    return found


async def numbered(sql: asyncpg.Connection) -> list[tuple[Any, ...]]:
    """Return the change log as consumers read it, with the distances between the numbers."""
    rows = await sql.fetch("select seq, did, action, collection, rkey, rev, live from atproto.changes order by seq")
    return [(row["seq"] - rows[0]["seq"], *list(row)[1:]) for row in rows]


def random_batches(seed: int) -> list[Batch]:
    """Return batches of ordinary commits, each of some of the owners, and of a few records."""
    numbers = random.Random(seed)
    repos = {owner: synchronized(owner) for owner in OWNERS}
    present: set[tuple[int, str]] = set()
    batches = []
    for seq in range(1, 41):
        writes = []
        for owner in numbers.sample(OWNERS, numbers.randrange(1, 4)):
            changes = []
            for path in numbers.sample(PATHS, numbers.randrange(4)):
                text, rev = f'{{"seq": {seq}, "path": "{path}"}}', f"3lbbbbbbb{seq:04}"
                if (owner, path) not in present:
                    changes.append(put(path, text, rev=rev))
                else:
                    changes.append(numbers.choice([delete(path, rev), put(path, text, "update", rev)]))
                (present.discard if changes[-1].action == "delete" else present.add)((owner, path))
            writes.append(advance(repos[owner], *changes, rev=f"3lbbbbbbb{seq:04}", live=numbers.random() < 0.9))
            repos[owner] = writes[-1].repo
        stored_until = numbers.choice([None, float(seq)])
        batches.append(Batch(tuple(writes), cursor=cursor(seq, stored_until=stored_until, epoch=seq // 20)))
    return batches


def several_statements_fail(patch: pytest.MonkeyPatch) -> None:
    """Let a test fail that writes a batch with the statements of `apply_batch`."""
    patch.setattr("indexer.store.store.apply", lambda *_, **__: pytest.fail("written with several statements"))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
async def test_one_statement_writes_the_same_rows_as_several(
    store: Store, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    async def play(*, links: bool | None) -> tuple[Any, ...]:
        await sql.execute("truncate indexer.repo, indexer.record, indexer.change, indexer.change_batch, indexer.cursor")
        await insert(store, *[synchronized(owner) for owner in OWNERS])
        store.keeps_links = links
        with monkeypatch.context() as patch:
            if links is False:
                several_statements_fail(patch)
            applied = [await store.write(batch) for batch in random_batches(seed)]
        return applied, await content(sql), await numbered(sql)

    by_several = await play(links=None)
    assert by_several == await play(links=False)


async def test_a_batch_without_changes_writes_no_change_log(store: Store, sql: asyncpg.Connection) -> None:
    await insert(store, synchronized(1))
    batches = await sql.fetchval("select count(*) from indexer.change_batch")
    assert await written_by_one(sql, Batch((advance(synchronized(1)),), cursor=cursor())) == Counter()
    assert await sql.fetchval("select count(*) from indexer.change_batch") == batches
    assert (await store.repos([did(1)]))[did(1)].version == 2


async def written_by_one(sql: asyncpg.Connection, batch: Batch) -> Counter[Action]:
    """Write a batch with one statement; return the numbers of changes by action."""
    small = small_batch(batch)
    assert small is not None
    return (await apply_small(sql, small)).changes


NOT_AS_PLANNED: dict[str, RepoWrite] = {
    "another version": advance(synchronized(1, version=2), put("app.test/new")),
    "unknown repo": advance(synchronized("unknown"), put("app.test/new")),
    "created record exists": advance(synchronized(1), put("app.test/new"), put("app.test/stored", '"other"')),
    "updated record does not exist": advance(synchronized(1), put("app.test/none", "{}", "update")),
    "deleted record does not exist": advance(synchronized(1), delete("app.test/none"), delete("app.test/stored")),
    "created record exists, and updated one does not": advance(
        synchronized(1), put("app.test/stored", '"other"'), put("app.test/none", "{}", "update")
    ),
}


@pytest.mark.parametrize("name", NOT_AS_PLANNED)
async def test_nothing_is_written_if_a_row_is_not_as_planned(store: Store, sql: asyncpg.Connection, name: str) -> None:
    await insert(store, synchronized(1), changes=(STORED,))
    await insert(store, synchronized(2))
    before = await content(sql)
    ordinary = advance(synchronized(2), put("app.test/a"))
    with pytest.raises(NotAsPlannedError):
        await written_by_one(sql, Batch((ordinary, NOT_AS_PLANNED[name]), cursor=cursor()))
    assert await content(sql) == before


@pytest.mark.parametrize("name", NOT_AS_PLANNED)
async def test_a_batch_that_is_not_as_planned_is_written_with_several_statements(
    store: Store, sql: asyncpg.Connection, name: str
) -> None:
    async def play(*, links: bool | None) -> tuple[Any, ...]:
        await sql.execute("truncate indexer.repo, indexer.record, indexer.change, indexer.change_batch, indexer.cursor")
        await insert(store, synchronized(1), changes=(STORED,))
        await insert(store, synchronized(2))
        store.keeps_links = links
        ordinary = advance(synchronized(2), put("app.test/a"))
        applied = await store.write(Batch((ordinary, NOT_AS_PLANNED[name]), cursor=cursor()))
        return applied, await content(sql), await numbered(sql)

    assert await play(links=False) == await play(links=None)


async def test_a_repo_that_changes_meanwhile_is_skipped(store: Store, sql: asyncpg.Connection, database: str) -> None:
    """The statement waits for the lock of the repo before it writes a record."""
    await insert(store, synchronized(1), changes=(STORED,))
    store.keeps_links = False
    other = await asyncpg.connect(database)
    async with other.transaction():
        await other.execute("update indexer.repo set version = 7")
        update = put("app.test/stored", '"new"', "update")
        writing = asyncio.create_task(store.write(Batch((advance(synchronized(1), update),), cursor=cursor())))
        await until(lambda: waiting_for_locks(sql, 1))
        await other.execute("update indexer.record set rev = 'theirs'")  # would be a deadlock if it were locked
    assert (await writing).skipped == {did(1)}
    assert await sql.fetchval("select rev from indexer.record") == "theirs"
    assert await sql.fetchval("select count(*) from indexer.cursor") == 0
    await other.close()


async def test_value_that_the_database_cannot_store_is_refused_and_opens_only_one_connection(
    store: Store, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await insert(store, synchronized(1))
    store.keeps_links = False
    before, used = await content(sql), used_connections(monkeypatch)
    for _ in range(3):
        with pytest.raises(RefusedWriteError):
            await store.write(Batch((advance(synchronized(1), put("app.test/a", '"\\u0000"')),), cursor=cursor()))
    assert await content(sql) == before
    assert len(used) == 1


def one_statement_fails(patch: pytest.MonkeyPatch) -> None:
    """Let a test fail that writes a batch with one statement."""
    patch.setattr("indexer.store.store.apply_small", lambda *_: pytest.fail("written with one statement"))


@pytest.mark.parametrize(
    ("links", "placement"), [(None, Placement.PLAIN), (True, Placement.PLAIN), (False, Placement.DISTRIBUTED)]
)
async def test_one_statement_writes_no_links_and_no_distributed_tables(
    store: Store, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch, links: bool | None, placement: Placement
) -> None:
    await insert(store, synchronized(1))
    store.keeps_links, store.placement = links, placement
    one_statement_fails(monkeypatch)
    await store.write(Batch((ORDINARY,), cursor=cursor()))
    assert await sql.fetchval("select count(*) from indexer.record") == 1


async def test_links_that_are_kept_since_the_wait_for_a_connection_are_written(
    store: Store, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await insert(store, synchronized(1))
    store.keeps_links = False
    one_statement_fails(monkeypatch)
    connect, connected = asyncpg.connect, list[asyncpg.Connection]()

    async def connect_meanwhile(*arguments: Any, **named: Any) -> asyncpg.Connection:
        store.keeps_links = None
        connected.append(await connect(*arguments, **named))
        return connected[-1]

    monkeypatch.setattr("indexer.store.connections.asyncpg.connect", connect_meanwhile)
    await store.write(Batch((ORDINARY,), cursor=cursor()))
    assert connected
    assert await sql.fetchval("select count(*) from indexer.record") == 1


def used_connections(patch: pytest.MonkeyPatch) -> list[asyncpg.Connection]:
    """Return a list that will contain the connection of each statement for a small batch."""
    used: list[asyncpg.Connection] = []

    async def recording_apply_small(connection: asyncpg.Connection, batch: SmallBatch) -> AppliedBatch:
        used.append(connection)
        return await apply_small(connection, batch)

    patch.setattr("indexer.store.store.apply_small", recording_apply_small)
    return used


async def write_small(store: Store, count: int) -> None:
    """Write this number of small batches, each for a new repo."""
    for number in range(count):
        repo = synchronized(f"small batch {number} at {monotonic()}")
        await insert(store, repo)
        assert not (await store.write(Batch((advance(repo, put("app.test/a")),), cursor=cursor()))).skipped


async def test_the_statement_is_not_planned_at_each_call(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("indexer.store.connections.SMALL_BATCH_PLAN_SECONDS", 60)
    store.keeps_links = False
    used = used_connections(monkeypatch)
    await write_small(store, 8)
    plans = "select generic_plans, custom_plans from pg_prepared_statements where statement = $1"
    assert [tuple(row) for row in await used[-1].fetch(plans, WRITE)] == [(8, 0)]


@pytest.mark.slow
async def test_the_statement_is_planned_again_after_some_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for small tables may be slow once they have grown."""
    store.keeps_links = False
    used = used_connections(monkeypatch)
    monkeypatch.setattr("indexer.store.connections.SMALL_BATCH_PLAN_SECONDS", 0.01)
    no_plan = "select not exists (select from pg_prepared_statements where statement = $1)"
    for _ in range(2):
        await write_small(store, 1)
        await until(lambda: used[-1].fetchval(no_plan, WRITE))
    assert used[0] is used[1]


@pytest.mark.slow
async def test_a_lost_connection_is_opened_again(
    store: Store, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await insert(store, synchronized(1), synchronized(2))
    store.keeps_links = False
    several_statements_fail(monkeypatch)
    used = used_connections(monkeypatch)
    await store.write(Batch((ORDINARY,), cursor=cursor()))
    await sql.fetchval("select pg_terminate_backend($1, 5000)", used[0].get_server_pid())
    await until(used[0].is_closed)
    assert not (await store.write(Batch((advance(synchronized(2)),), cursor=cursor(2)))).skipped
    assert used[1] is not used[0]


@pytest.mark.slow
async def test_the_connection_is_closed_with_the_store(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await Store.open(database)
    store.keeps_links = False
    used = used_connections(monkeypatch)
    await write_small(store, 1)
    await store.close()
    assert used[0].is_closed()


@asynccontextmanager
async def write_that_waits(
    store: Store, sql: asyncpg.Connection, database: str
) -> AsyncIterator[asyncio.Task[AppliedBatch]]:
    """Write a small batch, whose statement waits for the lock of the repo to the end of the block; yield its task."""
    lock = await asyncpg.connect(database)
    async with lock.transaction():
        await lock.execute("update indexer.repo set version = version")
        writing = asyncio.create_task(store.write(Batch((ORDINARY,), cursor=cursor())))
        await until(lambda: waiting_for_locks(sql, 1))
        yield writing
    await lock.close()


async def test_the_pool_is_closed_if_the_close_of_the_store_is_cancelled(
    database: str, sql: asyncpg.Connection
) -> None:
    store = await Store.open(database)
    store.keeps_links = False
    await insert(store, synchronized(1))
    async with write_that_waits(store, sql, database) as writing:
        closing = asyncio.create_task(store.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
    await writing
    with pytest.raises(DatabaseError, match="clos"):
        await store.repos([did(1)])
    await store.close()


async def test_no_batch_is_written_with_one_statement_for_a_while_after_one_was_not_as_planned(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise many would be written twice while a collection is added to the scope."""
    await insert(store, synchronized(1), synchronized(2))
    store.keeps_links = False
    other = advance(synchronized(1), put("app.test/none", "{}", "update"))
    assert not (await store.write(Batch((other,), cursor=cursor()))).skipped
    with monkeypatch.context() as patch:
        one_statement_fails(patch)
        assert not (await store.write(Batch((advance(other.repo),), cursor=cursor(2)))).skipped
    monkeypatch.setattr("indexer.store.store.monotonic", lambda: monotonic() + SMALL_BATCH_PAUSE)
    several_statements_fail(monkeypatch)
    assert not (await store.write(Batch((advance(synchronized(2)),), cursor=cursor(3)))).skipped


async def test_other_statements_write_the_batch_if_the_connection_for_small_ones_cannot_be_opened(
    store: Store, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the batch would be halved, and at last each message rejected, although the pool can write it."""
    await insert(store, synchronized(1))
    store.keeps_links = False

    async def refuse(*_: object, **__: object) -> asyncpg.Connection:
        raise asyncpg.TooManyConnectionsError("too many connections for role")

    monkeypatch.setattr("indexer.store.connections.asyncpg.connect", refuse)
    with pytest.raises(DatabaseError, match="too many connections"):
        await store.write(Batch((ORDINARY,), cursor=cursor()))
    assert not (await store.write(Batch((ORDINARY,), cursor=cursor()))).skipped
    assert await sql.fetchval("select count(*) from indexer.record") == 1


async def test_a_session_that_ends_during_the_statement_is_replaced_and_the_pool_writes_meanwhile(
    store: Store, sql: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await insert(store, synchronized(1), synchronized(2))
    store.keeps_links = False
    before, used = await content(sql), used_connections(monkeypatch)
    async with write_that_waits(store, sql, database) as writing:
        await sql.execute("select pg_terminate_backend($1)", used[0].get_server_pid())
        with pytest.raises(DatabaseError, match="terminating connection"):
            await writing
    assert await content(sql) == before
    with monkeypatch.context() as patch:
        one_statement_fails(patch)
        assert not (await store.write(Batch((ORDINARY,), cursor=cursor()))).skipped
    monkeypatch.setattr("indexer.store.store.monotonic", lambda: monotonic() + SMALL_BATCH_PAUSE)
    several_statements_fail(monkeypatch)
    assert not (await store.write(Batch((advance(synchronized(2)),), cursor=cursor(2)))).skipped
    assert used[1] is not used[0]


class HangsWhenAStatementIsClosed(DatabaseProxy):
    """Hangs before the first message of a client that closes a prepared statement, as soon as `armed` is set."""

    armed = False

    def messages(self) -> tuple[Messages, Messages]:
        of_client, of_server = super().messages()
        split = of_client.split

        def watched(data: bytes) -> Iterator[tuple[str, bytes]]:
            for kind, message in split(data):
                if self.armed and kind == "Close":
                    self.hang()
                yield kind, message

        of_client.split = watched  # type: ignore[method-assign]
        return of_client, of_server


@pytest.mark.slow
async def test_the_round_trip_that_closes_an_old_plan_has_a_time_limit(
    store: Store, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver applies none to it."""
    await insert(store, synchronized(1), synchronized(2))
    monkeypatch.setattr("indexer.store.connections.SMALL_BATCH_PLAN_SECONDS", 0.01)
    monkeypatch.setattr("indexer.store.connections.STATEMENT_TIMEOUT", 1.0)
    monkeypatch.setattr("indexer.store.kept_connection.CANCEL_TIMEOUT", 0.1)
    proxy = HangsWhenAStatementIsClosed(database)
    async with proxy.serve():
        behind_proxy = await Store.open(proxy.dsn)
        behind_proxy.keeps_links = False
        used = used_connections(monkeypatch)
        await behind_proxy.write(Batch((ORDINARY,), cursor=cursor()))
        await asyncio.sleep(0.1)  # the plan becomes old: a query that finds out would close it
        proxy.armed = True
        async with asyncio.timeout(10):
            with pytest.raises(DatabaseError, match="no answer in time"):
                await behind_proxy.write(Batch((advance(synchronized(2)),), cursor=cursor(2)))
        assert proxy.mode == "hang"
        assert used[0].is_closed()
        proxy.open()
        await behind_proxy.close()


async def test_a_cancelled_statement_writes_nothing(
    store: Store, sql: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await insert(store, synchronized(1))
    store.keeps_links = False
    before, used = await content(sql), used_connections(monkeypatch)
    async with write_that_waits(store, sql, database) as writing:
        writing.cancel()
        await until(lambda: waiting_for_locks(sql, 0))
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert await content(sql) == before
    assert used[0].is_closed()  # Postgres may receive the cancellation when the next statement runs
    assert not (await store.write(Batch((ORDINARY,), cursor=cursor()))).skipped


LARGE = '"' + "x" * (STATEMENT_BYTES // 2) + '"'
DEAD = DeadLetter(RELAY, 1, did(1), "#commit", Rejection.FIELD_INVALID, "", b"frame")
OTHER_BATCHES = {
    "no cursor": Batch((ORDINARY,)),
    "no writes": Batch(cursor=cursor()),
    "dead letter": Batch((ORDINARY,), (DEAD,), cursor=cursor()),
    "stale identity": Batch((ORDINARY,), stale_identities=frozenset([did(1)]), cursor=cursor()),
    "other columns change": Batch((ORDINARY, RepoWrite(1, synchronized(2, version=2))), cursor=cursor()),
    "unproven": Batch((advance(synchronized(1, unproven_since=1.0), put("app.test/a")),), cursor=cursor()),
    "a record changes twice": Batch(
        (advance(synchronized(1), put("app.test/a"), put("app.test/a", "1", "update")),), cursor=cursor()
    ),
    "many changes": Batch(
        (advance(synchronized(1), *[put(f"app.test/{number}") for number in range(MAX_CHANGES + 1)]),), cursor=cursor()
    ),
    "many repos": Batch(tuple(advance(synchronized(number)) for number in range(MAX_CHANGES + 1)), cursor=cursor()),
    "large values": Batch(
        (advance(synchronized(1), put("app.test/a", LARGE), put("app.test/b", LARGE)),), cursor=cursor()
    ),
}


@pytest.mark.parametrize("name", OTHER_BATCHES)
def test_other_batches_are_not_small(name: str) -> None:
    assert small_batch(OTHER_BATCHES[name]) is None


def test_the_largest_batch_is_small() -> None:
    changes = [put(f"app.test/{number}") for number in range(MAX_CHANGES)]
    assert small_batch(Batch((advance(synchronized(1), *changes),), cursor=cursor())) is not None
