"""The memory of the daemon does not grow with the size of a repo."""

from pathlib import Path

import asyncpg
import pytest

from indexer.localnet import dag_cbor
from indexer.localnet.local_network import LocalNetwork
from tests.daemon_process import daemon_process, log_tail
from tests.waiting import until

RECORDS = 1_000_000
MAX_MIB = 300
LIKE = "app.bsky.feed.like"


def make_likes(count: int) -> dict[str, bytes]:
    """Return encoded records that differ in one number. It is replaced in the bytes: encoding each would be slow."""
    block = dag_cbor.encode({"$type": LIKE, "createdAt": "2026-01-01T00:00:00.000Z", "number": 2**32})
    offset = block.index((2**32).to_bytes(8)) + 4
    return {
        f"{LIKE}/{number:013}": block[:offset] + number.to_bytes(4) + block[offset + 4 :] for number in range(count)
    }


async def synchronized(dsn: str, did: str) -> bool:
    connection = await asyncpg.connect(dsn)
    try:
        row = await connection.fetchrow("select sync_status, last_error from indexer.repo where did = $1", did)
        assert row is None or row["last_error"] is None, row["last_error"]
        return row is not None and row["sync_status"] == "synchronized"
    finally:
        await connection.close()


def peak_mib(pid: int) -> float:
    """Return the greatest resident set size of a process."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 1_024


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak memory is read from /proc")
async def test_repo_of_a_million_records_is_resynced_in_bounded_memory(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.waiting.TIMEOUT", 600.0)
    async with LocalNetwork() as network:
        account = network.create_account("ada.test")
        account.repo.import_records(make_likes(RECORDS), account.key, network.clock.tid())
        async with daemon_process(network, database, tmp_path) as process:
            account.announce()
            await until(lambda: synchronized(database, account.did), lambda: log_tail(tmp_path))
            assert peak_mib(process.pid) < MAX_MIB
        connection = await asyncpg.connect(database)
        try:
            stored = await connection.fetchval("select count(*) from indexer.record where did = $1", account.did)
            assert stored == RECORDS
        finally:
            await connection.close()
