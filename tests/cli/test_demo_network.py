"""`indexer demo --serve` serves the network of the demo for daemons elsewhere."""

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator

import httpx
import pytest

from indexer.localnet.local_network import LocalNetwork
from tests.cli.command_line import PROJECT, Session, environment_without_settings
from tests.free_ports import free_ports

SERVERS = 4


@pytest.fixture
def first_port() -> int:
    """Return the first of four free, adjacent ports."""
    return free_ports(SERVERS)


@pytest.fixture
async def serving(first_port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "indexer", "demo", "--serve", f"127.0.0.1:{first_port}", "--seconds", "5",
        cwd=PROJECT, env=environment_without_settings(), stdout=PIPE,
    )  # fmt: skip
    yield process
    if process.returncode is None:
        process.kill()
    await process.communicate()


async def lines_until(process: asyncio.subprocess.Process, text: str) -> list[str]:
    """Return the lines on stdout up to the one that contains the text."""
    assert process.stdout is not None
    lines: list[str] = []
    while not lines or text not in lines[-1]:
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        assert line, lines
        lines.append(line.decode().strip())
    return lines


@pytest.mark.slow
async def test_demo_serves_a_network_until_a_signal(serving: asyncio.subprocess.Process, first_port: int) -> None:
    lines = await lines_until(serving, "The network is quiet")
    variables = dict(line.split("=", 1) for line in lines[:-1])
    assert variables["INDEXER_RELAYS"] == f"ws://127.0.0.1:{first_port}"
    assert variables["INDEXER_PLC_URL"] == f"http://127.0.0.1:{first_port + 1}"
    assert variables["INDEXER_DNS_SERVERS"] == f"127.0.0.1:{first_port + 1}"
    async with httpx.AsyncClient() as client:
        listed = await client.get(f"http://127.0.0.1:{first_port}/xrpc/com.atproto.sync.listRepos")
        dids = [repo["did"] for repo in listed.json()["repos"]]
        assert len(dids) >= 4
        hosts = set()
        for did in dids:
            document = (await client.get(f"{variables['INDEXER_PLC_URL']}/{did}")).json()
            host = document["service"][0]["serviceEndpoint"]
            hosts.add(host)
            export = await client.get(f"{host}/xrpc/com.atproto.sync.getRepo", params={"did": did})
            assert export.status_code == 200
    assert hosts == {f"http://127.0.0.1:{first_port + 2}", f"http://127.0.0.1:{first_port + 3}"}
    serving.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(serving.wait(), 30) == 0


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost:0", "localhost:65001", ":2470", "a b:2470"])
def test_demo_refuses_an_address_that_it_cannot_serve_at(address: str, session_without_database: Session) -> None:
    result = session_without_database("demo", "--serve", address)
    assert result.returncode == 2
    assert "is not HOST:PORT" in result.stderr


async def test_servers_of_a_network_have_adjacent_ports(first_port: int) -> None:
    async with LocalNetwork(first_port=first_port) as network:
        urls = [network.relay.url, network.plc.url, *(pds.url for pds in network.pdses)]
    assert urls == [f"http://127.0.0.1:{first_port + number}" for number in range(SERVERS)]
