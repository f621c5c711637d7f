"""A message whose effects the database cannot store is isolated: other messages are stored, and the cursor moves on."""

from pathlib import Path

import pytest

from indexer.live.batch_writer import MAX_FAILURES
from indexer.telemetry.conditions import MESSAGES_REFUSED
from tests.daemon.running_daemon import POST, RunningDaemon, post, running_daemon
from tests.waiting import until

in_proof = pytest.mark.proof("daemon")
lets_a_trigger_fail = pytest.mark.one_server("Citus has no triggers on distributed tables")

RAISE = "raise exception 'no value of this account is stored'"
LOSE_CONNECTION = "perform pg_terminate_backend(pg_backend_pid()); perform pg_sleep(10)"


async def fail_writes_of(daemon: RunningDaemon, table: str, did: str, statement: str) -> None:
    """Let each write of a row of this account run `statement`, which ends the transaction."""
    await daemon.execute(
        f"""
        create function indexer.fail() returns trigger language plpgsql as $$
            begin if new.did = '{did}' then {statement}; end if; return new; end
        $$"""
    )
    await daemon.execute(
        f"create trigger fail before insert or update on indexer.{table} for each row execute function indexer.fail()"
    )


@lets_a_trigger_fail
@pytest.mark.parametrize(
    ("table", "resynced"),
    [pytest.param("record", True, marks=pytest.mark.slow), pytest.param("repo", False, marks=in_proof)],
)
async def test_message_that_the_database_refuses_is_rejected_and_others_are_stored(
    database: str, tmp_path: Path, table: str, resynced: bool
) -> None:
    async with running_daemon(database, tmp_path, roles="live") as daemon:
        accounts = [daemon.create_account(f"a{number}.test") for number in range(8)]
        await daemon.wait_until_equal()
        hostile = accounts.pop(3)
        stored = await daemon.record_rows(hostile)
        await fail_writes_of(daemon, table, hostile.did, RAISE)
        for number in range(20):
            for account in (*accounts[:4], hostile, *accounts[4:]) if number == 10 else accounts:
                account.create(POST, post(f"message {number}"))
        await daemon.wait_for_cursor()
        for account in accounts:
            assert len(await daemon.record_rows(account)) == 25
        assert await daemon.record_rows(hostile) == stored
        assert await daemon.dead_letters() == [(hostile.did, "store-failed")]
        assert daemon.counter("rejected", reason="store-failed") == 1
        [condition] = [found for found in daemon.stages.conditions.active() if found.kind is MESSAGES_REFUSED]
        assert (condition.count, hostile.did in condition.message) == (1, True)
        row = await daemon.repo_row(hostile)
        desynchronized = ("desynchronized", "store-failed") if resynced else ("synchronized", None)
        assert (row["sync_status"], row["sync_reason"]) == desynchronized


FAIL = """
    create function indexer.fail() returns trigger language plpgsql as $$
        begin raise exception 'too many notifications in the NOTIFY queue' using errcode = '54000'; end
    $$
"""
FAIL_AT_COMMIT = """
    create constraint trigger fail after insert on indexer.change_batch
    deferrable initially deferred for each row execute function indexer.fail()
"""


@pytest.mark.slow
@lets_a_trigger_fail
async def test_error_that_all_commits_have_is_waited_for_and_is_the_fault_of_no_message(
    database: str, tmp_path: Path
) -> None:
    """Live commits and resyncs wait, the daemon is not ready and says why, and nothing is rejected."""
    async with running_daemon(database, tmp_path) as daemon:
        known = [daemon.create_account(f"a{number}.test") for number in range(3)]
        await daemon.wait_until_equal()
        await daemon.execute(FAIL)
        await daemon.execute(FAIL_AT_COMMIT)
        for account in known:
            account.create(POST, post("while no commit succeeds"))
        daemon.create_account("new.test")
        probe = daemon.stages.probe
        await until(lambda: [reason.code for reason in probe.not_ready()] == ["database-errors"])
        [reason] = probe.not_ready()
        assert "the database stores nothing" in reason.message
        assert "too many notifications in the NOTIFY queue" in reason.message
        failed = daemon.stages.db.failed_operations
        await until(lambda: daemon.stages.db.failed_operations > failed + 2 * MAX_FAILURES)
        await daemon.execute("drop trigger fail on indexer.change_batch")
        await daemon.wait_until_equal()
        assert await daemon.dead_letters() == []
        assert probe.not_ready() == []


@in_proof
@lets_a_trigger_fail
async def test_message_that_costs_the_connection_each_time_is_rejected_and_others_are_stored(
    database: str, tmp_path: Path
) -> None:
    async with running_daemon(database, tmp_path, roles="live") as daemon:
        hostile, *others = [daemon.create_account(f"a{number}.test") for number in range(4)]
        await daemon.wait_until_equal()
        await fail_writes_of(daemon, "record", hostile.did, LOSE_CONNECTION)
        for account in (others[0], hostile, *others[1:]):
            account.create(POST, post("new"))
        await daemon.wait_for_cursor()
        for account in others:
            assert len(await daemon.record_rows(account)) == 6
        assert await daemon.dead_letters() == [(hostile.did, "store-failed")]
        assert (await daemon.repo_row(hostile))["sync_reason"] == "store-failed"
