"""Likes, the background task of links, and their counts, for the tests of links."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg

from indexer.service.background.link_maintenance import LinkMaintenance
from indexer.store import RecountPosition, Store
from indexer.sync.plans import Batch, RecordChange, RepoWrite
from indexer.sync.repo_state import Repo
from indexer.sync.shard import Shard
from tests.store.repo_rows import completed, did, put

ALL = range(256)
SHARD = Shard(0, 1)
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


def maintenance(store: Store, *, wanted: bool = True) -> LinkMaintenance:
    owned = asyncio.Event()
    owned.set()
    return LinkMaintenance(store, SHARD, owned, wanted=wanted)


async def turn_on(store: Store) -> None:
    """Keep links from now on, with a complete backfill."""
    task = maintenance(store)
    while not (await store.link_state(ALL)).done:
        await task.run_once()


async def settle(store: Store) -> None:
    """Do all work of the background task."""
    for name in await store.link_recounts_due(ALL, 100):
        after: RecountPosition | None = RecountPosition()
        while after is not None:
            after = await store.recount_links(name, after, 2)
    while await store.fold_link_deltas(ALL, 3):
        pass


async def claim_again(store: Store, claimed: Repo) -> Repo:
    assert await store.request_resyncs([claimed.did])
    [again] = await store.claim(1, ALL, 10.0, 1e10)
    return again


async def finish_resync(
    store: Store,
    claimed: Repo,
    changes: tuple[RecordChange, ...],
    drained: tuple[RecordChange, ...] = (),
    before_lock: Callable[[], Awaitable[object]] | None = None,
) -> None:
    async with store.resync(claimed) as transaction:
        await transaction.write(changes)
        if before_lock is not None:
            await before_lock()
        locked = await transaction.lock()
        assert locked is not None
        await transaction.write_drained(drained)
        await transaction.finish(Batch((RepoWrite(locked.version, completed(locked), live=False),)))
