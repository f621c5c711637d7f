"""Connections break between any two messages: to the database, to the relay, to the directory, and to a PDS.

The daemon recovers by itself: it is one process from the beginning to the end of each test.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.crashes.death_world import DeathWorld, death_world
from tests.database_proxy import DatabaseProxy
from tests.faulty_network import FaultyNetwork
from tests.http_proxy import HttpProxy
from tests.tcp_proxy import TcpProxy
from tests.waiting import until

pytestmark = pytest.mark.slow

GROUP = 20
"""Cuts after which everything is compared."""

DATABASE_KINDS = {
    *map("client {}".format, ("StartupMessage", "Parse", "Describe", "Flush", "Bind", "Execute", "Sync", "Query")),
    *map("server {}".format, ("Authentication", "ParameterStatus", "BackendKeyData", "ParseComplete")),
    *map("server {}".format, ("ParameterDescription", "RowDescription", "BindComplete", "DataRow")),
    *map("server {}".format, ("CommandComplete", "ReadyForQuery")),
}
REQUEST_KINDS = {"client head", "server head", "server body"}
STREAM_KINDS = {"client upgrade", "server upgrade", "server frame"}


async def cut_repeatedly(
    world: DeathWorld, proxy: TcpProxy, cuts: int, kinds: set[str], work: Callable[[DeathWorld], None]
) -> str:
    """Break a connection before its first message from now on, later before its second one, and so on.

    Then break one before each other kind of message. Return how many were broken before which kind.
    """
    world.daemon.start()
    work(world)
    await world.check()
    for number in range(1, cuts + 1):
        await cut(world, proxy, work, number)
        if number % GROUP == 0:
            await world.check()
    others = sorted(kinds - set(proxy.cuts))
    for kind in others:
        proxy.refuse()  # some messages are sent only at the beginning of a connection
        proxy.open()
        await cut(world, proxy, work, 1, kind)
    await world.check()
    assert len(proxy.cuts) == cuts + len(others)
    assert set(proxy.cuts) >= kinds
    return ", ".join(f"{kind} {times}" for kind, times in sorted(Counter(proxy.cuts).items()))


async def cut(
    world: DeathWorld, proxy: TcpProxy, work: Callable[[DeathWorld], None], number: int, kind: str | None = None
) -> None:
    """Break a connection before the message of this number, of this kind; let the daemon work until then."""
    cuts = len(proxy.cuts)
    proxy.cut_before(number, kind)

    def is_cut() -> bool:
        if len(proxy.cuts) == cuts:
            work(world)
        return len(proxy.cuts) > cuts

    await until(is_cut, lambda: f"not broken before {kind or number}: {world.daemon.log_tail()}")


def write_and_lose(world: DeathWorld) -> None:
    world.act(1)
    world.lose_commit()


def write_and_join(world: DeathWorld) -> None:
    world.create_unseen_account()
    write_and_lose(world)


SERVERS = {
    "database": (100, DATABASE_KINDS),
    "relay": (20, REQUEST_KINDS - {"server body"} | STREAM_KINDS),  # it redirects requests to the PDS, without a body
    "plc": (20, REQUEST_KINDS),
    "pds": (20, REQUEST_KINDS),
}
"""The number of cuts, and the kinds of messages before which a connection is broken at least once.

Each cut is a message later than the previous one. A batch takes about 20 messages of the database, a resync about 60.
"""
SAMPLES = {"database": 10, "relay": 5}
"""Cuts that `make test` has."""


@pytest.mark.parametrize(
    ("server", "cuts", "kinds"),
    [
        *(pytest.param(name, *case, id=name, marks=pytest.mark.proof("crashes")) for name, case in SERVERS.items()),
        *(pytest.param(name, cuts, set(), id=f"{name}, sample") for name, cuts in SAMPLES.items()),
    ],
)
async def test_connections_to_a_server_break_at_each_message(
    database: str,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    server: str,
    cuts: int,
    kinds: set[str],
) -> None:
    """The URLs in settings and identities name a proxy in place of the server."""
    async with FaultyNetwork() as network, AsyncExitStack() as stack:
        settings: dict[str, str] = {}
        if server == "database":
            proxy: TcpProxy = (of_database := DatabaseProxy(database))
            await stack.enter_async_context(proxy.serve())
            settings["database_url"] = of_database.dsn
        else:
            hidden = {"relay": network.relay, "plc": network.plc, "pds": network.pdses[0]}[server]
            proxy = HttpProxy(hidden.port)
            await stack.enter_async_context(proxy.serve())
            hidden.port = proxy.port
        world = await stack.enter_async_context(death_world(database, tmp_path, settings, network=network))
        work = write_and_lose if server == "database" else write_and_join
        done = await cut_repeatedly(world, proxy, cuts, kinds, work)
        record_property("cuts", f"{server}: {done}")
