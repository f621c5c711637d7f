"""Hosts on loopback, and public names and addresses that lead to them."""

import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohappyeyeballs
import pytest
from aiohappyeyeballs.types import AddrInfoType, SocketFactoryType

from indexer.net.http.http_client import OutboundClient, OutboundSettings, Timeouts
from tests.net.http.scripted_host import ScriptedHost

SHORT_TIMEOUTS = Timeouts(connect=10.0, read=3.0, rate_grace=0.5)
LOCAL = OutboundSettings("test (mailto:someone@example.com)", allow_private_hosts=True, timeouts=SHORT_TIMEOUTS)
PUBLIC_ONLY = OutboundSettings("test", timeouts=SHORT_TIMEOUTS)


@pytest.fixture
async def host() -> AsyncIterator[ScriptedHost]:
    async with ScriptedHost() as host:
        yield host


@pytest.fixture
async def outbound() -> AsyncIterator[OutboundClient]:
    """Return a client for local networks."""
    async with OutboundClient(LOCAL) as client:
        yield client


class OutboundWorld:
    """Public names and addresses. All connections lead to `host`, on loopback.

    Attributes:
        names: For each name, the addresses of its first lookup, its second one and so on; the last ones repeat.
        lookups: The names that were looked up.
        connected: The public addresses and ports that were connected to.
    """

    def __init__(self, host: ScriptedHost, trust: ssl.SSLContext) -> None:
        self.host = host
        self.trust = trust
        self.names: dict[str, list[Sequence[str]]] = {}
        self.lookups: list[str] = []
        self.connected: list[tuple[str, int]] = []

    async def resolve(self, name: str, _port: int) -> Sequence[str]:
        self.lookups.append(name)
        answers = self.names.get(name)
        if answers is None:
            raise OSError("no such name")
        return answers.pop(0) if len(answers) > 1 else answers[0]


@pytest.fixture
async def world(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OutboundWorld]:
    server_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_tls.load_cert_chain(certificate)
    async with ScriptedHost(server_tls) as host:
        world = OutboundWorld(host, ssl.create_default_context(cafile=str(certificate)))
        start_connection = aiohappyeyeballs.start_connection

        async def connect_to_loopback(
            addr_infos: Sequence[AddrInfoType], *, socket_factory: SocketFactoryType, **_options: object
        ) -> socket.socket:
            socket_factory(addr_infos[0]).close()
            world.connected.append(addr_infos[0][4][:2])
            loopback = (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", world.host.port))
            return await start_connection([loopback])

        monkeypatch.setattr(aiohappyeyeballs, "start_connection", connect_to_loopback)
        yield world


@pytest.fixture
async def public_client(world: OutboundWorld) -> AsyncIterator[OutboundClient]:
    """Return a client for public hosts, with the names and addresses of `world`."""
    async with OutboundClient(PUBLIC_ONLY, resolve=world.resolve, tls=world.trust) as client:
        yield client
