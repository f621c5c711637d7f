"""Each transaction of a daemon may be the victim of a deadlock."""

from pathlib import Path
from random import Random

import pytest

from indexer.demo.scenario import Scenario
from tests.background import running
from tests.daemon.running_daemon import running_daemon
from tests.database_checks import assert_change_log_consistent
from tests.db.change_log_helpers import connected
from tests.faulty_network import FaultyNetwork
from tests.lost_commits import active_account, lose_commit
from tests.passed_time import EXPIRE_LEASES, expire_waits
from tests.waiting import until

pytestmark = [
    pytest.mark.proof("daemon"),
    pytest.mark.timeout(600),
    pytest.mark.one_server("Citus has no triggers on distributed tables"),
]

PERIOD = 17
"""One of so many statements that write ends in a deadlock."""
STEPS = 300
MIN_DEADLOCKS = 10
TABLES = (
    "repo",
    "record",
    "identity",
    "cursor",
    "gap",
    "crawl_progress",
    "host",
    "buffered_event",
    "dead_letter",
    "change_batch",
)
HELD, WANTED = 71_000_001, 71_000_002
"""Advisory locks: a session of the test holds the first one, and waits for the second one, again and again."""
LET_STATEMENTS_FAIL = f"""
    create function indexer.end_in_deadlock() returns trigger language plpgsql security definer
    set deadlock_timeout = '1ms' as $$
        begin
            if nextval('indexer.statement') % {PERIOD} = 0 then
                perform pg_advisory_xact_lock({WANTED});
                while not exists (select from pg_locks where locktype = 'advisory' and not granted and pid = (
                    select pid from pg_locks where locktype = 'advisory' and granted and objid = {HELD}
                )) loop
                    perform pg_sleep(0.001);
                end loop;
                perform pg_advisory_xact_lock({HELD});
            end if;
            return null;
        end
    $$
"""  # noqa: S608
DEADLOCKS = "select deadlocks from pg_stat_database where datname = current_database()"
IS_WANTED = "select exists (select from pg_locks where locktype = 'advisory' and granted and objid = $1::bigint::oid)"
IN_PROGRESS = "select from indexer.repo where sync_status = 'in-progress'"
WAIT = f"select pg_advisory_lock({WANTED}), pg_advisory_unlock({WANTED})"


async def be_in_the_way(database: str) -> None:
    """Wait for the lock of each transaction that waits for the lock of this one; Postgres cancels the other one."""
    async with connected(database) as sql:
        await sql.execute("set deadlock_timeout = '1h'")
        await sql.execute(f"select pg_advisory_lock({HELD})")

        async def is_wanted() -> bool:
            return bool(await sql.fetchval(IS_WANTED, WANTED))

        while True:
            await until(is_wanted)
            await sql.execute(WAIT)


@pytest.mark.proof("daemon")
async def test_deadlocks_of_all_transactions_lose_nothing_and_end_nothing(database: str, tmp_path: Path) -> None:
    async with FaultyNetwork() as network, running_daemon(database, tmp_path, network) as daemon:
        scenario, random = Scenario(network, seed=16), Random(16)
        await daemon.execute("create sequence indexer.statement")
        await daemon.execute(LET_STATEMENTS_FAIL)
        for table in TABLES:
            await daemon.execute(
                f"create trigger deadlock after insert or update or delete on indexer.{table} "
                "for each statement execute function indexer.end_in_deadlock()"
            )
        async with running(be_in_the_way(database)):
            for step in range(STEPS):
                scenario.perform(step, STEPS)
                if step % 20 == 10:
                    lose_commit(active_account(network, random))
                if step % 10 == 9:  # so that they do not end up in few large batches
                    await daemon.wait_for_cursor()
            for table in TABLES:
                await daemon.execute(f"drop trigger deadlock on indexer.{table}")
        await daemon.execute(EXPIRE_LEASES)  # of workers whose claim was lost

        async def no_resync_is_running() -> bool:
            return not await daemon.execute(IN_PROGRESS)

        async with running(expire_waits(database)):
            await daemon.wait_until_equal()
            await until(no_resync_is_running)  # that of an account that was hidden meanwhile may end later
        [(deadlocks,)] = await daemon.execute(DEADLOCKS)
        assert deadlocks >= MIN_DEADLOCKS
        assert await daemon.dead_letters() == []
        await assert_change_log_consistent(database)
