"""A repo's records as they are stored: in the order of the tree, of one moment, and nothing but read."""

import asyncpg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.store import DatabaseError, Store, StoredRecord
from indexer.store import records as records_module
from indexer.store.records import in_path_order
from indexer.sync.plan import Batch, RecordChange, RepoWrite
from tests.store.rows import delete, did, head, insert, put, synchronized

NAMES = st.lists(st.text("ab.-", min_size=1, max_size=4), unique=True, max_size=12)


@given(NAMES)
def test_ranges_of_collections_are_in_path_order(names: list[str]) -> None:
    names = sorted(names)
    ranges = in_path_order(names)
    read = [name for first, last in ranges for name in names if first <= name <= last]
    assert read == sorted(names, key=lambda name: f"{name}/")
    assert len(ranges) <= 1 or read != names


async def test_a_reading_is_of_one_moment_and_chunk_by_chunk(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repo and records are those of before, whatever is written meanwhile."""
    monkeypatch.setattr(records_module, "AT_ONCE", 2)
    names = [f"{collection}/{rkey}" for collection in ("a.b", "a.b-x", "a.b.c") for rkey in "Aa~"]
    await insert(store, synchronized(1), changes=tuple(map(put, names)))
    later = synchronized(1, version=2, head=head("3lbbbbbbbbb22"))
    changes = (delete("a.b-x/~"), put("a.b/a", "[]", "update"), put("a.b/new"))
    async with store.reading(did(1)) as reading:
        assert await reading.repo() == synchronized(1)
        chunks: list[list[StoredRecord]] = []
        async for chunk in reading.records():
            if not chunks:
                assert not await store.apply(Batch((RepoWrite(1, later, changes),)))
            chunks.append(chunk)
        assert await reading.repo() == synchronized(1)
    assert [len(chunk) for chunk in chunks] == [2, 2, 2, 2, 1]
    expected = [StoredRecord(path.encode(), put(path).cid or b"", "{}", None, None) for path in names]
    assert [record for chunk in chunks for record in chunk] == sorted(expected)
    assert (await store.repos([did(1)]))[did(1)] == later


async def test_a_reading_gives_all_columns_of_a_record(store: Store) -> None:
    odd = RecordChange("create", "a.b", "odd", head().rev, put("a.b/odd").cid, None, "nul-character", b"\0")
    await insert(store, synchronized(1), changes=(odd, put("a.b/value", '{"b":1e2,"a":null}')))
    async with store.reading(did(1)) as reading:
        [[first, second]] = [chunk async for chunk in reading.records()]
    assert first == StoredRecord(b"a.b/odd", odd.cid or b"", None, "nul-character", b"\0")
    assert second[2:] == ('{"a": null, "b": 100}', None, None)


async def test_a_repo_that_is_not_there(store: Store) -> None:
    async with store.reading(did(1)) as reading:
        assert await reading.repo() is None
        assert [chunk async for chunk in reading.records()] == []


async def test_a_reading_cannot_write(store: Store) -> None:
    await insert(store, synchronized(1))
    async with store.reading(did(1)) as reading:
        with pytest.raises(asyncpg.ReadOnlySQLTransactionError):
            await reading._connection.execute("update indexer.repo set takedown = true")
    assert await store.takedown(did(1), on=True), "the connection is as it was"


async def test_a_store_for_reading_cannot_write(store: Store, database: str) -> None:
    await insert(store, synchronized(1))
    reader = await Store.open(database, connections=1, readonly=True)
    try:
        for writes in (reader.takedown(did(1), on=True), reader.add([did(2)]), reader.save_hosts([])):
            with pytest.raises(DatabaseError, match="read-only"):
                await writes
        assert await reader.repos([did(1), did(2)]) == {did(1): synchronized(1)}
    finally:
        await reader.close()
