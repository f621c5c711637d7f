"""Every statement that writes `sync_status` makes a transition of `TRANSITIONS`: a trigger notes each change.

A row that `move` returned is written as it is. Here are the statements that set a status themselves, and the queries
that choose the rows for `move`.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import pytest

from indexer.atproto.record import Problem
from indexer.db import Database
from indexer.reasons import Desync, FetchFailure
from indexer.sync.changes import Batch, BufferedEvent, RepoWrite
from indexer.sync.repo import CHOSEN, TRANSITIONS, Repo, SyncStatus, Trigger, amend, track_again, untrack
from indexer.sync.scope import Scope
from tests.db.change_log_helpers import connected
from tests.db.repo_rows import did, in_progress, insert, put, synchronized

ALL = range(256)
LATER = 1e10
NOTE_CHANGES = """
    create table public.status_change (before text, after text);
    create function public.note_status() returns trigger language plpgsql as $$ begin
        insert into public.status_change values (case tg_op when 'UPDATE' then old.sync_status end, new.sync_status);
        return null;
    end $$;
    create trigger note_status after insert or update of sync_status on indexer.repo
        for each row execute function public.note_status()
"""


async def request_record(db: Database) -> None:
    await db.scope.begin(Scope())
    async with connected(db.dsn) as connection:
        await connection.execute("update indexer.repo set updated_at = now() - interval '1 day'")
        await connection.fetchval(f"select atproto.request_record('at://{did(1)}/app.test.a/a')")


OPERATIONS: dict[Trigger, Callable[[Database], Awaitable[object]]] = {
    Trigger.CLAIMED: lambda db: db.resyncs.claim(9, ALL, 10.0, LATER),
    Trigger.LEASE_EXPIRED: lambda db: db.resyncs.expire_leases(ALL, LATER),
    Trigger.HINTED: request_record,
    Trigger.REQUESTED: lambda db: db.repos.request_resyncs([did(1)]),
    Trigger.ERASED: lambda db: db.scope.untrack([did(1)]),
    Trigger.VALUES_MISSING: lambda db: db.resyncs.request_missing_values(ALL, 0.0, LATER),
    Trigger.UNPROVEN: lambda db: db.resyncs.request_unproven(ALL, 0.0, LATER, 9),
}


async def repo_in(db: Database, status: SyncStatus) -> Repo:
    """Insert a repo with this status, whose records are in doubt; if it is in progress, also with a buffered event."""
    fields: dict[str, Any] = {
        "attempts": 3,
        "last_failure": FetchFailure.TIMEOUT,
        "last_error": "timeout",
        "unproven_since": 1.0,
        "withheld_since": 2.0,
        "latest_unverified_rev": "3lzzzzzzzzz22",
    }
    if status is SyncStatus.IN_PROGRESS:
        claimed = await in_progress(db, 1, sync_reason=Desync.CHAIN_BREAK, **fields)
        write = RepoWrite(claimed, amend(claimed, buffered_events=1, buffered_bytes=5))
    else:
        reason = None if status is SyncStatus.SYNCHRONIZED else Desync.CHAIN_BREAK
        row = synchronized(1, sync_status=status, sync_reason=reason, **fields)
        await insert(db, row)
        write = RepoWrite(row, amend(row))
    lacking = put("app.test/a")._replace(value=None, problem=Problem.MISSING)
    buffered = (BufferedEvent(did(1), "wss://relay.test", 5, b"frame"),) if write.repo.buffered_events else ()
    assert not (await db.write(Batch((write._replace(changes=(lacking,), buffered=buffered),)))).skipped
    return write.repo


@pytest.mark.slow
@pytest.mark.parametrize("status", SyncStatus)
async def test_each_operation_makes_the_transition_of_its_trigger(
    db: Database, sql: asyncpg.Connection, status: SyncStatus
) -> None:
    await sql.execute(NOTE_CHANGES)
    for trigger in OPERATIONS:
        await sql.execute("truncate indexer.repo, indexer.record, indexer.buffered_event")
        await check_operation(db, sql, trigger, status)


async def check_operation(db: Database, sql: asyncpg.Connection, trigger: Trigger, status: SyncStatus) -> None:
    before = await repo_in(db, status)
    await sql.execute("truncate status_change")
    await OPERATIONS[trigger](db)
    changes = [tuple(row) for row in await sql.fetch("select before, after from status_change")]
    possible = TRANSITIONS[status].get(trigger)
    assert changes == ([(status, possible[1])] if possible else []), trigger
    [after] = (await db.repos.load([did(1)])).values()
    assert after.sync_status is (possible[1] if possible else status)
    if possible and after.sync_status is SyncStatus.DESYNCHRONIZED:
        assert await sql.fetchval("select count(*) from indexer.buffered_event") == after.buffered_events == 0
        assert await sql.fetchval("select lease_until from indexer.repo") is None
    if trigger is Trigger.REQUESTED:
        assert after == amend(
            before, sync_status=after.sync_status, sync_reason=Desync.REQUESTED, attempts=0, next_attempt_at=None,
            buffered_events=0, buffered_bytes=0,
        )  # fmt: skip
    if trigger is Trigger.ERASED:
        assert after.erase_at is not None
        assert after == untrack(before, None, after.erase_at)


@pytest.mark.slow
async def test_a_repo_is_added_desynchronized_and_tracked_again_in_its_status(
    db: Database, sql: asyncpg.Connection
) -> None:
    await sql.execute(NOTE_CHANGES)
    assert await db.repos.add([did(1)]) == 1
    assert await db.scope.untrack([did(1)]) == 1
    [before] = (await db.repos.load([did(1)])).values()
    assert await db.scope.track([did(1), did(2)]) == 2
    changes = await sql.fetch("select before, after from status_change")
    assert {tuple(row) for row in changes} <= {(None, "desynchronized"), ("desynchronized", "desynchronized")}
    [after] = (await db.repos.load([did(1)])).values()
    assert after == track_again(before, CHOSEN, from_stream=False)


async def test_other_changes_of_a_sync_status_are_refused_in_tests(db: Database, sql: asyncpg.Connection) -> None:
    await insert(db, synchronized(1))
    with pytest.raises(asyncpg.RaiseError, match="a synchronized repo never becomes in-progress"):
        await sql.execute("update indexer.repo set sync_status = 'in-progress', lease_until = now()")


async def test_each_failure_can_be_stored_and_no_other_text(db: Database, sql: asyncpg.Connection) -> None:
    repos = [Repo(did(one), version=1, last_failure=one, last_error=f"{one}: x") for one in FetchFailure]
    await insert(db, *repos)
    assert await db.repos.load([repo.did for repo in repos]) == {repo.did: repo for repo in repos}
    with pytest.raises(asyncpg.CheckViolationError, match="repo_last_failure"):
        await sql.execute("update indexer.repo set last_failure = 'other'")
