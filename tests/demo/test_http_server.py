"""The HTTP server of the local network stops completely."""

import asyncio
import socket

import pytest

from tests.conftest import open_sockets
from tests.faulty_network import FaultyNetwork
from tests.waiting import until


@pytest.mark.parametrize("cycles", range(4))
async def test_server_that_stops_closes_a_connection_that_it_has_just_accepted(cycles: int) -> None:
    before = open_sockets()
    async with FaultyNetwork() as network:
        with socket.create_connection(("127.0.0.1", network.relay.port)):
            for _ in range(cycles):
                await asyncio.sleep(0)
            await network.relay.stop()
    await until(lambda: open_sockets() <= before)
