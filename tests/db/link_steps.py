"""Likes, the reader that keeps links, and their counts, for the tests of links."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from indexer.cluster.numbering import ChangeNumbering
from indexer.db import Database
from indexer.db.links import LinkSession
from indexer.readers.links import LinkReader
from indexer.sync.changes import Batch, RecordChange, RepoWrite
from indexer.sync.repo import Repo
from indexer.telemetry.conditions import Conditions
from tests.db.repo_rows import completed, did, put

ALL = range(256)
LIKE, PATH = "app.bsky.feed.like", ".subject.uri"
CID = "bafkreibme22gw2h7y2h7tg2fhqotaqjucnbc24deqo72b6mkl2egezxhvy"


def post(name: object) -> str:
    return f"at://{did('author')}/app.bsky.feed.post/{name}"


def like(rkey: object, target: object = "one", **fields: Any) -> RecordChange:
    """Return a like of a post."""
    value = {"$type": LIKE, "subject": {"uri": post(target), "cid": CID}}
    return put(f"{LIKE}/{rkey}", json.dumps(value), **fields)


async def count(sql: asyncpg.Connection, target: object = "one") -> int | None:
    number: int | None = await sql.fetchval("select atproto.link_count($1, $2, $3)", post(target), LIKE, PATH)
    return number


async def number_changes(db: Database) -> None:
    """Assign numbers to all committed changes on a cluster, as a daemon does."""
    if not db.layout.commit_numbers:
        await ChangeNumbering(db, Conditions()).finish()


@asynccontextmanager
async def owned_links(db: Database) -> AsyncIterator[LinkSession]:
    """Own the links during the block, from the stored position on."""
    await number_changes(db)
    async with db.links.session() as session:
        assert await session.lock.claim()
        await session.begin()
        yield session


async def turn_on(db: Database) -> None:
    """Keep links from now on, with a complete backfill, up to the end of the log."""
    async with owned_links(db) as session:
        while await LinkReader.turn(session):
            pass
        assert session.done


settle = turn_on
"""Follow the change log to its end."""


async def turn_off(db: Database) -> None:
    async with db.links.session() as session:
        assert await session.lock.claim()
        await session.remove()


async def claim_again(db: Database, claimed: Repo) -> Repo:
    assert await db.repos.request_resyncs([claimed.did])
    [again] = await db.resyncs.claim(1, ALL, 10.0, 1e10)
    return again


async def finish_resync(
    db: Database,
    claimed: Repo,
    changes: tuple[RecordChange, ...],
    drained: tuple[RecordChange, ...] = (),
    before_lock: Callable[[], Awaitable[object]] | None = None,
) -> None:
    async with db.resyncs.transaction(claimed) as transaction:
        await transaction.write(changes)
        if before_lock is not None:
            await before_lock()
        locked = await transaction.lock()
        assert locked is not None
        await transaction.write(drained, live=True, buffered=True)
        await transaction.finish(Batch((RepoWrite(locked, completed(locked), live=False),)))
