"""The stage that numbers changes: at the end of a daemon, in savepoints, and beside transactions of other programs."""

import asyncio
from pathlib import Path

import asyncpg
import pytest

from indexer.cluster.numbering import IN_DOUBT_SECONDS, ChangeNumbering, numbering_session
from indexer.db import Database
from indexer.telemetry.conditions import TRANSACTIONS_IN_DOUBT, Conditions
from tests.citus_cluster import WORKERS
from tests.citus_server import CitusServer
from tests.daemon_harness import run_daemon, settings_for, wait_for_cursor
from tests.database_server import dsn_of
from tests.db.change_log_helpers import after, connected
from tests.db.repo_rows import did, insert, synchronized
from tests.faulty_network import FaultyNetwork
from tests.waiting import until

pytestmark = pytest.mark.proof("cluster")

UNNUMBERED = "select count(*) from indexer.unnumbered_batch"


async def test_daemon_that_ends_numbers_its_last_changes(
    database: str, sql: asyncpg.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it runs, the daemon of this test numbers no changes."""

    async def number_nothing(_self: ChangeNumbering) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(ChangeNumbering, "run", number_nothing)
    async with FaultyNetwork() as network:
        account = network.create_account()
        settings = settings_for(network.relay_url, network.plc_url, tmp_path)
        async with run_daemon(settings, database) as daemon:
            account.create("com.example.post", {"text": "last"})
            await wait_for_cursor(daemon, network.relay_url, network.relay.seq)
            assert await sql.fetchval(UNNUMBERED) > 0
        assert await sql.fetchval(UNNUMBERED) == 0
        assert [row["did"] for row in await after(sql, 0) if row["action"] == "create"] == [account.did]


REQUEST = """
    begin;
    savepoint before;
    set constraints all immediate;
    select atproto.request_takedown('{did}', {on});
    release before;
    commit
"""
NUMBER_AS_IF_PREPARED = """
    select (select count(*) from pg_dist_transaction) as parts, array(
        select n.commit_order from indexer.number_changes(
            array(select commit_order from indexer.unnumbered_batch order by commit_order desc limit 1),
            array(select groupid from pg_dist_node),
            array(select groupid from pg_dist_transaction), array(select gid from pg_dist_transaction)
        ) n
    ) as numbered
"""
"""Number the last batch, as if all its parts were prepared and not complete. Citus removes their rows soon after."""


async def test_a_batch_of_a_savepoint_waits_for_its_transaction(db: Database, sql: asyncpg.Connection) -> None:
    await insert(db, synchronized("one"))
    on = False
    answer: asyncpg.Record | None = None

    async def parts_are_known() -> bool:
        nonlocal on, answer
        on = not on
        await sql.execute(REQUEST.format(did=did("one"), on=on))
        answer = await sql.fetchrow(NUMBER_AS_IF_PREPARED)
        return answer is not None and answer["parts"] > 0

    await until(parts_are_known)
    assert answer is not None
    assert answer["numbered"] == []


OLD = "select count(*) from pg_prepared_xacts where clock_timestamp() - prepared > make_interval(secs => $1)"


async def test_a_transaction_of_another_program_is_not_in_doubt(
    citus: CitusServer, db: Database, sql: asyncpg.Connection
) -> None:
    """Only Citus completes those of its own, so `/readyz` would fail for as long as another program likes."""
    name = await sql.fetchval("select current_database()")
    conditions = Conditions()
    async with connected(dsn_of(citus.cluster.url_of(WORKERS[0]), name)) as worker:
        await worker.execute("begin; select txid_current(); prepare transaction 'of another program'")
        try:

            async def is_old() -> bool:
                return bool(await worker.fetchval(OLD, IN_DOUBT_SECONDS) == 1)

            await until(is_old)
            async with numbering_session(db) as session:
                assert await ChangeNumbering(db, conditions).number(session) == []
        finally:
            await worker.execute("rollback prepared 'of another program'")
    assert not conditions.is_active(TRANSACTIONS_IN_DOUBT)
