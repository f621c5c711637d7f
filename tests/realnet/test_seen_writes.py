"""A service sees what an account wrote on Bluesky's own PDS: the time from the answer of the PDS to the visible row."""

import asyncio
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from statistics import quantiles
from time import perf_counter

import asyncpg
import pytest

from tests.daemon_process import daemon_process, log_tail
from tests.database_checks import assert_change_log_consistent
from tests.db.change_log_helpers import connected
from tests.realnet.real_network import RealAccount, real_network
from tests.realnet.test_hints import Addresses
from tests.realnet.test_network import NOTE, stream_url
from tests.relay_proxy import RelayProxy
from tests.waiting import until

WRITES = 200
REQUEST = "select atproto.request_record($1, $2)"
WAIT = "select reached from atproto.wait_for($1, $2, '30 seconds')"
SHOWN = "select from atproto.records where did = $1 and collection = $2 and rkey = $3"
LOGGED = "select rkey, array_agg(action) from atproto.changes where collection = $1 group by rkey"


@pytest.mark.proof("realnet")
async def test_write_is_seen_at_once_with_the_relay_and_without_it(
    database: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with real_network(1, tmp_path) as network:
        pds = network.pds[0]
        proxy = RelayProxy(int(stream_url(pds).rpartition(":")[2]))
        async with proxy.serve(), connected(database) as sql:
            addresses = Addresses(proxy.relay_url, network.plc_url)
            async with daemon_process(addresses, database, tmp_path, resync_source="pds"):
                account = await asyncio.to_thread(pds.create_account, "writer")
                await until(lambda: is_tracked(sql, account), lambda: log_tail(tmp_path))
                for name, requests, stopped in (
                    ("stream", False, False),
                    ("request", True, False),
                    ("alone", True, True),
                ):
                    if stopped:
                        proxy.refuse()
                    times = [await see(sql, account, f"{name}{n}", requests=requests) for n in range(WRITES)]
                    cuts = quantiles(times, n=100)
                    figures = f"{name}: p50 {1000 * cuts[49]:.1f} ms, p99 {1000 * cuts[98]:.1f} ms"
                    record_property("writes that are seen", figures)
                proxy.open()
                await asyncio.to_thread(account.create, NOTE, {"n": "last"}, "last")
                await until(lambda: is_shown(sql, account, "last"), lambda: log_tail(tmp_path))
                logged = {rkey: list(actions) for rkey, actions in await sql.fetch(LOGGED, NOTE)}
                names = chain(
                    ["last"], (f"{name}{n}" for name in ("stream", "request", "alone") for n in range(WRITES))
                )
                assert logged == {name: ["create"] for name in names}
        await assert_change_log_consistent(database)


async def see(sql: asyncpg.Connection, account: RealAccount, rkey: str, *, requests: bool) -> float:
    """Write a record; return the time from the answer of the PDS until the record is shown, in seconds."""
    answer = await asyncio.to_thread(account.create, NOTE, {"text": rkey}, rkey)
    began = perf_counter()
    if requests:
        await sql.fetch(REQUEST, answer["uri"], answer["commit"]["rev"])
    [(reached,)] = await sql.fetch(WAIT, account.did, answer["commit"]["rev"])
    passed = perf_counter() - began
    assert reached
    assert await is_shown(sql, account, rkey)
    return passed


async def is_shown(sql: asyncpg.Connection, account: RealAccount, rkey: str) -> bool:
    return bool(await sql.fetch(SHOWN, account.did, NOTE, rkey))


async def is_tracked(sql: asyncpg.Connection, account: RealAccount) -> bool:
    return bool(await sql.fetch("select from atproto.repos where did = $1 and rev is not null", account.did))
