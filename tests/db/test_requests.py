"""Wait for a rev in SQL, and request a record: what each call does to the row, and what it refuses."""

import asyncio
from time import time
from typing import Any

import asyncpg
import pytest

from indexer.atproto.syntax import CollectionFilter, tid_of
from indexer.db import Database
from indexer.reasons import Desync, FetchFailure
from indexer.sync.backoff import backoff_seconds
from indexer.sync.changes import Batch, RepoWrite
from indexer.sync.repo import NEWS, PARKED, Repo, SyncStatus, Trigger, amend, move
from indexer.sync.scope import Scope
from tests.db.change_log_helpers import connected
from tests.db.repo_rows import did, head, in_progress, insert, synchronized, waiting_for_locks
from tests.waiting import until

pytestmark = pytest.mark.slow

STORED, NEWER, NEWEST = "3laaaaaaaaa22", "3lbbbbbbbbb22", "3lccccccccc22"
NOTE = "com.example.note"
URI = f"at://{did(1)}/{NOTE}/a"
WAIT = "select reached, stored_rev from atproto.wait_for($1, $2, make_interval(secs => $3))"
REQUEST = "select atproto.request_record($1, $2)"


@pytest.fixture
async def scope(db: Database) -> Scope:
    return await db.scope.begin(Scope(collections=CollectionFilter([NOTE, "com.other.*"])))


async def row(db: Database) -> Repo:
    [repo] = (await db.repos.load([did(1)])).values()
    return repo


async def waited(sql: asyncpg.Connection, account: str, rev: str, seconds: float = 0.0) -> tuple[Any, ...]:
    [found] = await sql.fetch(WAIT, account, rev, seconds)
    return tuple(found)


async def put_row(db: Database, sql: asyncpg.Connection, **fields: Any) -> Repo:
    """Store the row of a repo with these fields, as if it was written an hour ago."""
    await sql.execute("truncate indexer.repo")
    await insert(db, synchronized(1, **fields))
    await sql.execute("update indexer.repo set updated_at = now() - interval '59 minutes'")
    return await row(db)


def waiting(reason: Desync, **fields: Any) -> dict[str, Any]:
    return {"sync_status": SyncStatus.DESYNCHRONIZED, "sync_reason": reason} | fields


@pytest.mark.parametrize("reason", [None, *Desync])
async def test_rev_is_reached_if_the_shown_records_are_those_of_the_rev(
    db: Database, sql: asyncpg.Connection, reason: Desync | None
) -> None:
    """The views in SQL and `Repo.shows` say the same."""
    shown = reason is None or reason in {*NEWS, Desync.WITHHELD}
    repo = await put_row(db, sql, **({} if reason is None else waiting(reason)))
    for rev in (STORED, NEWER):
        expected = shown and rev == STORED
        assert await waited(sql, did(1), rev) == (expected, STORED)
        assert repo.shows(rev) is expected
    for hidden in ({"takedown": True}, {"active": False}):
        repo = await put_row(db, sql, **hidden)
        assert await waited(sql, did(1), STORED) == (False, None)
        assert not repo.shows(STORED)
    assert await waited(sql, did(2), STORED) == (False, None)


async def test_waiting_ends_with_the_commit_and_holds_no_lock(
    db: Database, database: str, sql: asyncpg.Connection
) -> None:
    """The account is added, and writes twice, while a role that may only read waits. A migration need not wait."""
    async with connected(database) as reader:
        await reader.execute("set session authorization atproto_reader")
        wait = asyncio.create_task(waited(reader, did(1), NEWER, 30.0))
        await insert(db, synchronized(1))
        await insert(db, synchronized(2, head=head(NEWER)))
        async with sql.transaction():
            await sql.execute("set local lock_timeout = '20s'")
            for _ in range(5):
                await sql.execute("lock table indexer.repo in access exclusive mode")
                await sql.execute("select pg_sleep(0.01)")
        assert not wait.done()
        before = await row(db)
        await db.write(Batch((RepoWrite(before, amend(before, head=head(NEWEST))),)))
        assert await wait == (True, NEWEST)
        held = "select count(*) from pg_locks where pid = $1 and relation = 'indexer.repo'::regclass"
        async with reader.transaction():
            await reader.fetchrow(WAIT, did(1), STORED, 0.0)
            assert await sql.fetchval(held, reader.get_server_pid()) == 0


async def test_waiting_is_refused_where_it_would_wait_in_vain_or_too_long(sql: asyncpg.Connection) -> None:
    for seconds in (-1.0, 31.0):
        with pytest.raises(asyncpg.InvalidParameterValueError, match="not between 0 and 30 seconds"):
            await sql.fetchrow(WAIT, did(1), STORED, seconds)
    for isolation in ("repeatable_read", "serializable"):
        async with sql.transaction(isolation=isolation):
            with pytest.raises(asyncpg.InvalidTransactionStateError, match="read committed"):
                await sql.fetchrow(WAIT, did(1), STORED, 1.0)
    async with sql.transaction():
        await sql.execute("create temporary table own (a int)")
        with pytest.raises(asyncpg.InvalidTransactionStateError, match="commit it first"):
            await sql.fetchrow(WAIT, did(1), STORED, 1.0)
    async with sql.transaction():
        await sql.execute("set local statement_timeout = '50ms'")
        with pytest.raises(asyncpg.QueryCanceledError):
            await sql.fetchrow(WAIT, did(1), STORED, 30.0)


@pytest.mark.usefixtures("scope")
async def test_request_makes_a_synchronized_repo_due_as_a_hint_does(db: Database, sql: asyncpg.Connection) -> None:
    before = await put_row(db, sql, latest_unverified_rev=STORED)
    for rev in (NEWER, None):
        assert await sql.fetchval(REQUEST, URI, rev)
        hinted = {"sync_reason": Desync.HINTED, "attempts": 1, "latest_unverified_rev": rev or STORED}
        assert await row(db) == move(before, Trigger.HINTED, **hinted)
        before = await put_row(db, sql, latest_unverified_rev=STORED)
    assert not await sql.fetchval(REQUEST, URI, STORED)
    assert await row(db) == before, "the rev is stored"


@pytest.mark.usefixtures("scope")
async def test_request_only_notes_the_rev_of_a_repo_that_is_fetched_or_waits(
    db: Database, sql: asyncpg.Connection
) -> None:
    """The end of the resync compares the rev with what was fetched."""
    claimed = await in_progress(db, 1, sync_reason=Desync.HINTED, attempts=1)
    assert not await sql.fetchval(REQUEST, URI, None), "the resync may have read the repo before"
    assert await row(db) == claimed
    assert await sql.fetchval(REQUEST, URI, NEWEST)
    assert await row(db) == (noted := amend(claimed, latest_unverified_rev=NEWEST))
    for rev in (NEWER, None, NEWEST):
        assert await sql.fetchval(REQUEST, URI, rev) is (rev == NEWEST)
    assert await row(db) == noted
    before = await put_row(db, sql, **waiting(Desync.CHAIN_BREAK), next_attempt_at=1.0)
    assert await sql.fetchval(REQUEST, URI, NEWER)
    assert await sql.fetchval(REQUEST, URI, None)
    assert await row(db) == amend(before, latest_unverified_rev=NEWER)
    failed = {"attempts": 3, "last_failure": FetchFailure.TIMEOUT, "last_error": "timeout"}
    before = await put_row(db, sql, **waiting(Desync.CHAIN_BREAK, **failed), next_attempt_at=4e9)
    assert not await sql.fetchval(REQUEST, URI, NEWER)
    assert await row(db) == before


@pytest.mark.usefixtures("scope")
async def test_request_locks_a_repo_only_to_change_it(db: Database, database: str, sql: asyncpg.Connection) -> None:
    """A row that another session has changed meanwhile stays as it is."""
    locks = "select from indexer.repo for update nowait"
    rows: list[tuple[dict[str, Any], str | None]] = [
        ({}, STORED), ({"attempts": 60}, None), (waiting(Desync.CHAIN_BREAK, next_attempt_at=4e9), NEWER),
    ]  # fmt: skip
    async with connected(database) as other, connected(database) as watching:
        for fields, rev in rows:
            await put_row(db, sql, **fields)
            async with other.transaction():
                assert not await other.fetchval(REQUEST, URI, rev)
                await sql.execute(locks)
        before = await put_row(db, sql)
        async with sql.transaction():
            await sql.execute("update indexer.repo set version = version + 1")
            refused = asyncio.create_task(other.fetchval(REQUEST, URI, NEWER))
            await until(lambda: waiting_for_locks(watching, 1))
        assert not await refused
        assert await row(db) == amend(before)


@pytest.mark.usefixtures("scope")
async def test_parked_and_synchronized_repos_wait_for_their_back_off(db: Database, sql: asyncpg.Connection) -> None:
    """Meanwhile, a synchronized repo stays synchronized, so that it misses no commit of the stream."""
    rows: list[dict[str, Any]] = [{}, waiting(Desync.WITHHELD, next_attempt_at=PARKED)]
    for fields in rows:
        for attempts in (1, 2, 5, 9, 60):
            before = await put_row(db, sql, attempts=attempts, **fields)
            wait = backoff_seconds(attempts, did(1))
            for passed in (wait - 5, wait + 5):
                await sql.execute("update indexer.repo set updated_at = now() - make_interval(secs => $1)", passed)
                assert await sql.fetchval(REQUEST, URI, NEWER) is (passed > wait)
                after = await row(db)
                assert (after == before) is (passed < wait)
            assert (after.attempts, after.next_attempt_at) == (1 if wait > 3_600 else attempts + 1, None)
            assert after.sync_reason is (fields.get("sync_reason") or Desync.HINTED)


@pytest.mark.usefixtures("scope")
async def test_request_that_nothing_can_answer_is_an_error(db: Database, sql: asyncpg.Connection) -> None:
    await insert(db, synchronized(1))
    for uri, message in (
        (None, "null is not the AT-URI"), ("", "'' is not the AT-URI"), (f"at://alice.test/{NOTE}/a", "with a DID"),
        (f"at://{did(1)}/{NOTE}", "AT-URI"), (f"{URI}/b", "AT-URI"), (f"{URI}#b", "AT-URI"),
        (f"at://{did(1)}/{NOTE}/..", "AT-URI"), (f"{URI}{'a' * 512}", "AT-URI"), (f"at://{did(1)}/com.*/a", "AT-URI"),
        (f"at://did:x/{NOTE}/a", "not a DID"),
        (f"at://{did(1)}/note/a", "'note' is neither an NSID"),
    ):  # fmt: skip
        with pytest.raises(asyncpg.InvalidParameterValueError, match=message):
            await sql.fetchval(REQUEST, uri, None)
    for rev in ("", "now", "zzzzzzzzzzzzz", f"{NEWER}a"):
        with pytest.raises(asyncpg.InvalidParameterValueError, match="not a rev"):
            await sql.fetchval(REQUEST, URI, rev)
    for seconds in (290, 310):
        rev = tid_of(int((time() + seconds) * 1_000_000), 1023)
        if seconds > 300:
            with pytest.raises(asyncpg.InvalidParameterValueError, match="in the future"):
                await sql.fetchval(REQUEST, URI, rev)
        else:
            assert await sql.fetchval(REQUEST, f"at://{did(1)}/com.other.b/a", rev)
    for target in (f"{URI}hidden", "com.other.hidden"):
        await sql.fetchval("select indexer.remove($1, 'hide', null)", target)
    for uri, message in (
        (f"at://{did(1)}/com.example.other/a", "com.example.other is not in scope"),
        (f"{URI}hidden", "redacted or hidden"),
        (f"at://{did(1)}/com.other.hidden/a", "redacted or hidden"),
        (f"at://{did(2)}/{NOTE}/a", "is not tracked"),
    ):
        with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError, match=message):
            await sql.fetchval(REQUEST, uri, None)
    for fields, message in (
        ({"tracked": False, "active": False}, "not tracked"),
        ({"active": False}, "hidden"), ({"takedown": True}, "hidden"),
    ):  # fmt: skip
        before = await put_row(db, sql, **fields)
        with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError, match=message):
            await sql.fetchval(REQUEST, URI, NEWER)
        assert await row(db) == before


@pytest.mark.usefixtures("scope")
async def test_every_process_hears_of_a_request_when_it_is_committed(db: Database, sql: asyncpg.Connection) -> None:
    await insert(db, synchronized(1))
    heard = asyncio.Queue[tuple[str, str]]()
    listening = asyncio.create_task(db.resyncs.listen(lambda *request: heard.put_nowait(request)))
    assert await heard.get() == ("", ""), "earlier ones may be lost"
    async with sql.transaction():
        await sql.fetchval(REQUEST, URI, NEWER)
        assert heard.empty()
    assert await heard.get() == (did(1), f"{NOTE}/a")
    for text in ("", did(1), "did:plc:a b", f"{did(1)} {NOTE}", f"{did(1)} {NOTE}/", f"{did(1)} note/a",
                 f"{did(1)} {NOTE}/a/b", f"did:web:{'a' * 1_000}.test {NOTE}/a", f"{did(1)} {NOTE}/b"):  # fmt: skip
        await sql.execute("select pg_notify('indexer_requests', $1)", text)
    assert await heard.get() == (did(1), f"{NOTE}/b"), "the others are not heard"
    listening.cancel()
    await asyncio.wait([listening])
