"""The transaction of a resync: compare, write differences, drain the buffer, commit or roll back."""

import asyncio

import asyncpg
import pytest

from indexer.atproto.cid import cid_of
from indexer.atproto.record import Problem
from indexer.db import Database, resync_transaction
from indexer.errors import BrokenInvariantError
from indexer.sync.changes import Batch, BufferedEvent, RecordChange, RepoWrite
from indexer.sync.repo import Repo, SyncStatus
from indexer.sync.resync import without_value
from tests.db.repo_rows import completed, delete, did, in_progress, insert, put, synchronized

RELAY = "wss://relay.test"
ALL = range(256)


async def stored(db: Database, claimed: Repo) -> list[tuple[bytes, bytes]]:
    async with db.resyncs.transaction(claimed) as transaction:
        return [entry async for chunk in transaction.stored() for entry in chunk]


async def test_stored_records_come_in_path_order(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resync_transaction, "CHUNK_SIZE", 2)
    collections = ["com.example.foo", "com.example.foo-x", "com.example.foo.bar", "com.example.fo", "a.b", "z.z"]
    paths = [f"{collection}/{rkey}" for collection in collections for rkey in ("A", "B", "a", "-", "~", "3l:x")]
    await insert(db, synchronized("other"), changes=(put("com.example.foo/other"),))
    await insert(db, synchronized(1)._replace(sync_status=SyncStatus.DESYNCHRONIZED), changes=tuple(map(put, paths)))
    (claimed,) = await db.resyncs.claim(1, ALL, 10.0, 100.0)
    async with db.resyncs.transaction(claimed) as transaction:
        chunks = [chunk async for chunk in transaction.stored()]
        # An open cursor uses memory of the server until the end of the transaction.
        assert await transaction.connection.fetchval("select count(*) from pg_cursors where name <> ''") == 0
    assert max(map(len, chunks)) == 2
    assert min(map(len, chunks)) > 0
    assert [path for chunk in chunks for path, _ in chunk] == sorted(path.encode() for path in paths)


async def test_stored_record_without_its_value_differs_from_the_same_record_of_an_export(db: Database) -> None:
    """Earlier releases stored no value of a record with a U+0000."""
    lacking = put("app.test/a")._replace(value=None, problem=Problem.MISSING)
    early = put("app.test/c")._replace(value=None, problem=Problem.NUL)
    odd = put("app.test/d")._replace(problem=Problem.NUL)
    too_large = put("app.test/b")._replace(value=None, problem=Problem.TOO_LARGE)
    await insert(db, synchronized(1, sync_status=SyncStatus.DESYNCHRONIZED), changes=(lacking, too_large, early, odd))
    (claimed,) = await db.resyncs.claim(1, ALL, 10.0, 100.0)
    cid, without = cid_of(b"{}"), without_value(cid_of(b"{}"))
    found = dict(await stored(db, claimed))
    assert found == {b"app.test/a": without, b"app.test/b": cid, b"app.test/c": without, b"app.test/d": cid}


@pytest.mark.slow
async def test_a_difference_that_does_not_fit_the_stored_records_is_a_bug(db: Database) -> None:
    """If the claim is lost, it is no bug, because another worker may have changed the records."""
    repo = synchronized(1)._replace(sync_status=SyncStatus.DESYNCHRONIZED)
    await insert(db, repo, changes=(put("app.test/there"),))
    (claimed,) = await db.resyncs.claim(1, ALL, 10.0, 100.0)
    wrong = [put("app.test/there"), put("app.test/absent", action="update"), delete("app.test/absent")]
    for change in wrong:
        with pytest.raises(BrokenInvariantError, match="changed since they were compared"):
            async with db.resyncs.transaction(claimed) as transaction:
                await transaction.write([put("app.test/new"), change], "export")
    await db.resyncs.expire_leases(ALL, 200.0)
    for change in wrong:
        async with db.resyncs.transaction(claimed) as transaction:
            await transaction.write([put("app.test/new"), change], "export")
            assert await transaction.lock() is None
    assert list(await db.reports.visible_records(did(1))) == ["app.test/there"]


async def test_changes_become_visible_with_the_commit(db: Database, sql: asyncpg.Connection) -> None:
    claimed = await in_progress(db, 1)
    drained = put("app.test/b")
    async with db.resyncs.transaction(claimed) as transaction:
        await transaction.write([put("app.test/a"), put("app.test/b", '"old"')], "export")
        row = (await db.repos.load([did(1)]))[did(1)]  # an event of the stream arrives
        buffering = row._replace(version=row.version + 1, buffered_events=1)
        buffered = tuple(BufferedEvent(did(1), RELAY, seq, b"frame") for seq in (9, 8))
        assert not (await db.write(Batch((RepoWrite(row, buffering, (), buffered),)))).skipped
        assert await db.reports.visible_records(did(1)) == {}
        locked = await transaction.lock()
        assert locked == buffering
        assert [event.seq for event in await transaction.buffered()] == [9, 8]
        end = completed(buffering)
        await transaction.finish(Batch((RepoWrite(buffering, end, (drained._replace(action="update"),)),)))
        assert await db.reports.visible_records(did(1)) == {}
    assert await db.repos.load([did(1)]) == {did(1): end}
    assert await db.reports.visible_records(did(1)) == {"app.test/a": put("app.test/a").cid, "app.test/b": drained.cid}
    assert await sql.fetchval("select count(*) from indexer.buffered_event") == 0
    changes = await sql.fetch("select action, rkey, live from atproto.changes order by seq")
    assert [tuple(row) for row in changes] == [
        ("create", "a", False),
        ("create", "b", False),
        ("update", "b", True),
        ("completed", None, False),
    ]


async def test_a_block_that_raises_or_does_not_finish_writes_nothing(db: Database, sql: asyncpg.Connection) -> None:
    claimed = await in_progress(db, 1)

    class LeftBlockError(Exception):
        pass

    for finish in (False, True):
        with pytest.raises(LeftBlockError):  # noqa: PT012
            async with db.resyncs.transaction(claimed) as transaction:
                await transaction.write([put("app.test/a")], "export")
                await transaction.lock()
                if finish:
                    await transaction.finish(Batch((RepoWrite(claimed, completed(claimed)),)))
                raise LeftBlockError
    async with db.resyncs.transaction(claimed) as transaction:
        await transaction.write([put("app.test/a")], "export")
    async with db.resyncs.transaction(claimed) as transaction:
        other_version = claimed._replace(version=claimed.version - 1)
        assert not await transaction.finish(Batch((RepoWrite(other_version, claimed),)))
    assert await db.repos.load([did(1)]) == {did(1): claimed}
    assert await sql.fetchval("select count(*) from indexer.record") == 0
    assert await sql.fetchval("select count(*) from indexer.change where rkey is not null") == 0


@pytest.mark.slow
async def test_resyncs_leave_connections_to_the_live_path(db: Database) -> None:
    """With five connections, two resyncs run at the same time, and the third one waits."""
    entered: list[int] = []
    two, leave = asyncio.Event(), asyncio.Event()

    async def hold(number: int) -> None:
        async with db.resyncs.transaction(synchronized(number)):
            entered.append(number)
            if len(entered) == 2:
                two.set()
            await leave.wait()

    holding = [asyncio.create_task(hold(number)) for number in range(5)]
    await two.wait()
    await asyncio.gather(*[insert(db, synchronized(number)) for number in range(6)])
    assert len(entered) == 2
    leave.set()
    await asyncio.gather(*holding)
    assert sorted(entered) == list(range(5))


@pytest.mark.slow
async def test_a_record_with_special_characters_is_stored_unchanged(db: Database) -> None:
    claimed = await in_progress(db, 1)
    text = '{"quote": "\\"", "braces": "{a,b}", "null": null, "text": "\\\\ \\n é 🦋", "long": "' + "x" * 200_000 + '"}'
    odd = RecordChange("create", "app.test", "NULL", "3laaaaaaaaa22", put("app.test/x").cid, text)
    async with db.resyncs.transaction(claimed) as transaction:
        await transaction.write([odd], "export")
        await transaction.lock()
        await transaction.finish(Batch((RepoWrite(claimed, completed(claimed)),)))
    record = await db.reports.record(did(1), "app.test", "NULL")
    assert record is not None
    assert record["value"]["braces"] == "{a,b}"
    assert record["value"]["text"] == "\\ \n é 🦋"
    assert await stored(db, claimed) == [(b"app.test/NULL", odd.cid)]


@pytest.mark.slow
async def test_lost_claim_is_recognized_while_the_row_is_locked(db: Database, sql: asyncpg.Connection) -> None:
    """The new owner may wait for a record that this transaction has written: to wait for its lock were a deadlock."""
    repo = synchronized(1)._replace(sync_status=SyncStatus.DESYNCHRONIZED)
    await insert(db, repo)
    (claimed,) = await db.resyncs.claim(1, ALL, 10.0, 100.0)
    async with db.resyncs.transaction(claimed) as transaction:
        await transaction.write([put("app.test/new")], "export")
        await sql.execute("select atproto.request_resync($1)", repo.did)
        async with sql.transaction(), asyncio.timeout(20):
            await sql.execute("select from indexer.repo for update")
            assert await transaction.lock() is None
