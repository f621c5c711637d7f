"""Data written under an earlier version of the schema are there after a migration to the latest one."""

import re
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest

from indexer.atproto.cid import cid_of, cid_text
from indexer.store import Store
from indexer.store.migrate import migrate
from indexer.store.schema_version import FIRST_COMPATIBLE, migrations_folder, schema_is_current
from tests.store.change_log_helpers import after, connected
from tests.store.repo_rows import did, insert, put, synchronized

pytestmark = pytest.mark.slow

CONTRACTION = re.compile(
    r"\bdrop (table|column|sequence|type|view)\b|\brename\b|\bset not null\b|\balter column \S+ (set data )?type\b"
    r"|\badd column (?!.*(default|generated)).* not null",
    re.IGNORECASE,
)

EXPANDS = dict.fromkeys(("0024", "0030"), "its functions drop views of schema lexicon, which they create themselves")
"""Migrations that only seem to contract, with the reason."""

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
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


async def test_changes_of_version_0001_keep_numbers_times_and_order(empty_database: str) -> None:
    """The changes are of two transactions with interleaved numbers, and one number is missing."""
    await migrate(empty_database, "0001")
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
        await sql.execute("create view public.own as select seq, did, collection, time from atproto.changes")
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
        assert await sql.fetchval("select count(*) from public.own") == 6
    await assert_log_continues(empty_database, 10)


async def test_an_empty_change_log_of_version_0001(empty_database: str) -> None:
    await migrate(empty_database, "0001")
    await migrate(empty_database)
    assert await schema_is_current(empty_database)
    await assert_log_continues(empty_database, 0)


async def test_rows_of_version_0014_are_kept_under_their_new_names(empty_database: str) -> None:
    """Version 0015 renames tables, columns, constraints and sequences."""
    await migrate(empty_database, "0014")
    async with connected(empty_database) as sql:
        await sql.execute(VERSION_0014_ROWS)
        await sql.execute("select atproto.register_reader('one', 0)")
        await migrate(empty_database)
        assert await schema_is_current(empty_database)
        assert [tuple(row) for row in await sql.fetch(RENAMED_COLUMNS)] == [
            ("in-progress", "chain-break", "3lb", "3lc", 0, "wss://relay.test", 7, "collections", "a.b", 3, "sweep")
        ]
        assert await sql.fetchval("select max(id) from indexer.buffered_event") == 1
        assert [row["action"] for row in await sql.fetch("select * from atproto.next_changes('one', 10)")] == ["hidden"]
        assert await sql.fetchval("select atproto.request_resync($1)", did(1))
        repo = await sql.fetchrow("select sync_status, sync_reason from atproto.repos")
        assert tuple(repo or ()) == ("desynchronized", "requested")
        assert await sql.fetchval("select count(*) from indexer.buffered_event") == 0
    await assert_log_continues(empty_database, 1)


async def assert_log_continues(dsn: str, last: int) -> None:
    """Assert that new changes get higher numbers."""
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


def breaks_older_releases(migration: str) -> bool:
    """Return True if the text of a migration removes or renames what statements of an older release may use."""
    return CONTRACTION.search(migration.partition("def downgrade")[0]) is not None


def test_migration_that_breaks_older_releases_says_so() -> None:
    """docs/decisions/0011-expand-then-contract.md. Version 0015, which renamed tables, shows that the search works."""
    files = (migrations_folder() / "versions").glob("[0-9]*.py")
    texts = {path.name[:4]: path.read_text() for path in files}
    assert breaks_older_releases(texts["0015"])
    broken = [version for version, text in texts.items() if version > FIRST_COMPATIBLE and breaks_older_releases(text)]
    assert [version for version in broken if "oldest_compatible_schema" not in texts[version]] == list(EXPANDS)


def test_migrations_import_nothing_of_the_application() -> None:
    """They must work with the code of every later release."""
    files = [path for path in migrations_folder().rglob("*") if path.suffix in (".py", ".mako")]
    assert len(files) > 15
    imports = [
        line for path in files for line in path.read_text().splitlines() if line.startswith(("import ", "from "))
    ]
    assert {line.split()[1].split(".")[0] for line in imports} == {"alembic"}
