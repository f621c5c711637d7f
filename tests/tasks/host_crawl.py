"""A small network whose relay withholds accounts, and a crawl of its hosts."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from math import inf
from time import time
from typing import Any

from aiohttp import web

from indexer.concurrency.stage_progress import Work
from indexer.db import Database
from indexer.db.host_lists import HostList
from indexer.db.scope import CurrentScope
from indexer.demo.local_network import LocalNetwork
from indexer.demo.local_pds import GET_REPO_STATUS, LIST_REPOS, LocalPds
from indexer.demo.local_plc import LocalPlc
from indexer.demo.local_relay import LocalRelay
from indexer.demo.local_repo import LocalRepo
from indexer.net.http.host_limits import RateLimits
from indexer.net.http.http_client import OutboundClient, OutboundSettings
from indexer.net.identity.did_resolver import DidResolver
from indexer.net.identity.identity_cache import IdentityCache
from indexer.sync.repo import Repo
from indexer.sync.scope import Scope, Track
from indexer.tasks.hosts import HostCrawl, HostSettings
from indexer.telemetry.conditions import Conditions
from indexer.telemetry.metrics import Metrics
from tests.sync.signing_account import STORE_ALL

QUICK = HostSettings(first_wait=0.0, poll=0.01, settle=0.0, follow=0.05)


class WithholdingRelay(LocalRelay):
    """A relay that withholds accounts: it drops their messages, does not list them, and says `throttled`.

    Attributes:
        withheld: Their DIDs.
    """

    def __init__(self, plc: LocalPlc) -> None:
        super().__init__(plc)
        self.withheld = set[str]()
        self.route(GET_REPO_STATUS, self._get_repo_status)

    def receive(self, pds: LocalPds, did: str, kind: str, payload: dict[str, Any]) -> None:
        if did not in self.withheld:
            super().receive(pds, did, kind, payload)

    async def _get_repo_status(self, request: web.Request) -> web.Response:
        did = request.query["did"]
        if did in self.withheld:
            return web.json_response({"did": did, "active": False, "status": "throttled"})
        return await self._redirect(request)

    def _active_repos(self) -> list[LocalRepo]:
        return [repo for repo in super()._active_repos() if repo.did not in self.withheld]


class LyingPds(LocalPds):
    """A PDS whose list of repos has what a test wants. It counts the requests for pages.

    Attributes:
        pages: By cursor; None: its real list.
        requests: The cursors that were requested.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pages: Any = None
        self.requests: list[str] = []
        self.route(LIST_REPOS, self._list_lies)

    async def _list_lies(self, request: web.Request) -> web.Response:
        self.requests.append(request.query.get("cursor", ""))
        if self.pages is None:
            return await self._list_repos(request)
        return web.json_response(self.pages(request.query.get("cursor", "")))


class HostNetwork(LocalNetwork):
    """The network of these tests."""

    pds_type, relay_type = LyingPds, WithholdingRelay
    relay: WithholdingRelay
    pdses: Sequence[LyingPds]


@dataclass
class Hosts:
    """The network, the database, and what crawls share."""

    network: HostNetwork
    db: Database
    outbound: OutboundClient
    lag: float | None = 0.0

    def __post_init__(self) -> None:
        self.metrics, self.conditions = Metrics(), Conditions()

    def crawl(self, settings: HostSettings = QUICK, *, track: Track = Track.ALL, **changes: Any) -> HostCrawl:
        """Return a crawl of a daemon whose stream is open."""
        resolver = DidResolver(
            self.outbound, [self.network.plc_url], plc_rate=1_000, allow_private_hosts=True, clock=time
        )
        identities = IdentityCache(resolver, self.db.identities, self.metrics, clock=time, refresh_rate=inf)
        scope = CurrentScope(self.db.scope, replace(STORE_ALL, scope=Scope(track=track)))
        values: dict[str, Any] = {"new_accounts": 0.0, "lookup_rate": 1_000.0} | changes
        return HostCrawl(
            self.db,
            self.outbound,
            identities,
            self.metrics,
            self.conditions,
            scope,
            {self.network.relay_url: self.network.relay.url},
            lambda: self.network.relay.url,
            lambda _source: None,
            lambda: self.lag,
            settings,
            values["new_accounts"],
            values["lookup_rate"],
        )

    def name(self, pds: int = 0) -> str:
        """Return the name of a PDS."""
        return self.network.pdses[pds].url.partition("://")[2]

    async def read(self, crawl: HostCrawl | None = None, pds: int = 0) -> HostList:
        """Read the list of one PDS; return its stored state."""
        crawl = crawl or self.crawl()
        await crawl.read_hosts(self.network.relay_url)
        await crawl.read_list(await self.stored(pds), Work())
        return await self.stored(pds)

    async def stored(self, pds: int = 0) -> HostList:
        """Return the stored state of the list of a PDS."""
        due = await self.db.host_lists.due(range(256), inf, time())
        return next(one for one in due if one.host == self.name(pds))

    async def view(self, pds: int = 0) -> dict[str, Any]:
        """Return the row of the public view of a PDS."""
        async with self.db.connection() as connection:
            row = await connection.fetchrow("select * from atproto.hosts where host = $1", self.name(pds))
        assert row is not None
        return dict(row)

    async def relay_view(self, pds: int = 0) -> dict[str, Any]:
        """Return the row of the public view of the relay and a PDS."""
        async with self.db.connection() as connection:
            row = await connection.fetchrow("select * from atproto.relay_hosts where host = $1", self.name(pds))
        assert row is not None
        return dict(row)

    async def repos(self) -> dict[str, Repo]:
        """Return the stored repos of all accounts of the network, by DID."""
        return await self.db.repos.load(list(self.network.accounts))


@asynccontextmanager
async def host_network(db: Database, pds: int = 2) -> AsyncIterator[Hosts]:
    """Run the network."""
    rates = RateLimits(host=10_000, total=10_000)
    async with (
        HostNetwork(pds=pds) as network,
        OutboundClient(OutboundSettings("test", allow_private_hosts=True, rates=rates)) as outbound,
    ):
        yield Hosts(network, db, outbound)
