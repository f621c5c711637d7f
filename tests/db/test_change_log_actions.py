"""The entries of the change log say what happened to the stored records, whatever commits and resyncs say."""

from collections.abc import Iterable, Iterator
from typing import Any
from unittest.mock import patch

import asyncpg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from indexer.db import Database, repos, resync_transaction
from indexer.sync.changes import Batch, RecordChange, RepoWrite
from indexer.sync.repo import Repo, SyncStatus
from indexer.sync.resync import Difference, SnapshotDiff
from tests.database_checks import assert_log_gives_records
from tests.db.repo_rows import delete, did, insert, put, synchronized
from tests.profiles import scaled

PATHS = ["a.b/x", "a.b.c/x", "a.b/y", "a.b-x/z", "d.e/self"]
TEXTS = ['"one"', '"two"']
CHANGES = st.lists(
    st.one_of(
        st.builds(put, st.sampled_from(PATHS), st.sampled_from(TEXTS), st.sampled_from(["create", "update"])),
        st.builds(delete, st.sampled_from(PATHS)),
    ),
    max_size=6,
)
NUMBERS = st.integers(0, 1)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("live"), CHANGES, CHANGES, st.booleans()),
        st.tuples(st.just("resync"), NUMBERS, st.dictionaries(st.sampled_from(PATHS), st.sampled_from(TEXTS)), CHANGES),
        st.tuples(st.just("erase"), NUMBERS),
    ),
    max_size=8,
)
LOG = "select action, rkey from atproto.changes where did = $1 and rkey is not null order by seq"


@pytest.mark.slow
@settings(max_examples=scaled(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, min_copied=st.sampled_from([1, 50]))
async def test_applying_the_log_gives_the_records_after_any_changes(
    db: Database, sql: asyncpg.Connection, steps: list[tuple[Any, ...]], min_copied: int
) -> None:
    """The changes do not know what is stored: all of them may create, update or delete any record."""
    await sql.execute("truncate indexer.repo, indexer.record, indexer.change, indexer.change_batch")
    with patch("indexer.db.write.MIN_COPIED", min_copied), patch.object(resync_transaction, "CHUNK_SIZE", 2):
        await Scenario(db, sql).play(steps)


class Scenario:
    """Executes steps on two repos, and on a dictionary of their records."""

    def __init__(self, db: Database, sql: asyncpg.Connection) -> None:
        self.db = db
        self.sql = sql
        self.repos = [Repo(did(number)) for number in range(2)]
        self.records: dict[tuple[str, str], bytes | None] = {}

    async def play(self, steps: Iterable[tuple[Any, ...]]) -> None:
        for name, *arguments in steps:
            await getattr(self, name)(*arguments)
            await assert_log_gives_records(self.sql)
            rows = await self.sql.fetch("select did, collection || '/' || rkey, cid from indexer.record")
            assert {(owner, path): cid for owner, path, cid in rows} == self.records

    async def live(self, first: list[RecordChange], second: list[RecordChange], hidden: bool) -> None:
        """Write one batch with changes of both repos."""
        writes = [self.next_write(0, first, takedown=hidden), self.next_write(1, second)]
        assert not (await self.db.write(Batch(tuple(writes)))).skipped

    async def resync(self, number: int, snapshot: dict[str, str], drained: list[RecordChange]) -> None:
        """Replace the records of a repo by those of a snapshot, then apply the changes of buffered events."""
        waiting = self.next_write(number, [], sync_status=SyncStatus.DESYNCHRONIZED)
        assert not (await self.db.write(Batch((waiting,)))).skipped
        [self.repos[number]] = [claimed] = await self.db.resyncs.claim(1, range(256), 10.0, 100.0)
        fetched = {path.encode(): put(path, text) for path, text in snapshot.items()}
        diff = SnapshotDiff(iter(sorted((path, change.cid or b"") for path, change in fetched.items())))
        async with self.db.resyncs.transaction(claimed) as transaction:
            async for chunk in transaction.stored():
                await transaction.write(list(changes_of(diff.compare(chunk), fetched)), "export")
            await transaction.write(list(changes_of(diff.remaining(), fetched)), "export")
            assert await transaction.lock() == claimed
            self.records = {key: cid for key, cid in self.records.items() if key[0] != claimed.did}
            self.change(number, fetched.values())
            await transaction.finish(Batch((self.next_write(number, drained),)))

    async def erase(self, number: int) -> None:
        """Erase the records of a deleted account, two at a time."""
        gone = self.next_write(number, [], active=False, hosting_status="deleted", erase_at=1.0)
        assert not (await self.db.write(Batch((gone,)))).skipped
        with patch.object(repos, "ERASED_RECORDS", 2):
            while await self.db.repos.erase_batch(range(256), 10.0):
                await assert_log_gives_records(self.sql)
        self.records = {key: cid for key, cid in self.records.items() if key[0] != gone.repo.did}
        self.repos[number] = (await self.db.repos.load([gone.repo.did]))[gone.repo.did]

    def next_write(self, number: int, changes: list[RecordChange], **fields: Any) -> RepoWrite:
        """Return a write of the repo's next version, and apply the changes to the dictionary."""
        before = self.repos[number]
        self.repos[number] = synchronized(number, version=before.version + 1, lease=before.lease, **fields)
        self.change(number, changes)
        return RepoWrite(before, self.repos[number], tuple(changes))

    def change(self, number: int, changes: Iterable[RecordChange]) -> None:
        for change in changes:
            key = did(number), f"{change.collection}/{change.rkey}"
            if change.action == "delete":
                self.records.pop(key, None)
            else:
                self.records[key] = change.cid


def changes_of(differences: Iterator[Difference], fetched: dict[bytes, RecordChange]) -> Iterator[RecordChange]:
    for path, old, new in differences:
        if new is None:
            yield delete(path.decode())
        else:
            yield fetched[path]._replace(action="create" if old is None else "update")


async def test_several_changes_of_a_record_in_one_batch_are_logged_in_order(
    db: Database, sql: asyncpg.Connection
) -> None:
    await insert(db, synchronized(1), changes=(put("app.test/a", "1"),))
    update, create = put("app.test/a", "2", "update"), put("app.test/a", "3")
    changes = (delete("app.test/a"), update, create, delete("app.test/a"), delete("app.test/a"), update)
    assert not (await db.write(Batch((RepoWrite(synchronized(1), synchronized(1, version=2), changes),)))).skipped
    logged = [action for action, _ in await sql.fetch(LOG, did(1))]
    assert logged == ["create", "delete", "create", "update", "delete", "create"]
