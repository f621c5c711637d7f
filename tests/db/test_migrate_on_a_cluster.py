"""`migrate` on a distributed database: what a later migration may do (docs/decisions/0011-expand-then-contract.md)."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from structlog.testing import capture_logs

from indexer.cluster import tables
from indexer.cluster.distribute import distribute
from indexer.cluster.tables import on_all_nodes
from indexer.db import Database
from indexer.db.migrate import migrate
from indexer.db.requirements import migrations_folder
from tests.citus_cluster import WORKERS
from tests.citus_server import CitusServer
from tests.database_checks import schema_is_current
from tests.database_server import dsn_of
from tests.db.change_log_helpers import connected
from tests.db.filled_tables import REPOS, fill
from tests.db.repo_rows import did, insert, put, synchronized
from tests.waiting import until

pytestmark = pytest.mark.proof("cluster")

LATER = '''
"""Change the schema in each way that a later migration may need."""

from alembic import op

revision = "9999"
down_revision = "{latest}"
branch_labels = None
depends_on = None

STATEMENTS = (
    "alter table indexer.repo add column later integer not null default 7",
    "update indexer.repo set later = 8 where not active",
    "create index record_later on indexer.record (rev) where value is null",
    "alter table indexer.identity add constraint identity_later check (handle_attempts >= 0) not valid",
    "create table indexer.later (did text, bucket smallint, note text, primary key (did, bucket))",
    "insert into indexer.later select did, bucket, 'old' from indexer.repo",
    "create table indexer.later_setting (name text primary key, value text)",
    "insert into indexer.later_setting values ('a', 'b')",
    """
    create function indexer.later_count(one text) returns bigint language plpgsql stable as $$
    begin
        return (select count(*) from indexer.later where later.did = one);
    end $$
    """,
    "create view atproto.later as select did, later from indexer.repo where active",
    """
    create or replace view atproto.gaps as
    select relay, shard, reason, opened_at, first_seq, last_seq, closed_at, closed_by, 1 as later from indexer.gap
    """,
    "comment on column indexer.repo.later is 'Later.'",
    "drop index indexer.record_collection",
)


def upgrade() -> None:
    """Apply the migration."""
    for statement in STATEMENTS:
        op.execute(statement)
'''
INDEXES = """
    select result from run_command_on_shards(
        'indexer.record', $$select count(*) from pg_index where indrelid = '%s'::regclass$$
    )
"""
SHARD_OF_NODE = """
    select format('indexer.repo_%s', min(shardid))
    from pg_dist_shard join pg_dist_placement using (shardid) join pg_dist_node using (groupid)
    where logicalrelid = 'indexer.repo'::regclass and nodeport = $1
"""
COLUMNS_ON_SHARDS = """
    select sum(result::int) from run_command_on_shards(
        'indexer.repo', $$select count(*) from pg_attribute where attrelid = '%s'::regclass and attname = 'later'$$
    )
"""


@pytest.fixture(scope="module")
def filled(citus: CitusServer) -> Iterator[str]:
    """Return the DSN of a distributed database with rows in all tables."""
    dsn = citus.create(migrated=False)
    citus.run(migrate(dsn))
    citus.run(fill(dsn))
    citus.run(distribute(dsn, 4, lambda *_: None))
    yield dsn
    citus.drop(dsn)


@pytest.fixture
def full(citus: CitusServer, filled: str) -> Iterator[str]:
    """Return the DSN of a copy of it."""
    dsn = citus.copy(filled)
    yield dsn
    citus.drop(dsn)


@pytest.fixture
def later(full: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let `migrate` use a folder that has all migrations and a later one; return the file of that."""
    folder = tmp_path / "migrations"
    shutil.copytree(migrations_folder(), folder, ignore=shutil.ignore_patterns("__pycache__"))
    latest = max(path.name[:4] for path in (folder / "versions").glob("[0-9]*.py"))
    file = folder / "versions" / "9999_later.py"
    file.write_text(LATER.replace("{latest}", latest))
    monkeypatch.setattr("indexer.db.requirements.migrations_folder", lambda: folder)
    monkeypatch.setattr(tables, "DISTRIBUTED", (*tables.DISTRIBUTED, "later"))
    return file


@pytest.mark.usefixtures("later")
async def test_a_later_migration_changes_all_nodes(full: str) -> None:
    async with connected(full) as sql:
        indexes = await sql.fetch(INDEXES)
        assert not await schema_is_current(full)
        await migrate(full, changing=on_all_nodes)
        assert await schema_is_current(full)
        assert await sql.fetch(INDEXES) == indexes  # one was created, one dropped
        assert await sql.fetchval("select count(*) from indexer.later") == REPOS
        changed = "select count(*) from indexer.repo where later = case when active then 7 else 8 end"
        assert await sql.fetchval(changed) == REPOS
        assert await sql.fetchval("select indexer.later_count($1)", did("x")) == 0
        assert await sql.fetchval("select count(later) from atproto.later") == REPOS - REPOS // 7
        places = "select shardminvalue from pg_dist_shard where logicalrelid = $1::text::regclass order by 1"
        assert await sql.fetch(places, "indexer.later") == await sql.fetch(places, "indexer.repo")
        assert await sql.fetchval("select pg_relation_size('indexer.later')") == 0
        triggers = "select tgrelid::regclass::text from pg_trigger where tgname = 'use_two_phases'"
        assert "indexer.later_setting" in {name for (name,) in await sql.fetch(triggers)}
    await assert_writable(full)


async def test_a_migration_that_fails_changes_no_node(full: str, later: Path) -> None:
    later.write_text(later.read_text().replace('"drop index', '"select 1 / 0", "drop index'))
    with pytest.raises(Exception, match="division by zero"):
        await migrate(full, changing=on_all_nodes)
    async with connected(full) as sql:
        assert await sql.fetchval("select to_regclass('indexer.later')") is None
        assert await sql.fetchval(COLUMNS_ON_SHARDS) == 0
    await assert_writable(full)


@pytest.mark.usefixtures("later")
async def test_a_migration_does_not_hold_its_locks_while_it_waits_for_one_on_a_node(
    citus: CitusServer, full: str
) -> None:
    name = urlsplit(full).path[1:]
    async with (
        connected(full) as sql,
        connected(dsn_of(citus.cluster.url_of(WORKERS[0]), name)) as node,
        connected(full) as reader,
    ):
        shard = await sql.fetchval(SHARD_OF_NODE, citus.cluster.ports[WORKERS[0]])
        await node.execute(f"begin; select from {shard} limit 0")
        with capture_logs() as lines:
            migration = asyncio.create_task(migrate(full, changing=on_all_nodes))
            await until(lambda: migration.done() or bool(lines), lambda: lines)
            assert not migration.done()
            assert await reader.fetchval("select count(*) from indexer.repo") == REPOS
            await node.execute("commit")
            await migration
    assert [(line["event"], line["pid"]) for line in lines] == [("database.migration-waiting", None)]
    assert await schema_is_current(full)


async def assert_writable(dsn: str) -> None:
    db = await Database.open(dsn)
    try:
        await insert(db, synchronized("after"), changes=(put("app.test/a"),))
        assert did("after") in await db.repos.load([did("after")])
    finally:
        await db.close()
