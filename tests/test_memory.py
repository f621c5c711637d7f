"""The memory of the daemon does not grow with the size of a repo, nor with the size of its records as JSON."""

from pathlib import Path

import pytest

from indexer.atproto.cid import cid_of
from indexer.demo import dag_cbor
from indexer.demo.local_pds import CAR_TYPE, GET_REPO
from indexer.demo.local_repo import Write, car
from tests.daemon_process import daemon_process, log_tail
from tests.database_checks import fetch
from tests.faulty_network import Fault, FaultyAccount, FaultyNetwork
from tests.waiting import until

RECORDS = 1_000_000
MAX_MIB_OF_RECORDS = 200
MAX_MIB = 300
LIKE = "app.bsky.feed.like"
PATHS = 500
AMPLIFYING = {
    "6 bytes of JSON per byte, over the limit": b"\x7a" + (1_040_000).to_bytes(4) + b"\x01" * 1_040_000,
    "6 bytes of JSON per byte": b"\x7a" + (340_000).to_bytes(4) + b"\x01" * 340_000,
    "14 bytes of JSON per byte": b"\x99\xfd\xe8" + b"\x40" * 65_000,
}


def make_likes(count: int) -> dict[str, bytes]:
    """Return encoded records that differ in one number. It is replaced in the bytes: encoding each would be slow."""
    block = dag_cbor.encode({"$type": LIKE, "createdAt": "2026-01-01T00:00:00.000Z", "number": 2**32})
    offset = block.index((2**32).to_bytes(8)) + 4
    return {
        f"{LIKE}/{number:013}": block[:offset] + number.to_bytes(4) + block[offset + 4 :] for number in range(count)
    }


async def synchronized(dsn: str, did: str) -> bool:
    rows = await fetch(dsn, "select sync_status, last_error from indexer.repo where did = $1", did)
    assert all(row["last_error"] is None for row in rows), rows
    return [row["sync_status"] for row in rows] == ["synchronized"]


def peak_mib(pid: int) -> float:
    """Return the greatest resident set size of a process."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 1_024


@pytest.mark.proof("daemon")
@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak memory is read from /proc")
async def test_repo_of_a_million_records_is_resynced_in_bounded_memory(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.waiting.TIMEOUT", 600.0)
    async with FaultyNetwork() as network:
        account = network.create_account("ada.test")
        account.repo.import_records(make_likes(RECORDS), account.key, network.clock.tid())
        async with daemon_process(network, database, tmp_path) as process:
            account.emit_sync()
            await until(lambda: synchronized(database, account.did), lambda: log_tail(tmp_path))
            assert peak_mib(process.pid) < MAX_MIB_OF_RECORDS
        [(stored,)] = await fetch(database, "select count(*) from indexer.record where did = $1", account.did)
        assert stored == RECORDS


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak memory is read from /proc")
async def test_commit_of_many_paths_to_one_large_value_takes_bounded_memory(database: str, tmp_path: Path) -> None:
    """One commit of 1.06 MB names a block of control characters 200 times: 1.2 GB of JSON."""
    characters = b"\x7a" + (1_040_000).to_bytes(4) + b"\x01" * 1_040_000
    async with FaultyNetwork() as network:
        hostile, honest = network.create_account("eve.test"), network.create_account("bob.test")

        async def everything_stored() -> bool:
            expected = {account.did: len(account.records) for account in (hostile, honest) if account.records}
            return await stored_records(database) == (network.relay.seq, expected)

        async with daemon_process(network, database, tmp_path) as process:
            honest.create(LIKE, {"$type": LIKE})
            await until(everything_stored, lambda: log_tail(tmp_path))
            for number in range(3):
                hostile.apply_writes([Write.create(f"{LIKE}/{number}-{path:03}", characters) for path in range(200)])
                honest.create(LIKE, {"$type": LIKE})
            await until(everything_stored, lambda: log_tail(tmp_path))
            assert peak_mib(process.pid) < MAX_MIB


async def stored_records(dsn: str) -> tuple[int | None, dict[str, int]]:
    """Return the cursor, and the number of stored records of each account."""
    rows = await fetch(dsn, "select did, count(*) from indexer.record group by did")
    [(cursor,)] = await fetch(dsn, "select max(seq) from indexer.cursor")
    return cursor, {row["did"]: row["count"] for row in rows}


def serve_each_block_once(account: FaultyAccount) -> None:
    """Let the PDS send a block once, even if many paths name it."""
    repo = account.repo
    blocks = {repo.head.cid: repo.head.block, **repo.tree.blocks()}
    blocks |= {cid_of(block): block for block in repo.records.values()}
    headers = {"Content-Type": CAR_TYPE}
    account.pds.faults.append(Fault(GET_REPO, account.did, times=None, status=200, headers=headers, body=car(blocks)))


@pytest.mark.proof("daemon")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak memory is read from /proc")
@pytest.mark.parametrize("name", AMPLIFYING)
async def test_export_of_many_paths_to_one_large_value_is_resynced_in_bounded_memory(
    database: str, tmp_path: Path, name: str
) -> None:
    async with FaultyNetwork() as network:
        account = network.create_account("eve.test")
        records = {f"{LIKE}/{number:013}": AMPLIFYING[name] for number in range(PATHS)}
        account.repo.import_records(records, account.key, network.clock.tid())
        serve_each_block_once(account)
        async with daemon_process(network, database, tmp_path) as process:
            account.emit_sync()
            await until(lambda: synchronized(database, account.did), lambda: log_tail(tmp_path))
            assert peak_mib(process.pid) < MAX_MIB
        query = """
            select count(*), sum(coalesce(octet_length(value::text), octet_length(original))) as bytes
            from indexer.record where did = $1
        """
        [stored] = await fetch(database, query, account.did)
        assert stored["count"] == PATHS
        assert stored["bytes"] < 40_000_000
