"""Costly commits of one account do not delay those of others more than ordinary commits of the same size."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from indexer.demo.local_repo import Write
from tests.daemon.running_daemon import POST, post
from tests.daemon_process import daemon_process, log_tail
from tests.faulty_network import FaultyAccount, FaultyNetwork
from tests.sync.test_planning_cost import ENDS, ITEMS, list_of
from tests.waiting import until

pytestmark = [
    pytest.mark.proof("daemon"),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the processor time is read from /proc"),
]

MAX_COST = 10.0
"""Processor time for costly commits, as a multiple of the time for ordinary posts of as many bytes."""
COMMIT_BYTES = 1_000_000
PATHS = 200
ORDINARY = [(post("x" * (COMMIT_BYTES // PATHS)), PATHS, 1)] * 10
"""For each commit: the record, how many distinct ones there are, and how many paths name each."""
COSTLY = [
    (list_of(ITEMS[items], COMMIT_BYTES // blocks, ENDS[end]), blocks, paths)
    for items, end, blocks, paths in [
        ("deep lists", "a float", 1, 10),
        ("deep lists", "nothing", 200, 1),
        ("deep maps", "a float", 1, 10),
        ("deeper lists", "nothing", 20, 1),
        ("empty lists", "a float", 1, 1),
        ("empty maps", "a huge integer", 20, 1),
        ("empty byte strings", "nothing", 200, 1),
        ("links", "text like a reserved key, and a float", 20, 1),
        ("maps", "text like a reserved key, and a float", 200, 1),
        ("texts", "invalid bytes", 1, 10),
    ]
]


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def stored_keys(sql: asyncpg.Connection, account: FaultyAccount) -> list[str]:
    """Return the record keys of the account in the order in which the daemon stored them."""
    rows = await sql.fetch(
        "select rkey from atproto.changes where did = $1 and rkey is not null order by seq", account.did
    )
    return [row["rkey"] for row in rows]


def send(
    hostile: FaultyAccount, honest: FaultyAccount, commits: Sequence[tuple[Any, int, int]], name: str
) -> list[str]:
    """Send the commits, and one of the honest account before, between and after them; return its record keys."""
    keys = [f"{name}-{number:02}" for number in range(len(commits) + 1)]
    honest.create(POST, post("before"), rkey=keys[0])
    for number, (record, blocks, paths) in enumerate(commits):
        hostile.apply_writes(
            [
                Write.create(f"{POST}/{name}-{number:02}-{block:03}-{path:03}", numbered(record, block))
                for block in range(blocks)
                for path in range(paths)
            ]
        )
        honest.create(POST, post("after"), rkey=keys[number + 1])
    return keys


def numbered(record: Any, number: int) -> Any:
    """Return the record with a number, so that its block is another one."""
    return (
        b"\x82" + record + b"\x19" + (256 + number).to_bytes(2)
        if isinstance(record, bytes)
        else record | {"number": number}
    )


async def test_costly_commits_do_not_delay_others_more_than_ordinary_commits(
    database: str, tmp_path: Path, sql: asyncpg.Connection
) -> None:
    async with FaultyNetwork() as network:
        hostile, honest = network.create_account("eve.test"), network.create_account("bob.test")
        sent: list[str] = []

        async def stored() -> bool:
            return (await stored_keys(sql, honest)) == sent

        async with daemon_process(network, database, tmp_path) as process:

            async def cost_of(commits: Sequence[tuple[Any, int, int]], name: str) -> float:
                """Return the processor time until the records of the honest account are stored, in their order."""
                began = processor_seconds(process.pid)
                sent.extend(send(hostile, honest, commits, name))
                await until(stored, lambda: log_tail(tmp_path))
                return processor_seconds(process.pid) - began

            sent.extend(send(hostile, honest, [], "first"))
            await until(stored, lambda: log_tail(tmp_path))
            ordinary = await cost_of(ORDINARY, "ordinary")
            costly = await cost_of(COSTLY, "costly")
            assert costly < MAX_COST * ordinary, (costly, ordinary)
        [row] = await sql.fetch("select sync_status from indexer.repo where did = $1", hostile.did)
        assert row["sync_status"] == "synchronized"
