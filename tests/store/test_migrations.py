"""Data written under an earlier version of the schema are there after a migration to the latest one."""

from datetime import UTC, datetime, timedelta

import asyncpg
import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory

from indexer.atproto.cid import cid_of, cid_text
from indexer.store import Store
from indexer.store.migrate import migrate
from indexer.store.schema_version import migrations_folder, needs_upgrade, schema_state
from indexer.sync.stored_identity import HandleClaim
from tests.store.change_log_helpers import NEXT, after, connected
from tests.store.repo_rows import did, insert, put, synchronized

pytestmark = pytest.mark.slow

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
CHANGES = [(3, 7, "a"), (4, 8, "b"), (5, 7, "c"), (6, 7, "d"), (9, 7, "e"), (10, 9, "f")]
"""Numbers, transactions and record keys. The transactions are interleaved, and one number is missing."""
INSERT_CHANGE = """
    insert into indexer.change (seq, bucket, xid, did, collection, rkey, action, cid, rev, live, time)
    overriding system value values ($1, 0, $2::text::xid8, $3, 'app.test', $4, $5, $6, 'rev', $7, $8)
"""
VERSION_0006_ROWS = """
    insert into indexer.identity (did, bucket, handle, fetched_at, stale)
    values ($1, indexer.bucket_of($1), 'alice.test', now(), false)
"""
VERSION_0014_ROWS = f"""
    insert into indexer.repo (did, bucket, version, status, reason, seen_rev, heard_rev, rev, data, commit, active,
        hosting_seq, takedown, buffered_events, buffered_bytes, lease, lease_until, attempts)
    select did, indexer.bucket_of(did), 2, 'in-progress', 'chain-break', '3lb', '3lc', '3la', '', '', true,
        0, false, 1, 5, 1, now(), 0
    from (values ('{did(1)}')) d(did);
    insert into indexer.kept_event (did, bucket, relay, seq, frame)
    select did, bucket, 'wss://relay.test', 7, 'frame' from indexer.repo;
    insert into indexer.choice values ('collections', 'a.b');
    insert into indexer.host values ('pds.test', 5, 4, 3);
    insert into indexer.listing values ('sweep', 'https://relay.test', '', null, 1, 1, now());
    select indexer.log_repo_change('{did(1)}', 'hidden', '3la');
"""  # noqa: S608
RENAMED_COLUMNS = """
    select r.sync_status, r.sync_reason, r.latest_verified_rev, r.latest_unverified_rev, r.priority,
        e.relay, e.seq, s.name, s.value, h.consecutive_failures, p.purpose
    from indexer.repo r, indexer.buffered_event e, indexer.stored_setting s, indexer.host h, indexer.crawl_progress p
"""


async def upgrade(dsn: str, before: str | None, revision: str) -> None:
    """Migrate; the versions are compared without Alembic before."""
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()))
    state = await schema_state(dsn)
    assert (state.database, state.is_current) == (before, False)
    assert state.release == ScriptDirectory.from_config(config).get_current_head()
    assert await needs_upgrade(dsn)
    await migrate(dsn, revision)


async def fill_earlier_versions(dsn: str, sql: asyncpg.Connection) -> None:
    """Migrate step by step up to version 0017, and insert rows under some of the versions."""
    await upgrade(dsn, None, "0001")
    rows = [
        (seq, str(xid), did(xid), rkey, "delete" if rkey == "d" else "create", None if rkey == "d" else cid_of(b"x"),
         xid == 7, NOON + timedelta(seconds=xid))
        for seq, xid, rkey in CHANGES
    ]  # fmt: skip
    await sql.executemany(INSERT_CHANGE, rows)
    await sql.execute("create view public.own as select seq, did, collection, time from atproto.changes")
    await upgrade(dsn, "0001", "0006")
    await sql.execute(VERSION_0006_ROWS, did("handle"))
    await upgrade(dsn, "0006", "0014")
    await sql.execute(VERSION_0014_ROWS)
    await sql.execute("select atproto.register_reader('one', 10)")
    await upgrade(dsn, "0014", "0017")
    await sql.execute("select atproto.register_reader('gone', 10)")
    await sql.execute("update indexer.consumer set cut_off_at = now() where name = 'gone'")


async def test_rows_of_earlier_versions_are_kept(empty_database: str) -> None:
    """Versions change how changes are numbered, what a handle means, the names of tables, and who owns a consumer."""
    async with connected(empty_database) as sql:
        await fill_earlier_versions(empty_database, sql)
        await upgrade(empty_database, "0017", "head")
        assert not await needs_upgrade(empty_database)
        changes = await after(sql)
        assert [(r["seq"], r["did"], r["rkey"], r["cid"], r["live"], r["time"]) for r in changes[:-1]] == [
            (seq, did(xid), rkey, None if rkey == "d" else cid_text(cid_of(b"x")), xid == 7,
             NOON + timedelta(seconds=xid))
            for seq, xid, rkey in CHANGES
        ]  # fmt: skip
        assert [row["action"] for row in changes] == [*["create"] * 3, "delete", *["create"] * 2, "hidden"]
        assert [row["seq"] for row in await after(sql, 4)][:4] == [5, 6, 9, 10]
        assert await sql.fetchval("select count(*) from public.own") == 7
        assert [tuple(row) for row in await sql.fetch(RENAMED_COLUMNS)] == [
            ("in-progress", "chain-break", "3lb", "3lc", 0, "wss://relay.test", 7, "collections", "a.b", 3, "sweep")
        ]
        assert await sql.fetchval("select max(id) from indexer.buffered_event") == 1
        assert [tuple(row) for row in await sql.fetch("select name, owner from atproto.readers order by 1")] == [
            ("gone", None),
            ("one", None),
        ]
        with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError, match="'gone' was disconnected"):
            await sql.fetch(NEXT, "gone", 10)
        await sql.execute("set session authorization atproto_reader")
        assert [row["action"] for row in await sql.fetch(NEXT, "one", 10)] == ["hidden"]
        await sql.execute("set session authorization atproto_operator")
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await sql.execute("select atproto.unregister_reader('one')")
    await assert_used_as_before(empty_database, changes[-1]["seq"])


async def assert_used_as_before(dsn: str, last: int) -> None:
    """Assert that the rows can be changed, that a handle is to be verified, and that new changes get higher numbers."""
    store = await Store.open(dsn)
    try:
        assert await store.request_resyncs([did(1)]) == 1
        assert (await store.counts()).reasons == {"requested": 1}
        assert await store.did_of_handle("alice.test") is None
        assert await store.claim_handles(9, range(256), 600.0, 4e9) == [
            HandleClaim(did("handle"), "alice.test", None, 0)
        ]
        await insert(store, synchronized("new"), changes=(put("app.test/a"),))
    finally:
        await store.close()
    async with connected(dsn) as sql:
        assert await sql.fetchval("select count(*) from indexer.buffered_event") == 0
        seqs = [row["seq"] for row in await after(sql, last)]
    assert len(seqs) == 2
    assert seqs[0] > last
