"""Hosts and a DNS server on loopback for the resolution of identities, and a scripted world for their cache."""

from collections.abc import AsyncIterator

import pytest

from indexer.errors import UnavailableError
from indexer.net.http.host_limits import RateLimits
from indexer.net.http.http_client import OutboundClient, OutboundSettings, Response
from indexer.reasons import FetchFailure
from tests.net.http.scripted_host import ScriptedHost
from tests.net.identity.identity_world import World
from tests.net.identity.name_server import NameServer


class Loopback(OutboundClient):
    """The real client, but https URLs of all host names lead to the path on `host`.

    Attributes:
        requests: The URLs that were requested.
        missing_hosts: Host names that do not exist.
    """

    def __init__(self, host: ScriptedHost) -> None:
        rates = RateLimits(host=1_000, total=1_000)
        super().__init__(OutboundSettings("test", allow_private_hosts=True, rates=rates))
        self.host = host
        self.requests: list[str] = []
        self.missing_hosts: set[str] = set()

    async def get(
        self,
        url: str,
        *,
        max_bytes: int,
        timeout: float = 30.0,  # noqa: ASYNC109 - as the client has it
        accept: str = "",
    ) -> Response:
        self.requests.append(url)
        _, _, name, path = url.split("/", 3)
        if name in self.missing_hosts:
            raise UnavailableError(FetchFailure.NO_SUCH_HOST, name)
        target = f"{self.host.url}/{path}" if url.startswith("https://") else url
        return await super().get(target, max_bytes=max_bytes, timeout=timeout, accept=accept)


@pytest.fixture
async def loopback() -> AsyncIterator[Loopback]:
    async with ScriptedHost() as host, Loopback(host) as loopback:
        yield loopback


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
