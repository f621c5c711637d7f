"""A small AppView: posts, newest first, with how many replies and likes each has (docs/appview-tutorial.md).

    python examples/appview.py DATABASE_URL follow     # builds its schema, then keeps up until interrupted
    python examples/appview.py DATABASE_URL show       # the newest posts

It keeps what it needs in a schema of its own, `board`, beside the indexer's. Stop it, kill it, start it again: its rows
and its place in the feed are one transaction, so it goes on exactly where it was.
"""

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import suppress

import asyncpg

READER = "board"
POST, LIKE = "app.bsky.feed.post", "app.bsky.feed.like"
PAGE = 1_000
PATIENCE = 60.0  # seconds after which we look without having been told to

SCHEMA = """
    create schema board;

    -- The records that we care about, as they are.
    create table board.record (
        did text collate "C" not null,
        collection text collate "C" not null,
        rkey text collate "C" not null,
        uri text collate "C" not null,
        value jsonb,
        indexed_at timestamptz not null,
        primary key (did, collection, rkey)
    );

    -- What they point at: indexes on expressions, which the counts below use.
    create index record_replies on board.record ((value #>> '{reply,parent,uri}'))
        where collection = 'app.bsky.feed.post';
    create index record_likes on board.record ((value #>> '{subject,uri}'))
        where collection = 'app.bsky.feed.like';
    create index record_newest on board.record (indexed_at desc, uri)
        where collection = 'app.bsky.feed.post';

    -- Records are what their authors' programs made of them: text, until you have checked that it is something else.
    create view board.post as
    select p.uri, p.did, p.value ->> 'text' as text, p.value ->> 'createdAt' as created_at,
        p.value #>> '{reply,parent,uri}' as reply_to, p.indexed_at,
        (select count(*) from board.record r
         where r.collection = 'app.bsky.feed.post' and r.value #>> '{reply,parent,uri}' = p.uri) as replies,
        (select count(*) from board.record l
         where l.collection = 'app.bsky.feed.like' and l.value #>> '{subject,uri}' = p.uri) as likes
    from board.record p where p.collection = 'app.bsky.feed.post';
"""

TAKE = """
    insert into board.record (did, collection, rkey, uri, value, indexed_at)
    select r.did, r.collection, r.rkey, r.uri, r.value, r.indexed_at from atproto.records r
"""
TAKE_ALL = f"{TAKE} where r.collection = any($1::text[])"

# What has changed is replaced by what is there now: the feed says where to look, the records are the truth.
DROP_RECORDS = """
    delete from board.record b using unnest($1::text[], $2::text[], $3::text[]) as k(did, collection, rkey)
    where b.did = k.did and b.collection = k.collection and b.rkey = k.rkey
"""
TAKE_RECORDS = f"""
    {TAKE} join unnest($1::text[], $2::text[], $3::text[]) as k(did, collection, rkey) using (did, collection, rkey)
"""
DROP_REPOS = "delete from board.record where did = any($1::text[])"
TAKE_REPOS = f"{TAKE} where r.did = any($1::text[]) and r.collection = any($2::text[])"


async def build(connection: asyncpg.Connection) -> None:
    """The schema, our place in the feed, and all there is so far, as of one moment: whole or not at all."""
    if await connection.fetchval("select to_regnamespace('board') is not null"):
        return
    async with connection.transaction(isolation="repeatable_read"):
        await connection.execute("set local statement_timeout = 0")
        await connection.execute(SCHEMA)
        await connection.execute("select atproto.register_reader($1)", READER)
        await connection.execute(TAKE_ALL, [POST, LIKE])


async def digest(connection: asyncpg.Connection) -> int:
    """One page of the feed: what we were told, what we made of it, and our place are one transaction."""
    async with connection.transaction():
        changes = await connection.fetch("select * from atproto.next_changes($1, $2)", READER, PAGE)
        await apply(connection, changes)
    return len(changes)


async def apply(connection: asyncpg.Connection, changes: Sequence[asyncpg.Record]) -> None:
    repos = sorted({c["did"] for c in changes if c["action"] in ("hidden", "visible", "deleted")})
    keys = {(c["did"], c["collection"], c["rkey"]) for c in changes if c["collection"] in (POST, LIKE)}
    records = sorted(key for key in keys if key[0] not in repos)
    if repos:
        await connection.execute(DROP_REPOS, repos)
        await connection.execute(TAKE_REPOS, repos, [POST, LIKE])
    if records:
        columns = [list(column) for column in zip(*records, strict=True)]
        await connection.execute(DROP_RECORDS, *columns)
        await connection.execute(TAKE_RECORDS, *columns)


async def follow(dsn: str) -> None:
    """Keeps up until cancelled."""
    connection = await asyncpg.connect(dsn)
    told = asyncio.Event()
    try:
        await build(connection)
        # Listen first, then read to the end: so what comes in between is not missed.
        await connection.add_listener("atproto_changes", lambda *_: told.set())
        while True:
            told.clear()
            while await digest(connection) == PAGE:
                pass
            with suppress(TimeoutError):
                await asyncio.wait_for(told.wait(), PATIENCE)
    finally:
        await connection.close()


async def show(dsn: str, count: int = 20) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        for post in await connection.fetch("select * from board.post order by indexed_at desc, uri limit $1", count):
            print(f"{post['likes']:4} likes {post['replies']:4} replies  {ascii(post['text'])[:80]}")  # noqa: T201
    finally:
        await connection.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Posts with replies and likes, from the change feed.")
    parser.add_argument("database", help="postgresql://… of the indexer's database")
    parser.add_argument("what", choices=["follow", "show"])
    arguments = parser.parse_args()
    with suppress(KeyboardInterrupt):
        asyncio.run((follow if arguments.what == "follow" else show)(arguments.database))
