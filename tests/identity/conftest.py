"""Identities on loopback: a host for documents, a name server, and a client that finds every name on that host."""

from collections.abc import AsyncIterator

import pytest

from indexer.errors import UnavailableError
from indexer.outbound import Outbound, Rates, Response
from indexer.reasons import FetchFailure
from tests.identity.names import NameServer
from tests.outbound.host import Host


class Loopback:
    """The real client; https at any host name leads to `host`, by its path alone, but for names that are `gone`."""

    def __init__(self, host: Host, outbound: Outbound) -> None:
        self.host = host
        self.asked: list[str] = []
        self.gone: set[str] = set()
        self._outbound = outbound

    async def get(self, url: str, *, max_bytes: int, timeout: float, accept: str) -> Response:  # noqa: ASYNC109
        self.asked.append(url)
        _, _, name, path = url.split("/", 3)
        if name in self.gone:
            raise UnavailableError(FetchFailure.NO_SUCH_HOST, name)
        here = f"{self.host.url}/{path}" if url.startswith("https://") else url
        return await self._outbound.get(here, max_bytes=max_bytes, timeout=timeout, accept=accept)


@pytest.fixture
async def loopback() -> AsyncIterator[Loopback]:
    outbound = Outbound(user_agent="test", allow_private_hosts=True, rates=Rates(host=1_000, total=1_000))
    async with Host() as host:
        yield Loopback(host, outbound)
        await outbound.close()


@pytest.fixture
async def name_server() -> AsyncIterator[NameServer]:
    async with NameServer() as server:
        yield server
