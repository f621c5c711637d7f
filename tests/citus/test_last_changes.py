"""A daemon that ends numbers its last changes on a cluster."""

import asyncio
from pathlib import Path

import asyncpg
import pytest

from indexer.localnet.local_network import LocalNetwork
from indexer.service.background.change_numbering import ChangeNumbering
from tests.daemon_harness import run_daemon, settings_for, wait_for_cursor
from tests.store.change_log_helpers import after

UNNUMBERED = "select count(*) from indexer.unnumbered_batch"


@pytest.mark.slow
async def test_daemon_that_ends_numbers_its_last_changes(
    database: str, sql: asyncpg.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it runs, the daemon of this test numbers no changes."""

    async def number_nothing(_self: ChangeNumbering) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(ChangeNumbering, "run", number_nothing)
    async with LocalNetwork() as network:
        account = network.create_account()
        settings = settings_for(network.relay_url, network.plc_url, tmp_path)
        async with run_daemon(settings, database) as daemon:
            account.create("com.example.post", {"text": "last"})
            await wait_for_cursor(daemon, network.relay_url, network.relay.seq)
            assert await sql.fetchval(UNNUMBERED) > 0
        assert await sql.fetchval(UNNUMBERED) == 0
        assert [row["did"] for row in await after(sql, 0) if row["action"] == "create"] == [account.did]
