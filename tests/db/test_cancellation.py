"""Cancellation of tasks that wait for a connection of the pool."""

import asyncio
from enum import Enum, auto

import asyncpg
import pytest

from indexer.db import Database, DatabaseError
from tests.db.repo_rows import in_progress, put
from tests.waiting import until

TRIALS = 100
DID = "did:plc:aaaaaaaaaaaaaaaaaaaaaaaa"


class End(Enum):
    CANCELLED = auto()
    COMPLETED_BEFORE = auto()
    CANCELLATION_LOST = auto()


async def hold_connection(db: Database, held: asyncio.Event, release: asyncio.Event) -> None:
    async with db.exports.consistent_read(DID):
        held.set()
        await release.wait()


async def cancel_waiting_task(db: Database, rounds: int) -> End:
    """Cancel a task that waits for the only connection, `rounds` event loop rounds after its holder may end."""
    held, release = asyncio.Event(), asyncio.Event()
    holder = asyncio.create_task(hold_connection(db, held, release))
    await held.wait()
    waiting = asyncio.create_task(db.repos.load([DID]))
    await asyncio.sleep(0)
    release.set()
    for _ in range(rounds):
        await asyncio.sleep(0)
    requested = waiting.cancel()
    await holder
    try:
        await waiting
    except asyncio.CancelledError:
        return End.CANCELLED
    return End.CANCELLATION_LOST if requested else End.COMPLETED_BEFORE


@pytest.mark.slow
async def test_a_cancelled_wait_for_a_connection_ends_the_task(database: str) -> None:
    """Also when the connection becomes free in the same round of the event loop: the trials approach this round."""
    db = await Database.open(database, connections=1)
    ends: list[End] = []
    rounds, step = 0, 1
    try:
        for _ in range(TRIALS):
            ends.append(await cancel_waiting_task(db, rounds))
            completed = [end is End.COMPLETED_BEFORE for end in ends[-2:]]
            step = max(1, step // 2) if completed[0] != completed[-1] else 2 * step
            rounds = max(0, rounds - step) if completed[-1] else rounds + step
    finally:
        await db.close()
    assert {End.CANCELLED, End.COMPLETED_BEFORE} <= set(ends)
    assert End.CANCELLATION_LOST not in ends


async def test_a_cancelled_task_leaves_the_connection_as_it_was(database: str) -> None:
    """The pool does not reset a session, so whatever a transaction began has to end with it."""
    db, other = await Database.open(database, connections=1), await asyncpg.connect(database)
    try:
        async with other.transaction():
            await other.execute("lock table indexer.repo")
            waiting = asyncio.create_task(db.repos.load([DID]))
            await until(lambda: other.fetchval("select exists (select from pg_locks where not granted)"))
            waiting.cancel()
            await asyncio.wait([waiting])
            assert waiting.cancelled()
            # The statement has ended in Postgres, too, although the lock is still held.
            await until(lambda: other.fetchval("select not exists (select from pg_locks where not granted)"))
        held = asyncio.Event()
        holder = asyncio.create_task(hold_connection(db, held, asyncio.Event()))
        await held.wait()
        assert await open_transactions(other) == 1
        holder.cancel()
        await asyncio.wait([holder])
        assert await open_transactions(other) == 0
        assert await db.repos.load([DID]) == {}
    finally:
        await other.close()
        await db.close()


@pytest.mark.slow
async def test_a_time_limit_in_a_resync_leaves_no_statement_behind(database: str) -> None:
    """The connection is closed, because Postgres may receive the cancellation when the next statement runs."""
    db, other = await Database.open(database, connections=1), await asyncpg.connect(database)
    try:
        claimed = await in_progress(db, 1)
        [before] = await sessions(other)
        async with other.transaction():
            await other.execute("lock table indexer.record")
            with pytest.raises(DatabaseError):
                async with db.resyncs.transaction(claimed) as transaction, asyncio.timeout(0.2):
                    await transaction.write([put("app.test/a")], "export")
            await until(lambda: other.fetchval("select not exists (select from pg_locks where not granted)"))

        async def is_closed() -> bool:
            return before not in await sessions(other)

        await until(is_closed)
        assert (await db.repos.load([claimed.did]))[claimed.did].lease == claimed.lease
    finally:
        await other.close()
        await db.close()


async def sessions(connection: asyncpg.Connection) -> list[int]:
    """Return the process IDs of the sessions of the pool."""
    rows = await connection.fetch(
        "select pid from pg_stat_activity where datname = current_database() and application_name = 'indexer'"
    )
    return [pid for (pid,) in rows]


async def open_transactions(connection: asyncpg.Connection) -> int:
    """Return the number of transactions that other sessions of the database have left open."""
    count: int = await connection.fetchval(
        "select count(*) from pg_stat_activity"
        " where datname = current_database() and state like 'idle in transaction%' and pid <> pg_backend_pid()"
    )
    return count
