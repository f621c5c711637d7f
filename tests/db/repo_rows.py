"""Repos and record changes for the tests of the database."""

from hashlib import sha256
from typing import Any

import asyncpg

from indexer.atproto.cid import cid_of
from indexer.db import Database
from indexer.sync.changes import Action, Batch, BufferedEvent, RecordChange, RepoWrite
from indexer.sync.repo import Head, Repo, SyncStatus


def did(name: object) -> str:
    return f"did:plc:{sha256(str(name).encode()).hexdigest()[:24]}"


def head(rev: str = "3laaaaaaaaa22") -> Head:
    return Head(rev, cid_of(f"data {rev}".encode()), cid_of(f"commit {rev}".encode()))


def synchronized(name: object, **fields: Any) -> Repo:
    return Repo(
        did(name),
        version=1,
        sync_status=SyncStatus.SYNCHRONIZED,
        sync_reason=None,
        head=head(),
        synchronized_at=1.5,
    )._replace(**fields)


def completed(repo: Repo) -> Repo:
    """Return the next row of a repo whose resync is completed."""
    return repo._replace(
        version=repo.version + 1, sync_status=SyncStatus.SYNCHRONIZED, sync_reason=None, head=head("3lbbbbbbbbb22"),
        synchronized_at=1.5,
    )  # fmt: skip


def put(path: str, text: str = "{}", action: Action = "create", rev: str = "3laaaaaaaaa22") -> RecordChange:
    collection, rkey = path.split("/")
    return RecordChange(action, collection, rkey, rev, cid_of(text.encode()), text)


def delete(path: str, rev: str = "3laaaaaaaaa22") -> RecordChange:
    collection, rkey = path.split("/")
    return RecordChange("delete", collection, rkey, rev)


async def insert(db: Database, *repos: Repo, changes: tuple[RecordChange, ...] = ()) -> None:
    """Insert repos, each with these record changes."""
    assert not (await db.write(Batch(tuple(RepoWrite(Repo(repo.did), repo, changes) for repo in repos)))).skipped


async def buffer_event(db: Database, claimed: Repo, *changes: RecordChange) -> Repo:
    """Store a buffered event of a repo in progress, as the live path does; return the row."""
    buffering = claimed._replace(version=claimed.version + 1, buffered_events=1, buffered_bytes=5)
    event = BufferedEvent(claimed.did, "wss://relay.test", 5, b"frame")
    assert not (await db.write(Batch((RepoWrite(claimed, buffering, changes, (event,)),)))).skipped
    return buffering


async def waiting_for_locks(sql: asyncpg.Connection, count: int) -> bool:
    """Return True if exactly `count` connections wait for locks. `sql` must not be in a transaction."""
    query = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    waiting: int = await sql.fetchval(query)
    return waiting == count


async def in_progress(db: Database, name: object, *, now: float = 100.0, **fields: Any) -> Repo:
    """Insert a repo with the head of `synchronized`, and claim it at `now` for ten seconds."""
    await insert(db, synchronized(name)._replace(sync_status=SyncStatus.DESYNCHRONIZED, **fields))
    claimed = await db.resyncs.claim(1, range(256), 10.0, now)
    assert [repo.did for repo in claimed] == [did(name)]
    return claimed[0]
