"""One statement writes a small batch like the several ones of `apply_batch`, or nothing if a row is not as planned."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count, islice
from time import monotonic
from typing import Any

import asyncpg
import pytest

from indexer.db import DatabaseError, Store
from indexer.db.apply_batch import STATEMENT_BYTES, AppliedBatch
from indexer.db.apply_small_batch import (
    MAX_CHANGES,
    WRITE,
    NotAsPlannedError,
    SmallBatch,
    apply_small,
    small_batch,
)
from indexer.db.store import SMALL_BATCH_PAUSE
from indexer.errors import RefusedWriteError
from indexer.reasons import Rejection
from indexer.sync.plans import Batch, Cursor, DeadLetter, RecordChange, RepoWrite
from indexer.sync.repo_state import Repo
from indexer.sync.shard import Placement
from tests.db.change_log_helpers import connected
from tests.db.repo_rows import delete, did, head, insert, put, synchronized, waiting_for_locks
from tests.waiting import until

RELAY = "wss://relay.test"
OWNERS = range(4)
PATHS = ["app.test/a", "app.test/b", "app.test.more/a", "b.c/d"]
STORED = put("app.test/stored", '"stored"')
TABLES = {
    "change_batch": "segment, size",
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


@pytest.fixture
def small_writes(monkeypatch: pytest.MonkeyPatch) -> list[asyncpg.Connection]:
    """Return a list of the connections of all batches that one statement writes."""
    used: list[asyncpg.Connection] = []

    async def recording_apply_small(connection: asyncpg.Connection, batch: SmallBatch) -> AppliedBatch:
        used.append(connection)
        return await apply_small(connection, batch)

    monkeypatch.setattr("indexer.db.store.apply_small", recording_apply_small)
    return used


async def played(store: Store, sql: asyncpg.Connection, batches: list[Batch], placement: Placement) -> tuple[Any, ...]:
    """Write the batches to the initial rows; return what the store says, and all rows."""
    await sql.execute("truncate indexer.repo, indexer.record, indexer.change, indexer.change_batch, indexer.cursor")
    await insert(store, *[synchronized(owner) for owner in OWNERS])
    await insert(store, synchronized("stored"), changes=(STORED,))
    store.placement = placement  # on a distributed database, several statements write each batch
    return [await store.write(batch) for batch in batches], await content(sql), await numbered(sql)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
async def test_one_statement_writes_the_same_rows_as_several(
    store: Store, sql: asyncpg.Connection, small_writes: list[asyncpg.Connection], seed: int
) -> None:
    batches = random_batches(seed)
    by_several = await played(store, sql, batches, Placement.DISTRIBUTED)
    assert not small_writes
    assert by_several == await played(store, sql, batches, Placement.PLAIN)
    assert len(small_writes) == len(batches)


NOT_AS_PLANNED: dict[str, RepoWrite] = {
    "another version": advance(synchronized("stored", version=2), put("app.test/new")),
    "unknown repo": advance(synchronized("unknown"), put("app.test/new")),
    "created record exists": advance(synchronized("stored"), put("app.test/new"), put("app.test/stored", '"other"')),
    "updated record does not exist": advance(synchronized("stored"), put("app.test/none", "{}", "update")),
    "deleted record does not exist": advance(
        synchronized("stored"), delete("app.test/none"), delete("app.test/stored")
    ),
    "created record exists, and updated one does not": advance(
        synchronized("stored"), put("app.test/stored", '"other"'), put("app.test/none", "{}", "update")
    ),
}


@pytest.mark.slow
async def test_a_batch_that_is_not_as_planned_is_written_with_several_statements_only(
    store: Store, sql: asyncpg.Connection
) -> None:
    store.small_batch_pause = 0.0
    for name, other in NOT_AS_PLANNED.items():
        batch = Batch((ORDINARY, other), cursor=cursor())
        by_several = await played(store, sql, [batch], Placement.DISTRIBUTED)
        await played(store, sql, [], Placement.PLAIN)
        small, before = small_batch(batch), await content(sql)
        assert small is not None
        with pytest.raises(NotAsPlannedError):
            await apply_small(sql, small)
        assert await content(sql) == before, name
        assert await played(store, sql, [batch], Placement.PLAIN) == by_several, name


async def test_a_repo_that_changes_meanwhile_is_skipped(store: Store, sql: asyncpg.Connection, database: str) -> None:
    """The statement waits for the lock of the repo before it writes a record."""
    await insert(store, synchronized(1), changes=(STORED,))
    async with connected(database) as other, other.transaction():
        await other.execute("update indexer.repo set version = 7")
        update = put("app.test/stored", '"new"', "update")
        writing = asyncio.create_task(store.write(Batch((advance(synchronized(1), update),), cursor=cursor())))
        await until(lambda: waiting_for_locks(sql, 1))
        await other.execute("update indexer.record set rev = 'theirs'")  # would be a deadlock if it were locked
    assert (await writing).skipped == {did(1)}
    assert await sql.fetchval("select rev from indexer.record") == "theirs"
    assert await sql.fetchval("select count(*) from indexer.cursor") == 0


async def test_value_that_the_database_cannot_store_is_refused_and_opens_only_one_connection(
    store: Store, sql: asyncpg.Connection, small_writes: list[asyncpg.Connection]
) -> None:
    await insert(store, synchronized(1))
    before = await content(sql)
    for _ in range(3):
        with pytest.raises(RefusedWriteError):
            await store.write(Batch((advance(synchronized(1), put("app.test/a", '"\\u0000"')),), cursor=cursor()))
    assert await content(sql) == before
    assert len(small_writes) == 1


@pytest.mark.slow
async def test_the_statement_is_planned_once_but_again_after_some_time(
    store: Store, small_writes: list[asyncpg.Connection]
) -> None:
    """A plan for small tables may be slow once they have grown."""
    numbers = count(1)

    async def plans() -> list[int]:
        query = "select custom_plans from pg_prepared_statements where statement = $1"
        return [custom for (custom,) in await small_writes[-1].fetch(query, WRITE)]

    async def write_until_planned() -> bool:
        for number in islice(numbers, 7):  # by default, the first five are planned at each call
            await insert(store, synchronized(number))
            await store.write(Batch((advance(synchronized(number)),), cursor=cursor(number)))
        return await plans() == [0]

    async def is_forgotten() -> bool:
        return await plans() == []

    await until(write_until_planned)
    await until(is_forgotten)
    await write_until_planned()
    assert len(set(small_writes)) == 1


@asynccontextmanager
async def write_that_waits(
    store: Store, sql: asyncpg.Connection, database: str
) -> AsyncIterator[asyncio.Task[AppliedBatch]]:
    """Write a small batch, whose statement waits for the lock of the repo to the end of the block; yield its task."""
    async with connected(database) as lock, lock.transaction():
        await lock.execute("update indexer.repo set version = version")
        writing = asyncio.create_task(store.write(Batch((ORDINARY,), cursor=cursor())))
        await until(lambda: waiting_for_locks(sql, 1))
        yield writing


@pytest.mark.slow
async def test_no_batch_is_written_with_one_statement_for_a_while_after_one_was_not_as_planned(
    store: Store, small_writes: list[asyncpg.Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise many would be written twice while a collection is added to the scope."""
    await insert(store, synchronized(1), synchronized(2))
    other = advance(synchronized(1), put("app.test/none", "{}", "update"))
    assert not (await store.write(Batch((other,), cursor=cursor()))).skipped
    assert not (await store.write(Batch((advance(other.repo),), cursor=cursor(2)))).skipped
    assert len(small_writes) == 1
    monkeypatch.setattr("indexer.db.store.monotonic", lambda: monotonic() + SMALL_BATCH_PAUSE)
    assert not (await store.write(Batch((advance(synchronized(2)),), cursor=cursor(3)))).skipped
    assert len(small_writes) == 2


@pytest.mark.slow
async def test_other_statements_write_the_batch_if_the_connection_for_small_ones_cannot_be_opened(
    store: Store, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the batch would be halved, and at last each message rejected, although the pool can write it."""
    await insert(store, synchronized(1))

    async def refuse(*_: object, **__: object) -> asyncpg.Connection:
        raise asyncpg.TooManyConnectionsError("too many connections for role")

    monkeypatch.setattr("indexer.db.connections.asyncpg.connect", refuse)
    with pytest.raises(DatabaseError, match="too many connections"):
        await store.write(Batch((ORDINARY,), cursor=cursor()))
    assert not (await store.write(Batch((ORDINARY,), cursor=cursor()))).skipped
    assert await sql.fetchval("select count(*) from indexer.record") == 1


@pytest.mark.slow
async def test_a_session_that_ends_is_replaced_and_the_pool_writes_meanwhile(
    store: Store,
    sql: asyncpg.Connection,
    database: str,
    small_writes: list[asyncpg.Connection],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If it ends between two statements, the next one has a new session at once."""
    await insert(store, *[synchronized(number) for number in (1, 2, 3)])
    before = await content(sql)
    async with write_that_waits(store, sql, database) as writing:
        await sql.execute("select pg_terminate_backend($1)", small_writes[0].get_server_pid())
        with pytest.raises(DatabaseError, match="terminating connection"):
            await writing
    assert await content(sql) == before
    assert not (await store.write(Batch((ORDINARY,), cursor=cursor()))).skipped
    assert len(small_writes) == 1
    monkeypatch.setattr("indexer.db.store.monotonic", lambda: monotonic() + SMALL_BATCH_PAUSE)
    for number in (2, 3):
        assert not (await store.write(Batch((advance(synchronized(number)),), cursor=cursor(number)))).skipped
        await sql.fetchval("select pg_terminate_backend($1, 5000)", small_writes[-1].get_server_pid())
        await until(small_writes[-1].is_closed)
    assert len(set(small_writes)) == 3


@pytest.mark.slow
async def test_a_cancelled_statement_writes_nothing(
    store: Store, sql: asyncpg.Connection, database: str, small_writes: list[asyncpg.Connection]
) -> None:
    await insert(store, synchronized(1))
    before = await content(sql)
    async with write_that_waits(store, sql, database) as writing:
        writing.cancel()
        await until(lambda: waiting_for_locks(sql, 0))
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert await content(sql) == before
    assert small_writes[0].is_closed()  # Postgres may receive the cancellation when the next statement runs
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
