import asyncio
from dataclasses import replace
from pathlib import Path

import asyncpg
import pytest
from structlog.testing import capture_logs

from indexer.cli.command import ExitCode
from indexer.db import Database, shard_lock
from indexer.serve.status_reader import StatusReader
from indexer.sync.shard import PLAIN, Shard
from indexer.tasks.shard_ownership import ShardOwnership
from tests.daemon.running_daemon import POST, post, running_daemon
from tests.daemon_process import daemon_process, log_tail
from tests.db.test_placement_check import COMPLETE_ROW, PRETEND_SHARDS
from tests.faulty_network import FaultyNetwork
from tests.quick_tuning import QUICK
from tests.waiting import until

pytestmark = pytest.mark.slow

OWNERS = "select pid from indexer.shard_owner"
END_SESSION = "select pg_terminate_backend($1::integer)"
PRETEND_PARTS = """
    create or replace function indexer.parts_of(
        relation regclass, out buckets smallint[], out pages bigint, out estimated_rows bigint
    ) returns setof record language sql as $$ select array(select generate_series(0, 255))::smallint[], 1, 1 $$
"""
"""Repos are counted now and then. In this database, no node can be asked for its shards."""
DISTRIBUTE = f"{COMPLETE_ROW} on conflict do nothing; {PRETEND_PARTS}; {PRETEND_SHARDS}"


async def test_overlapping_shards_wait_for_each_other(db: Database) -> None:
    first, second, other = (
        ShardOwnership(db, Shard(0, 1), retry=0.05),
        ShardOwnership(db, Shard(1, 2), retry=0.05),
        ShardOwnership(db, Shard(0, 2), retry=0.05),
    )
    running = asyncio.create_task(first.run())
    await first.owned.wait()
    waiting = [asyncio.create_task(ownership.run()) for ownership in (second, other)]
    await until(lambda: second.last_error is not None and other.last_error is not None)
    assert "another process holds buckets of shard 1/2" in str(second.last_error)
    assert not second.owned.is_set()
    running.cancel()
    await asyncio.wait([running])
    await asyncio.wait_for(asyncio.gather(second.owned.wait(), other.owned.wait()), 20)
    assert not any(ownership.last_error for ownership in (second, other))
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)


async def test_locks_are_acquired_again_after_the_session_ends(db: Database, sql: asyncpg.Connection) -> None:
    """The log shows the beginning and the end of the time without the locks, each time."""
    ownership = ShardOwnership(db, Shard(3, 4), retry=0.05)
    with capture_logs() as lines:
        running = asyncio.create_task(ownership.run())
        await ownership.owned.wait()
        for times in (1, 2):
            [before] = await sql.fetch(OWNERS)
            await sql.execute(END_SESSION, before["pid"])

            async def held_by_another_session(before: int = before["pid"]) -> bool:
                return [row["pid"] for row in await sql.fetch(OWNERS)] not in ([], [before])

            await until(held_by_another_session)
            await until(lambda: ownership.last_error is None)
            assert ownership.owned.is_set()
            assert [line["event"] for line in lines] == ["shard-lock.lost", "shard-lock.acquired"] * times
    running.cancel()
    await asyncio.wait([running])


@pytest.mark.one_server("the database of a cluster is distributed from the beginning")
async def test_a_waiting_process_ends_when_the_database_was_distributed(
    database: str, sql: asyncpg.Connection, tmp_path: Path
) -> None:
    """With its old shard it would write buckets of other processes, and pass messages of its own ones."""
    async with FaultyNetwork() as network, shard_lock.open_lock(sql, Shard().positions, PLAIN) as lock:
        assert await lock.claim()
        async with daemon_process(network, database, tmp_path) as process:
            await until(lambda: "shard-lock.waiting" in log_tail(tmp_path), lambda: log_tail(tmp_path))
            await sql.execute(DISTRIBUTE)
            await sql.execute("delete from indexer.shard_owner")
            assert await asyncio.wait_for(process.wait(), 60) == ExitCode.FAILED
    last_line = log_tail(tmp_path).splitlines()[-1]
    assert last_line == "indexer: The database was distributed while this process ran. Start the process again."
    assert await sql.fetch(OWNERS) == []


async def test_nothing_is_written_while_another_process_holds_the_buckets(
    database: str, sql: asyncpg.Connection, tmp_path: Path
) -> None:
    async with running_daemon(database, tmp_path, tuning=replace(QUICK, retry=0.5)) as daemon:
        account = daemon.create_account("ada.test")
        await daemon.wait_until_equal()
        async with shard_lock.open_lock(sql, range(7, 8), daemon.db.layout) as lock:
            [holder] = await daemon.execute(OWNERS)

            async def claim(lock: shard_lock.ShardLock = lock) -> bool:
                await sql.execute("select pg_stat_clear_snapshot()")
                return await lock.claim()

            async with sql.transaction():  # until its end, no other session can claim anything
                assert not await claim()
                await daemon.execute(END_SESSION, holder["pid"])
                await until(claim)
            account.create(POST, post("meanwhile"))
            ownership, inbox = daemon.stages.shard_ownership, daemon.stages.inbox
            await until(lambda: "another process" in str(ownership.last_error) and inbox.unsettled == 1)
            [reason] = daemon.stages.probe.not_ready()
            assert reason.code == "shard-lock"
            assert reason.message.startswith("another process holds buckets of shard 0/1, and this one waits: session ")
            assert daemon.stages.probe.stalled() == []
            assert (await daemon.repo_row(account))["rev"] != account.rev
        await daemon.wait_until_equal()


async def test_second_daemon_on_a_shard_waits_visibly_and_takes_over(database: str, tmp_path: Path) -> None:
    """In its log, in its readiness, and in the status report; nothing is lost. The first one returns much later."""
    async with running_daemon(database, tmp_path, tuning=replace(QUICK, retry=60.0)) as first:
        account = first.create_account("ada.test")
        await first.wait_until_equal()
        with capture_logs() as lines:
            async with running_daemon(database, tmp_path / "second", first.network) as second:
                await until(lambda: second.stages.shard_ownership.last_error is not None)
                [reason] = [reason for reason in second.stages.probe.not_ready() if reason.code == "shard-lock"]
                assert "this one waits: session" in reason.message
                assert second.stages.streams[0].subscription.connection is None, "it does not consume"
                reader = StatusReader(first.db, Shard())

                async def status_has_both() -> bool:
                    await reader.read()
                    states = [(daemon["shard"], daemon["state"]) for daemon in reader.document().daemons]
                    return states == [("0/1", "owns"), ("0/1", "waits")]

                await until(status_has_both)
                assert first.stages.probe.not_ready() == []
                [owner] = await first.execute(OWNERS)
                await first.execute(END_SESSION, owner["pid"])
                await until(second.stages.shard_ownership.owned.is_set)
                account.create(POST, post("after the change of owner"))
                await second.wait_until_equal()
        events = [line["event"] for line in lines]
        assert events.count("shard-lock.waiting") >= 1
        assert "shard-lock.acquired" in events
