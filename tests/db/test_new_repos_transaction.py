"""Write repos of which nothing is stored: eligible repos, ready-made rows of COPY, and what prevents the commit."""

import struct
from collections.abc import Sequence
from hashlib import sha256

import asyncpg
import pytest

from indexer.atproto.record import Problem
from indexer.db import Database
from indexer.db.write import NewRepoRecords, RecordsExistError
from indexer.errors import RefusedWriteError
from indexer.sync.changes import Batch, RecordChange, RepoWrite
from indexer.sync.export import ReadyRows, RecordChunk
from indexer.sync.repo import Repo
from tests.db.repo_rows import buffer_event, completed, did, insert, put, synchronized

ALL = range(256)
SCOPE = 0
RECORDS = "select collection, rkey, cid, rev, value, value_problem, original, proof from indexer.record where did = $1"
CHANGES = """
    select collection, rkey, action, cid, rev, live from atproto.changes
    where did = $1 and rkey is not null order by seq
"""


def chunk(changes: Sequence[RecordChange]) -> RecordChunk:
    """Return a chunk that the driver encodes."""
    return RecordChunk(len(changes), 0, 100, changes)


def ready_chunk(owner: str, changes: Sequence[RecordChange]) -> RecordChunk:
    """Return the same chunk, encoded as the documentation of COPY describes it. The driver does not encode it."""
    return RecordChunk(len(changes), 0, 100, rows=ReadyRows(Chunk(owner, changes)))


class Chunk:
    def __init__(self, owner: str, changes: Sequence[RecordChange]) -> None:
        self._did = owner
        self._changes = changes

    def record_rows(self, start: int, _size: int) -> bytes:
        bucket = int16(sha256(self._did.encode()).digest()[0])
        return b"".join(
            row(
                text(self._did), text(change.collection), text(change.rkey), bucket, change.cid, text(change.rev),
                None if change.value is None else b"\x01" + change.value.encode(), text(change.problem),
                change.original, b"e",
            )
            for change in self._changes
        )[start:]  # fmt: skip

    def change_rows(self, segment: int, batch: int, first_ordinal: int) -> bytes:
        bucket = int16(sha256(self._did.encode()).digest()[0])
        return b"".join(
            row(
                int16(segment), struct.pack(">q", batch), struct.pack(">i", ordinal), bucket, b"\0", b"create",
                text(self._did), text(change.collection), text(change.rkey), text(change.rev), change.cid,
            )
            for ordinal, change in enumerate(self._changes, first_ordinal)
        )  # fmt: skip


def int16(number: int) -> bytes:
    return struct.pack(">h", number)


def text(value: str | None) -> bytes | None:
    return None if value is None else value.encode()


def row(*fields: bytes | None) -> bytes:
    return int16(len(fields)) + b"".join(
        struct.pack(">i", -1) if field is None else struct.pack(">i", len(field)) + field for field in fields
    )


async def claim_new(db: Database, *names: object) -> list[Repo]:
    """Add repos of which nothing is stored, and claim them."""
    await db.repos.add([did(name) for name in names])
    claimed = {repo.did: repo for repo in await db.resyncs.claim(len(names), ALL, 60.0, 1e10)}
    return [claimed[did(name)] for name in names]


def end(*rows: Repo) -> Batch:
    """Return the batch that ends the resyncs of these repos."""
    return Batch(tuple(RepoWrite(row, completed(row)) for row in rows))


async def write(db: Database, claimed: Sequence[Repo], parts: Sequence[NewRepoRecords], scope: int = SCOPE) -> bool:
    """Write new repos as a resync does; return True if they were committed."""
    async with db.resyncs.transaction(*claimed, scope_version=scope) as transaction:
        rows = await transaction.eligible()
        await transaction.create([part for part in parts if part.did in rows])
        return await transaction.holds_scope() and await transaction.finish(end(*rows.values()))


UNUSUAL = [
    put("app.test/a", '{"text": "naïve ☕ 🎉", "n": [1, 2.5, null, true]}'),
    put("app.test/b", "[]")._replace(problem=Problem.NOT_A_MAP),
    put("app.test/c")._replace(value=None, problem=Problem.NOT_DAG_CBOR, original=b"\x00\xff\n\\N"),
    put("app.test/d")._replace(value=None, problem=Problem.MISSING),
    put("app.test.more/self", "{}"),
]


async def test_ready_made_rows_store_the_same_as_rows_of_the_driver(db: Database, sql: asyncpg.Connection) -> None:
    claimed = await claim_new(db, "driver", "ready", "empty")
    parts = [
        NewRepoRecords(did("driver"), chunk(UNUSUAL)),
        NewRepoRecords(did("ready"), ready_chunk(did("ready"), UNUSUAL)),
    ]
    assert await write(db, claimed, parts)
    for query in (RECORDS, CHANGES):
        by_driver = [tuple(row) for row in await sql.fetch(query, did("driver"))]
        ready = [tuple(row) for row in await sql.fetch(query, did("ready"))]
        assert sorted(ready) == sorted(by_driver) if query is RECORDS else ready == by_driver
        assert len(ready) == len(UNUSUAL)
    ends = await sql.fetch("select did from atproto.changes where action = 'completed'")
    assert {row["did"] for row in ends} == {repo.did for repo in claimed}
    sizes = await sql.fetch("select size from indexer.change_batch order by id")
    assert [row["size"] for row in sizes] == [2 * len(UNUSUAL), 3], "one batch has the records of all repos"
    buckets = await sql.fetch("select bucket from indexer.record where did = $1", did("ready"))
    assert {row["bucket"] for row in buckets} == {sha256(did("ready").encode()).digest()[0]}


@pytest.mark.slow
async def test_repo_that_needs_a_transaction_of_its_own_is_not_eligible(db: Database, sql: asyncpg.Connection) -> None:
    """Records of an account that was erased only in part, a lost claim, and a buffered event."""
    stale, lost, buffered, new = claimed = await claim_new(db, "stale", "lost", "buffered", "new")
    other = synchronized("another repo")
    await insert(db, other, changes=(put("app.test/left"),))
    await sql.execute("update indexer.record set did = $1, bucket = indexer.bucket_of($1)", stale.did)
    await sql.execute("update indexer.repo set lease = lease + 1 where did = $1", lost.did)
    await buffer_event(db, buffered)
    async with db.resyncs.transaction(*claimed) as transaction:
        assert list(await transaction.eligible()) == [new.did]


async def test_nothing_is_written_if_a_row_or_the_scope_changes_before_the_end(
    db: Database, sql: asyncpg.Connection
) -> None:
    claimed = await claim_new(db, "changed", "unchanged")
    assert not await write(db, claimed[:1], [NewRepoRecords(did("changed"), chunk([put("app.test/a")]))], SCOPE + 1)
    async with db.resyncs.transaction(*claimed) as transaction:
        rows = await transaction.eligible()
        await transaction.create([NewRepoRecords(repo.did, chunk([put("app.test/a")])) for repo in claimed])
        await sql.execute("update indexer.repo set version = version + 1 where did = $1", did("changed"))
        assert not await transaction.finish(end(*rows.values()))
    assert await sql.fetchval("select count(*) from indexer.record") == 0
    assert await sql.fetchval("select count(*) from indexer.change") == 0
    assert await sql.fetchval("select count(*) from indexer.repo where sync_status = 'in-progress'") == 2


@pytest.mark.slow
@pytest.mark.parametrize("ready", [True, False])
async def test_record_that_appears_meanwhile_ends_the_transaction(
    db: Database, sql: asyncpg.Connection, *, ready: bool
) -> None:
    """It is neither lost nor doubled: the repo is compared in a transaction of its own, or its claim is lost."""
    claimed = await claim_new(db, "new")
    other = synchronized("another repo")
    await insert(db, other, changes=(put("app.test/a", '"earlier"'),))
    changes = [put("app.test/a"), put("app.test/b")]
    part = NewRepoRecords(did("new"), ready_chunk(did("new"), changes) if ready else chunk(changes))
    async with db.resyncs.transaction(*claimed) as transaction:
        await transaction.eligible()
        await sql.execute("update indexer.record set did = $1, bucket = indexer.bucket_of($1)", did("new"))
        with pytest.raises(RecordsExistError):
            await transaction.create([part])
    assert await sql.fetchval("select value from indexer.record") == '"earlier"'


@pytest.mark.slow
async def test_value_that_the_database_refuses_is_named(db: Database) -> None:
    claimed = await claim_new(db, "new")
    with pytest.raises(RefusedWriteError):
        await write(db, claimed, [NewRepoRecords(did("new"), chunk([put("app.test/a", '"\\u0000"')]))])
