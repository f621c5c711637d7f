"""The table of hosts, and its public view."""

from dataclasses import replace
from time import time

import asyncpg
import pytest

from indexer.db import Database, hosts
from indexer.reasons import FetchFailure
from indexer.sync.identity import HostState

HEALTHY = HostState("pds.example", 10, 1, 0, None, None, "timeout: 5 s", 1_800_000_000.0)
FAILING = HostState(
    "failing.example:8443", 7, 7, 7, time() + 200_000, FetchFailure.HOST_PAUSED, "unreachable: reset\0by peer", None
)
THROTTLED = HostState("throttled.example", 3, 0, 0, time() + 100_000, FetchFailure.THROTTLED, None, None)


async def test_paused_and_failing_hosts_are_loaded(db: Database, sql: asyncpg.Connection) -> None:
    ended = replace(FAILING, host="ended.example", consecutive_failures=6, paused_until=time() - 5)
    long_ago = replace(ended, host="long-ago.example")
    await db.hosts.save([HEALTHY, FAILING, THROTTLED, ended, long_ago])
    await sql.execute("update indexer.host set updated_at = now() - interval '2 days' where host = 'long-ago.example'")
    loaded = {state.host: state for state in await db.hosts.load()}
    assert set(loaded) == {FAILING.host, THROTTLED.host, ended.host}
    assert loaded[THROTTLED.host].paused_until == pytest.approx(THROTTLED.paused_until)
    assert replace(loaded[THROTTLED.host], paused_until=THROTTLED.paused_until) == THROTTLED
    assert loaded[FAILING.host].last_error == "unreachable: reset\ufffdby peer"
    rows = await sql.fetch("select host, pause_reason from atproto.hosts where paused_until > now() order by host")
    assert [tuple(row) for row in rows] == [("failing.example:8443", "host-paused"), ("throttled.example", "throttled")]
    many = [replace(FAILING, host=f"{number}.example", consecutive_failures=number) for number in range(15, 25)]
    await db.hosts.save(many)
    hosts = (await db.reports.state())[0]["hosts"]
    assert [host["host"] for host in hosts] == [f"{number}.example" for number in range(24, 14, -1)]


async def test_counts_are_added_and_the_latest_state_is_stored(db: Database, sql: asyncpg.Connection) -> None:
    await db.hosts.save([HEALTHY])
    await db.hosts.save(
        [replace(HEALTHY, requests=5, failures=2, consecutive_failures=2, last_error=None, last_success=None)]
    )
    await db.hosts.save([])
    row = await sql.fetchrow("select * from atproto.hosts")
    assert row is not None
    assert (row["requests"], row["failures"], row["failures_in_a_row"]) == (15, 3, 2)
    assert row["last_error"] == "timeout: 5 s"
    assert row["last_success_at"].timestamp() == HEALTHY.last_success
    assert (row["paused_until"], row["pause_reason"]) == (None, None)


async def test_the_table_is_limited_and_paused_hosts_stay_in_it(
    db: Database, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "MAX_HOSTS", 10)
    await db.hosts.save([FAILING, THROTTLED])
    await sql.execute("update indexer.host set updated_at = now() - interval '1 year'")
    for start in range(0, 40, 4):
        await db.hosts.save([replace(HEALTHY, host=f"{number}.example") for number in range(start, start + 4)])
    left = [row["host"] for row in await sql.fetch("select host from indexer.host")]
    assert len(left) == 10
    assert {FAILING.host, THROTTLED.host} < set(left)
    assert {f"{number}.example" for number in range(36, 40)} < set(left)
