"""The daemon's memory doesn't depend on how large a repo is."""

from pathlib import Path

import asyncpg
import pytest

from indexer.localnet import dag_cbor
from indexer.localnet.network import LocalNetwork
from tests.serving import until
from tests.test_crash import daemon_process, log_of

RECORDS = 1_000_000
MOST_MIB = 300
LIKE = "app.bsky.feed.like"


def likes(count: int) -> dict[str, bytes]:
    """Records that differ by a number, encoded once: a million times would take longer than all the rest."""
    block = dag_cbor.encode({"$type": LIKE, "createdAt": "2026-01-01T00:00:00.000Z", "number": 2**32})
    place = block.index((2**32).to_bytes(8)) + 4
    return {f"{LIKE}/{number:013}": block[:place] + number.to_bytes(4) + block[place + 4 :] for number in range(count)}


async def synchronized(dsn: str, did: str) -> bool:
    connection = await asyncpg.connect(dsn)
    try:
        row = await connection.fetchrow("select status, last_error from indexer.repo where did = $1", did)
        assert row is None or row["last_error"] is None, row["last_error"]
        return row is not None and row["status"] == "synchronized"
    finally:
        await connection.close()


def peak_mib(pid: int) -> float:
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 1_024


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
async def test_a_repo_of_a_million_records(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.serving.PATIENCE", 600.0)
    async with LocalNetwork() as network:
        account = network.create_account("ada.test")
        account.repo.load(likes(RECORDS), account.key, network.clock.tid())
        async with daemon_process(network, database, tmp_path) as process:
            account.announce()
            await until(lambda: synchronized(database, account.did), lambda: log_of(tmp_path))
            assert peak_mib(process.pid) < MOST_MIB
        connection = await asyncpg.connect(database)
        try:
            stored = await connection.fetchval("select count(*) from indexer.record where did = $1", account.did)
            assert stored == RECORDS
        finally:
            await connection.close()
