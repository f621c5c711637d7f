"""A small AppView: posts, newest first, with the number of replies and likes of each (docs/appview-tutorial.md).

    python examples/appview.py DATABASE_URL follow     # create the tables, then follow the change log until interrupted
    python examples/appview.py DATABASE_URL show       # print the newest posts

The AppView stores what it needs in a schema of its own, `board`, in the database of the indexer. Its tables and its
position in the change log are updated in one transaction. So it may be stopped or killed at any time: after a restart
it continues exactly where it was.
"""

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import suppress

import asyncpg

CONSUMER = "board"
POST, LIKE = "app.bsky.feed.post", "app.bsky.feed.like"
BATCH_SIZE = 1_000
WAIT_SECONDS = 60.0  # read the change log after this time even without a notification

SCHEMA = """
    create schema board;

    -- Copies of the selected records.
    create table board.record (
        did text collate "C" not null,
        collection text collate "C" not null,
        rkey text collate "C" not null,
        uri text collate "C" not null,
        value jsonb,
        indexed_at timestamptz not null,
        primary key (did, collection, rkey)
    );

    -- Indexes on the URI that a record refers to. The counts below use them.
    create index record_replies on board.record ((value #>> '{reply,parent,uri}'))
        where collection = 'app.bsky.feed.post';
    create index record_likes on board.record ((value #>> '{subject,uri}'))
        where collection = 'app.bsky.feed.like';
    create index record_newest on board.record (indexed_at desc, uri)
        where collection = 'app.bsky.feed.post';

    -- All columns are text: a record may contain anything, so a cast could fail.
    create view board.post as
    select p.uri, p.did, p.value ->> 'text' as text, p.value ->> 'createdAt' as created_at,
        p.value #>> '{reply,parent,uri}' as reply_to, p.indexed_at,
        (select count(*) from board.record r
         where r.collection = 'app.bsky.feed.post' and r.value #>> '{reply,parent,uri}' = p.uri) as replies,
        (select count(*) from board.record l
         where l.collection = 'app.bsky.feed.like' and l.value #>> '{subject,uri}' = p.uri) as likes
    from board.record p where p.collection = 'app.bsky.feed.post';
"""

NEXT_CHANGES = "select * from atproto.next_changes($1, $2)"

INSERT = """
    insert into board.record (did, collection, rkey, uri, value, indexed_at)
    select r.did, r.collection, r.rkey, r.uri, r.value, r.indexed_at from atproto.records r
"""
INSERT_ALL = f"{INSERT} where r.collection = any($1::text[])"

# A change says which record changed; atproto.records has its current value. So delete the old copy and insert again.
DELETE_RECORDS = """
    delete from board.record b using unnest($1::text[], $2::text[], $3::text[]) as k(did, collection, rkey)
    where b.did = k.did and b.collection = k.collection and b.rkey = k.rkey
"""
INSERT_RECORDS = f"""
    {INSERT} join unnest($1::text[], $2::text[], $3::text[]) as k(did, collection, rkey) using (did, collection, rkey)
"""
DELETE_REPOS = "delete from board.record where did = any($1::text[])"
INSERT_REPOS = f"{INSERT} where r.did = any($1::text[]) and r.collection = any($2::text[])"


async def take_snapshot(connection: asyncpg.Connection) -> None:
    """Create the schema, register the consumer and copy all records, in one snapshot; do nothing if that was done."""
    if await connection.fetchval("select to_regnamespace('board') is not null"):
        return
    async with connection.transaction(isolation="repeatable_read"):
        await connection.execute("set local statement_timeout = 0")
        await connection.execute(SCHEMA)
        await connection.execute("select atproto.register_reader($1)", CONSUMER)
        await connection.execute(INSERT_ALL, [POST, LIKE])


async def process_batch(connection: asyncpg.Connection) -> int:
    """Read and apply the next changes in one transaction; return how many there were."""
    async with connection.transaction():
        changes = await connection.fetch(NEXT_CHANGES, CONSUMER, BATCH_SIZE)
        await apply(connection, changes)
    return len(changes)


async def apply(connection: asyncpg.Connection, changes: Sequence[asyncpg.Record]) -> None:
    """Replace every repo and record that changed by its current state."""
    repos = sorted({c["did"] for c in changes if c["action"] in ("hidden", "visible", "deleted")})
    keys = {(c["did"], c["collection"], c["rkey"]) for c in changes if c["collection"] in (POST, LIKE)}
    records = sorted(key for key in keys if key[0] not in repos)
    if repos:
        await connection.execute(DELETE_REPOS, repos)
        await connection.execute(INSERT_REPOS, repos, [POST, LIKE])
    if records:
        columns = [list(column) for column in zip(*records, strict=True)]
        await connection.execute(DELETE_RECORDS, *columns)
        await connection.execute(INSERT_RECORDS, *columns)


async def follow(dsn: str) -> None:
    """Apply changes as they arrive, until cancelled."""
    connection = await asyncpg.connect(dsn)
    notified = asyncio.Event()
    try:
        await take_snapshot(connection)
        # Listen before reading: a change that commits between the last read and the wait then ends the wait.
        await connection.add_listener("atproto_changes", lambda *_: notified.set())
        while True:
            notified.clear()
            while await process_batch(connection) == BATCH_SIZE:
                pass
            with suppress(TimeoutError):
                await asyncio.wait_for(notified.wait(), WAIT_SECONDS)
    finally:
        await connection.close()


async def show(dsn: str, count: int = 20) -> None:
    """Print the newest posts."""
    connection = await asyncpg.connect(dsn)
    try:
        for post in await connection.fetch("select * from board.post order by indexed_at desc, uri limit $1", count):
            print(f"{post['likes']:4} likes {post['replies']:4} replies  {ascii(post['text'])[:80]}")  # noqa: T201
    finally:
        await connection.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Show posts with replies and likes, maintained from the change log.")
    parser.add_argument("database", help="URL of the database of the indexer (postgresql://…)")
    parser.add_argument("command", choices=["follow", "show"])
    arguments = parser.parse_args()
    with suppress(KeyboardInterrupt):
        asyncio.run((follow if arguments.command == "follow" else show)(arguments.database))
