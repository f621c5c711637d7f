"""What a released migration left in a database is there after the later ones."""

from datetime import UTC, datetime, timedelta

import asyncpg
from alembic import command
from sqlalchemy import Connection, text

from indexer.atproto.cid import cid_of, cid_text
from indexer.store import Store
from indexer.store import migrate as migrate_module
from indexer.store.migrate import migrate, schema_is_current
from tests.store.following import after, connected
from tests.store.rows import did, insert, put, synchronized

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


async def migrate_to(dsn: str, revision: str) -> None:
    def upgrade(connection: Connection) -> None:
        command.upgrade(migrate_module._config(connection), revision)

    async with migrate_module._connection(dsn) as connection:
        await connection.execute(text("create schema if not exists indexer"))
        await connection.run_sync(upgrade)


async def test_changes_of_the_first_layout_keep_numbers_times_and_order(empty_database: str) -> None:
    """Two transactions whose numbers mix, with a gap."""
    await migrate_to(empty_database, "0001")
    rows = [(3, 7, "a"), (4, 8, "b"), (5, 7, "c"), (6, 7, "d"), (9, 7, "e"), (10, 9, "f")]
    async with connected(empty_database) as sql:
        await sql.executemany(
            "insert into indexer.change (seq, bucket, xid, did, collection, rkey, action, cid, rev, live, time) "
            "overriding system value values ($1, 0, $2::text::xid8, $3, 'app.test', $4, $5, $6, 'rev', $7, $8)",
            [
                (seq, str(xid), did(xid), rkey, "delete" if seq == 6 else "create", None if seq == 6 else cid_of(b"x"),
                 xid == 7, NOON + timedelta(seconds=xid))
                for seq, xid, rkey in rows
            ],
        )  # fmt: skip
        await sql.execute("create view public.mine as select seq, did, collection, time from atproto.changes")
        await migrate(empty_database)
        expected = [
            (seq, did(xid), rkey, "delete" if seq == 6 else "create", None if seq == 6 else cid_text(cid_of(b"x")),
             xid == 7, NOON + timedelta(seconds=xid))
            for seq, xid, rkey in rows
        ]  # fmt: skip
        assert [
            (r["seq"], r["did"], r["rkey"], r["action"], r["cid"], r["live"], r["time"]) for r in await after(sql)
        ] == expected
        assert [row["seq"] for row in await after(sql, 4)] == [5, 6, 9, 10]
        assert await sql.fetchval("select count(*) from public.mine") == 6
    await assert_goes_on(empty_database, 10)


async def test_an_empty_log_of_the_first_layout(empty_database: str) -> None:
    await migrate_to(empty_database, "0001")
    await migrate(empty_database)
    assert await schema_is_current(empty_database)
    await assert_goes_on(empty_database, 0)


async def assert_goes_on(dsn: str, last: int) -> None:
    store = await Store.open(dsn)
    try:
        await insert(store, synchronized("new"), changes=(put("app.test/a"),))
    finally:
        await store.close()
    sql = await asyncpg.connect(dsn)
    seqs = [row["seq"] for row in await after(sql, last)]
    await sql.close()
    assert len(seqs) == 2
    assert seqs[0] > last
