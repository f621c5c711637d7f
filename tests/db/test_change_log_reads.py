"""Pages of the change log with the records that they name, and the positions of times."""

import asyncpg
import pytest

from indexer.atproto.cid import cid_text
from indexer.db import Database
from indexer.db.change_log_reads import LoggedChange, LogTrimmedError
from indexer.sync.changes import Batch, RepoWrite
from tests.db.change_log_helpers import batches, change, log
from tests.db.repo_rows import delete, insert, put, synchronized

pytestmark = pytest.mark.slow


async def test_a_time_finds_the_last_batch_before_it(db: Database, sql: asyncpg.Connection) -> None:
    assert await db.changes.find_batch(1) is None
    for size in (1, 3, 2, 1, 5, 1, 1, 4):
        await sql.execute("select nextval('indexer.change_seq')")  # a number that no change has
        await log(sql, *[change(size, number) for number in range(size)])
    found = await batches(sql)
    times = {time + offset for _, _, time in found for offset in (-1, 0, 1, 2, 10)}
    for time in times:
        expected = max((batch for batch in found if batch[2] <= time), default=None)
        assert await db.changes.find_batch(time) == expected


async def test_a_page_has_the_records_of_its_changes(db: Database) -> None:
    first, second = put("app.test/a"), put("app.test/b")
    await insert(db, synchronized(1), changes=(first, second))
    after = RepoWrite(synchronized(1), synchronized(1, version=2), (delete("app.test/a"), put("app.test/b")))
    await db.write(Batch((after,)))
    page = await db.changes.page(0, 100, 1 << 20)
    assert [(entry.action, entry.rkey) for entry in page.changes if entry.collection] == [
        ("create", "a"),
        ("create", "b"),
        ("delete", "a"),
        ("update", "b"),
    ]
    by_rkey = {page.changes[index].rkey: stored for index, stored in page.values.items()}
    assert set(by_rkey) == {"b"}, "the other one was deleted"
    assert isinstance(page.changes[0], LoggedChange)
    assert cid_text(by_rkey["b"].cid) == page.changes[-1].cid
    assert isinstance(by_rkey["b"].value, bytes)


async def test_pages_are_bounded_by_the_bytes_of_their_records(db: Database) -> None:
    values = ["{}", '{"text": "\u96e8\u96e8\u96e8"}'] * 10
    changes = tuple(put(f"app.test/{number}", value) for number, value in enumerate(values))
    await insert(db, synchronized(1), changes=changes)
    for max_bytes in (1, 30, 100, 1_000):
        position, rkeys, found = 0, list[str | None](), 0
        while (page := await db.changes.page(position, 100, max_bytes)).changes:
            sizes = [len(stored.value or b"") for stored in page.values.values()]
            assert sum(sizes[:-1]) < max_bytes
            rkeys += [entry.rkey for entry in page.changes if entry.collection]
            found += len(sizes)
            position = page.changes[-1].seq
        assert rkeys == [str(number) for number in range(20)]
        assert found == 20


async def test_a_page_of_trimmed_changes_is_an_error(db: Database, sql: asyncpg.Connection) -> None:
    await log(sql, change(1), change(2))
    await sql.execute("select setval('indexer.trimmed_seq', 2)")
    with pytest.raises(LogTrimmedError, match="changes up to 2 have been trimmed"):
        await db.changes.page(1, 100, 1_000)
    assert await db.changes.trimmed_seq() == 2
