"""Reads of one repo: in path order, from one snapshot, and read-only."""

import asyncio

import asyncpg
import pytest

from indexer.db import Database, DatabaseError, connections, exports, resync_transaction
from indexer.db.exports import RecordRow
from indexer.sync.changes import Batch, RecordChange, RepoWrite
from tests.db.repo_rows import delete, did, head, insert, put, synchronized


async def test_a_read_has_one_snapshot_and_yields_chunks(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes that are committed meanwhile are not visible."""
    monkeypatch.setattr(exports, "CHUNK_SIZE", 2)
    names = [f"{collection}/{rkey}" for collection in ("a.b", "a.b-x", "a.b.c") for rkey in "Aa~"]
    await insert(db, synchronized(1), changes=tuple(map(put, names)))
    later = synchronized(1, version=2, head=head("3lbbbbbbbbb22"))
    changes = (delete("a.b-x/~"), put("a.b/a", "[]", "update"), put("a.b/new"))
    async with db.exports.consistent_read(did(1)) as read:
        assert await read.repo() == synchronized(1)
        chunks: list[list[RecordRow]] = []
        async for chunk in read.records():
            if not chunks:
                assert not (await db.write(Batch((RepoWrite(synchronized(1), later, changes),)))).skipped
            chunks.append(chunk)
        assert await read.repo() == synchronized(1)
    assert [len(chunk) for chunk in chunks] == [2, 2, 2, 2, 1]
    expected = [RecordRow(path.encode(), put(path).cid or b"", "{}", None, None, "commit") for path in names]
    assert [record for chunk in chunks for record in chunk] == sorted(expected)
    assert (await db.repos.load([did(1)]))[did(1)] == later


async def test_a_read_yields_all_columns_of_a_record_and_cannot_write(db: Database) -> None:
    odd = RecordChange("create", "a.b", "odd", head().rev, put("a.b/odd").cid, None, "nul-character", b"\0")
    await insert(db, synchronized(1), changes=(odd, put("a.b/value", '{"b":1e2,"a":null}')))
    async with db.exports.consistent_read(did(1)) as read:
        [[first, second]] = [chunk async for chunk in read.records()]
        with pytest.raises(asyncpg.ReadOnlySQLTransactionError):
            await read.connection.execute("update indexer.repo set takedown = true")
    assert first == RecordRow(b"a.b/odd", odd.cid or b"", None, "nul-character", b"\0", "commit")
    assert second[2:] == ('{"a": null, "b": 100}', None, None, "commit")
    assert await db.repos.set_takedown(did(1), on=True), "the connection can write again"
    async with db.exports.consistent_read(did("unknown")) as read:
        assert await read.repo() is None
        assert [chunk async for chunk in read.records()] == []


async def test_the_sort_of_a_large_repo_has_a_time_limit_of_its_own(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert exports.SORT_TIMEOUT > connections.STATEMENT_TIMEOUT
    await insert(db, synchronized(1), changes=(put("a.b/c"),))
    for module, name in ((exports, "_RECORDS"), (resync_transaction, "_STORED")):
        statement = getattr(module, name).replace("where did", "where pg_sleep(600) is not null and did")
        monkeypatch.setattr(module, name, statement)
        monkeypatch.setattr(module, "SORT_TIMEOUT", 0.1)

    async def read_records() -> list[bytes]:
        async with db.exports.consistent_read(did(1)) as read:
            return [record.path async for chunk in read.records() for record in chunk]

    async def read_stored() -> list[bytes]:
        async with db.resyncs.transaction(synchronized(1)) as transaction:
            return [path async for chunk in transaction.stored() for path, _ in chunk]

    for read in (read_records, read_stored):
        with pytest.raises(DatabaseError):
            async with asyncio.timeout(30):
                await read()


@pytest.mark.slow
async def test_a_readonly_store_cannot_write(db: Database, database: str) -> None:
    await insert(db, synchronized(1))
    readonly = await Database.open(database, connections=1, readonly=True)
    try:
        for writes in (
            readonly.repos.set_takedown(did(1), on=True),
            readonly.repos.add([did(2)]),
            readonly.hosts.save([]),
        ):
            with pytest.raises(DatabaseError, match="read-only"):
                await writes
        assert await readonly.repos.load([did(1), did(2)]) == {did(1): synchronized(1)}
    finally:
        await readonly.close()
