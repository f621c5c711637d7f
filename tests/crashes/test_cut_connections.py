"""Connections break between any two messages: to the database, to the relay, to the directory, and to a PDS.

The daemon recovers by itself: it is one process from the beginning to the end of each test.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from indexer.localnet.local_network import LocalNetwork
from tests.crashes.death_world import DeathWorld, death_world
from tests.database_proxy import DatabaseProxy
from tests.http_proxy import HttpProxy
from tests.tcp_proxy import TcpProxy
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DATABASE_CUTS = 100
"""Each one comes a message later than the previous one. A batch takes about 20 messages, a resync about 60."""
HTTP_CUTS = 20
GROUP = 20
"""Cuts after which everything is compared."""


async def cut_repeatedly(world: DeathWorld, proxy: TcpProxy, cuts: int, work: Callable[[DeathWorld], None]) -> None:
    """Break a connection before its first message from now on, later before its second one, and so on."""
    world.daemon.start()
    work(world)
    await world.check()
    for number in range(1, cuts + 1):
        proxy.cut_in = number
        await until(partial(was_cut, world, proxy, number, work), world.daemon.log_tail)
        if number % GROUP == 0:
            await world.check()
    world.daemon.kill()
    assert (proxy.cuts, world.daemon.ended) == (cuts, 0)


def was_cut(world: DeathWorld, proxy: TcpProxy, number: int, work: Callable[[DeathWorld], None]) -> bool:
    """Return True if the connection was cut for the time of this number; let the daemon work until then."""
    if proxy.cuts < number:
        work(world)
    return proxy.cuts == number


def write_and_lose(world: DeathWorld) -> None:
    world.act(1)
    world.lose_commit()


def write_and_join(world: DeathWorld) -> None:
    world.create_unseen_account()
    write_and_lose(world)


async def test_connections_to_the_database_break_at_each_message(database: str, tmp_path: Path) -> None:
    proxy = DatabaseProxy(database)
    async with proxy.serve(), death_world(database, tmp_path, {"database_url": proxy.dsn}) as world:
        await cut_repeatedly(world, proxy, DATABASE_CUTS, write_and_lose)


@pytest.mark.parametrize("server", ["relay", "plc", "pds"])
async def test_connections_to_a_server_break_at_each_message(database: str, tmp_path: Path, server: str) -> None:
    """The URLs in settings and identities name a proxy in place of the server."""
    async with LocalNetwork() as network:
        hidden = {"relay": network.relay, "plc": network.plc, "pds": network.pdses[0]}[server]
        proxy = HttpProxy(hidden.port)
        async with proxy.serve():
            hidden.port = proxy.port
            async with death_world(database, tmp_path, network=network) as world:
                await cut_repeatedly(world, proxy, HTTP_CUTS, write_and_join)
