"""Hosts and a DNS server on loopback for the resolution of identities, and a scripted world for their cache."""

from collections.abc import AsyncIterator

import pytest

from indexer.errors import UnavailableError
from indexer.net.http import OutboundClient, OutboundSettings, RateLimits, Response
from indexer.reasons import FetchFailure
from tests.net.http.scripted_host import ScriptedHost
from tests.net.identity.identity_world import World
from tests.net.identity.name_server import NameServer


class Loopback:
    """The real client, but https URLs of all host names lead to the path on `host`.

    Attributes:
        requests: The URLs that were requested.
        missing_hosts: Host names that do not exist.
    """

    def __init__(self, host: ScriptedHost, outbound: OutboundClient) -> None:
        self.host = host
        self.requests: list[str] = []
        self.missing_hosts: set[str] = set()
        self._outbound = outbound

    async def get(self, url: str, *, max_bytes: int, timeout: float, accept: str) -> Response:  # noqa: ASYNC109
        self.requests.append(url)
        _, _, name, path = url.split("/", 3)
        if name in self.missing_hosts:
            raise UnavailableError(FetchFailure.NO_SUCH_HOST, name)
        target = f"{self.host.url}/{path}" if url.startswith("https://") else url
        return await self._outbound.get(target, max_bytes=max_bytes, timeout=timeout, accept=accept)


@pytest.fixture
async def loopback() -> AsyncIterator[Loopback]:
    settings = OutboundSettings("test", allow_private_hosts=True, rates=RateLimits(host=1_000, total=1_000))
    async with ScriptedHost() as host, OutboundClient(settings) as outbound:
        yield Loopback(host, outbound)


@pytest.fixture
async def name_server() -> AsyncIterator[NameServer]:
    async with NameServer() as server:
        yield server


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    for cache in world.caches:
        await cache.close()
