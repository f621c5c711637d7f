"""Each transaction of a daemon may be the victim of a deadlock."""

import asyncio
from pathlib import Path
from random import Random

import pytest

from indexer.localnet.local_network import LocalNetwork
from indexer.localnet.scenario import Scenario
from tests.background import running
from tests.daemon.running_daemon import RunningDaemon, running_daemon
from tests.database_checks import assert_change_log_consistent
from tests.lost_commits import active_account, lose_commit
from tests.passed_time import EXPIRE_LEASES, EXPIRE_WAITS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.one_server("Citus has no triggers on distributed tables"),
]

PERIOD = 17
"""One of so many statements that write ends in a deadlock."""
STEPS = 300
STEP_SECONDS = 0.05
MIN_DEADLOCKS = 15
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
LET_STATEMENTS_FAIL = f"""
    create function indexer.end_in_deadlock() returns trigger language plpgsql security definer as $$
        begin
            if nextval('indexer.statement') % {PERIOD} = 0 then
                perform nextval('indexer.deadlock');
                raise exception 'deadlock detected' using errcode = 'deadlock_detected';
            end if;
            return null;
        end
    $$
"""


async def expire_waits(daemon: RunningDaemon) -> None:
    while True:
        await daemon.execute(EXPIRE_WAITS)
        await asyncio.sleep(1)


async def test_deadlocks_of_all_transactions_lose_nothing_and_end_nothing(database: str, tmp_path: Path) -> None:
    async with LocalNetwork() as network, running_daemon(database, tmp_path, network) as daemon:
        scenario, random = Scenario(network, seed=16), Random(16)
        for sequence in ("statement", "deadlock"):
            await daemon.execute(f"create sequence indexer.{sequence}")
        await daemon.execute(LET_STATEMENTS_FAIL)
        for table in TABLES:
            await daemon.execute(
                f"create trigger deadlock after insert or update or delete on indexer.{table} "
                "for each statement execute function indexer.end_in_deadlock()"
            )
        for step in range(STEPS):
            scenario.perform(step, STEPS)
            if step % 20 == 10:
                lose_commit(active_account(network, random))
            await asyncio.sleep(STEP_SECONDS)
        [(deadlocks,)] = await daemon.execute("select last_value from indexer.deadlock")
        assert deadlocks >= MIN_DEADLOCKS
        for table in TABLES:
            await daemon.execute(f"drop trigger deadlock on indexer.{table}")
        await daemon.execute(EXPIRE_LEASES)  # of workers whose claim was lost
        async with running(expire_waits(daemon)):
            await daemon.wait_until_equal()
        assert await daemon.dead_letters() == []
        await assert_change_log_consistent(database)
