"""Any role may take any advisory lock, so none delays a migration or the ownership of a shard."""

import asyncio
from pathlib import Path

import pytest

from indexer.db import Database
from indexer.db.migrate import migrate
from indexer.sync.shard import Shard
from indexer.tasks.shard_ownership import ShardOwnership
from tests.background import running
from tests.database_checks import schema_is_current
from tests.db.change_log_helpers import connected
from tests.db.later_release import use_later_release
from tests.waiting import until

pytestmark = pytest.mark.slow

FORMER_LOCKS = """
    select pg_advisory_lock(x'6d6967726174'::bigint), pg_advisory_lock(x'6275636b'::integer, bucket)
    from generate_series(0, 255) bucket
"""
"""The advisory locks of earlier releases."""


async def test_advisory_locks_of_a_consumer_delay_neither_a_migration_nor_a_restarted_daemon(
    empty_database: str,
) -> None:
    async with connected(empty_database) as hostile:
        await hostile.execute(FORMER_LOCKS)
        await asyncio.wait_for(migrate(empty_database), 60)
        assert await schema_is_current(empty_database)
        db = await Database.open(empty_database)
        ownership = ShardOwnership(db, Shard(0, 1))
        async with running(ownership.run()):
            await asyncio.wait_for(ownership.owned.wait(), 20)
            advisory = await hostile.fetchval("select count(*) from pg_locks where locktype = 'advisory'")
            assert advisory == 257, "the daemon takes none itself"
            ids = "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
            holding = f"{ids} and (backend_xid is not null or backend_xmin is not null)"
            # A transaction that stays open, and has an ID, would keep vacuum from removing dead rows.
            await until(lambda: hostile.fetchval(f"select ({holding}) = 0"))
        await db.close()


async def test_a_migration_waits_for_another_one(
    empty_database: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first one has created the schema, but has not committed."""
    async with connected(empty_database) as first, connected(empty_database) as other:
        await first.execute("begin; create schema indexer")
        second = asyncio.create_task(migrate(empty_database))
        while not await other.fetchval("select count(*) from pg_locks where not granted"):
            assert not second.done()
        await first.execute("commit")
        await second
        use_later_release(monkeypatch, tmp_path, ["alter table indexer.repo add column later integer"])
        await first.execute("begin; lock table indexer.alembic_version in exclusive mode")
        second = asyncio.create_task(migrate(empty_database))
        while not await other.fetchval("select count(*) from pg_locks where not granted"):
            assert not second.done()
        assert not await schema_is_current(empty_database)
        await first.execute("rollback")
        await second
    assert await schema_is_current(empty_database)
