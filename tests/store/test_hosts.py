"""The table of hosts and its face."""

from dataclasses import replace
from time import time

import asyncpg
import pytest

from indexer.outbound import HostState
from indexer.reasons import FetchFailure
from indexer.store import Store, hosts

FINE = HostState("pds.example", 10, 1, 0, None, None, "timeout: 5 s", 1_800_000_000.0)
BROKEN = HostState(
    "broken.example:8443", 7, 7, 7, time() + 3_000, FetchFailure.HOST_PAUSED, "unreachable: reset\0by peer", None
)
ASKED = HostState("asked.example", 3, 0, 0, time() + 600, FetchFailure.THROTTLED, None, None)


async def test_pauses_and_broken_hosts_are_loaded_again(store: Store, sql: asyncpg.Connection) -> None:
    over = replace(BROKEN, host="over.example", streak=6, paused_until=time() - 5)
    long_ago = replace(over, host="long-ago.example")
    await store.save_hosts([FINE, BROKEN, ASKED, over, long_ago])
    await sql.execute("update indexer.host set updated_at = now() - interval '2 days' where host = 'long-ago.example'")
    loaded = {state.host: state for state in await store.load_hosts()}
    assert set(loaded) == {BROKEN.host, ASKED.host, over.host}
    assert loaded[ASKED.host].paused_until == pytest.approx(ASKED.paused_until)
    assert replace(loaded[ASKED.host], paused_until=ASKED.paused_until) == ASKED
    assert loaded[BROKEN.host].last_error == "unreachable: reset\ufffdby peer"


async def test_what_happened_since_is_added(store: Store, sql: asyncpg.Connection) -> None:
    await store.save_hosts([FINE])
    await store.save_hosts([replace(FINE, requests=5, failures=2, streak=2, last_error=None, last_success=None)])
    await store.save_hosts([])
    row = await sql.fetchrow("select * from atproto.hosts")
    assert row is not None
    assert (row["requests"], row["failures"], row["failures_in_a_row"]) == (15, 3, 2)
    assert row["last_error"] == "timeout: 5 s"
    assert row["last_success_at"].timestamp() == FINE.last_success
    assert (row["paused_until"], row["pause_reason"]) == (None, None)


async def test_the_face_shows_pauses_as_long_as_they_last(store: Store, sql: asyncpg.Connection) -> None:
    await store.save_hosts([BROKEN, ASKED, replace(ASKED, host="over.example", paused_until=time() - 1)])
    rows = await sql.fetch("select host, pause_reason from atproto.hosts where paused_until > now() order by host")
    assert [tuple(row) for row in rows] == [("asked.example", "throttled"), ("broken.example:8443", "host-paused")]


async def test_readers_may_see_it_and_nothing_else(store: Store, sql: asyncpg.Connection) -> None:
    await store.save_hosts([FINE])
    await sql.execute("set role atproto_reader")
    assert await sql.fetchval("select count(*) from atproto.hosts") == 1
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await sql.fetch("select * from indexer.host")
    await sql.execute("reset role")


async def test_the_worst_are_among_the_counts(store: Store) -> None:
    many = [replace(BROKEN, host=f"{number}.example", streak=number) for number in range(5, 25)]
    await store.save_hosts([FINE, ASKED, *many])
    worst = (await store.counts()).hosts
    assert [state.host for state in worst] == [f"{number}.example" for number in range(24, 14, -1)]


async def test_the_table_stays_bounded_and_pauses_stay_in_it(
    store: Store, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "MOST_HOSTS", 10)
    await store.save_hosts([BROKEN, ASKED])
    await sql.execute("update indexer.host set updated_at = now() - interval '1 year'")
    for start in range(0, 40, 4):
        await store.save_hosts([replace(FINE, host=f"{number}.example") for number in range(start, start + 4)])
    left = [row["host"] for row in await sql.fetch("select host from indexer.host")]
    assert len(left) == 10
    assert {BROKEN.host, ASKED.host} < set(left)
    assert {f"{number}.example" for number in range(36, 40)} < set(left)
