"""A small network whose relay withholds accounts, and a crawl of its hosts."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from math import inf
from time import time
from typing import Any

import orjson
from aiohttp import web

from indexer.concurrency.stage_progress import Work
from indexer.db import Database
from indexer.db.host_lists import HostList
from indexer.db.scope import CurrentScope
from indexer.demo.http_server import XrpcError
from indexer.demo.local_network import LocalNetwork
from indexer.demo.local_pds import GET_REPO_STATUS, LIST_REPOS, LocalPds
from indexer.demo.local_plc import LocalPlc
from indexer.demo.local_relay import LIST_REPOS_BY_COLLECTION, LocalRelay
from indexer.demo.local_repo import LocalRepo
from indexer.net.http.host_limits import RateLimits
from indexer.net.http.http_client import OutboundClient, OutboundSettings
from indexer.net.identity.did_resolver import DidResolver
from indexer.net.identity.identity_cache import IdentityCache
from indexer.sync.changes import Batch
from indexer.sync.repo import Repo
from indexer.sync.scope import Scope, Track, filter_of
from indexer.sync.stream import Cursor
from indexer.tasks.hosts import HostCrawl, HostSettings
from indexer.telemetry.conditions import Conditions
from indexer.telemetry.metrics import Metrics
from tests.sync.signing_account import STORE_ALL

QUICK = HostSettings(first_wait=0.0, poll=0.01, settle=0.0, follow=0.05)
CAUGHT_UP = {"0/1": -60.0}


class WithholdingRelay(LocalRelay):
    """A relay that withholds accounts: it drops their messages, does not list them, and says `throttled`.

    Attributes:
        withheld: Their DIDs.
        invented: Names of further hosts that it lists first.
        endless: True if its list of hosts never ends, and has none.
        host_pages: Pages of this list that were requested.
        failure: The status with which it refuses each of them; None: it answers.
    """

    def __init__(self, plc: LocalPlc) -> None:
        super().__init__(plc)
        self.withheld = set[str]()
        self.invented: Sequence[str] = ()
        self.endless, self.host_pages = False, 0
        self.failure: int | None = None
        self.route(GET_REPO_STATUS, self._get_repo_status)

    def receive(self, pds: LocalPds, did: str, kind: str, payload: dict[str, Any]) -> None:
        if did not in self.withheld:
            super().receive(pds, did, kind, payload)

    async def _get_repo_status(self, request: web.Request) -> web.Response:
        did = request.query["did"]
        if did in self.withheld:
            return web.json_response({"did": did, "active": False, "status": "throttled"})
        return await self._redirect(request)

    async def list_hosts(self, request: web.Request) -> web.Response:
        self.host_pages += 1
        if self.failure is not None:
            raise XrpcError("Refused", "no such list", self.failure)
        if self.endless:
            return web.json_response({"hosts": [], "cursor": str(self.host_pages)})
        response = await super().list_hosts(request)
        hosts = orjson.loads(response.text or "")["hosts"]
        invented = [{"hostname": name, "accountCount": 1_000_000} for name in self.invented]
        return web.json_response({"hosts": hosts + invented})

    def _active_repos(self) -> list[LocalRepo]:
        return [repo for repo in super()._active_repos() if repo.did not in self.withheld]


class LyingPds(LocalPds):
    """A PDS whose list of repos has what a test wants. It counts the requests for pages.

    Attributes:
        pages: Returns the page at a cursor; None: its real list.
        requests: The cursors that were requested.
        delay: Seconds before it answers a request for a page.
        status_answer: Answers requests for the status of an account; None: as usual.
        by_collection: The accounts with records of a collection; None: it offers no such list.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pages: Callable[[str], dict[str, Any]] | None = None
        self.delay = 0.0
        self.status_answer: Callable[[web.Request], Awaitable[web.Response]] | None = None
        self.by_collection: Sequence[str] | None = None
        self.requests: list[str] = []
        self.route(LIST_REPOS, self._list_lies)
        self.route(GET_REPO_STATUS, self._tell_status)
        self.route(LIST_REPOS_BY_COLLECTION, self._list_by_collection)

    async def _list_lies(self, request: web.Request) -> web.Response:
        self.requests.append(request.query.get("cursor", ""))
        await asyncio.sleep(self.delay)
        if self.pages is None:
            return await self._list_repos(request)
        return web.json_response(self.pages(request.query.get("cursor", "")))

    async def _tell_status(self, request: web.Request) -> web.Response:
        return await (self.status_answer or self._get_repo_status)(request)

    async def _list_by_collection(self, _request: web.Request) -> web.Response:
        if self.by_collection is None:
            raise XrpcError("MethodNotImplemented", "Method Not Implemented", 501)
        return web.json_response({"repos": [{"did": did} for did in self.by_collection]})


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

    def __post_init__(self) -> None:
        self.metrics, self.conditions = Metrics(), Conditions()

    def crawl(
        self,
        settings: HostSettings = QUICK,
        *,
        track: Track = Track.ALL,
        signals: Sequence[str] = (),
        new_accounts: float = 0.0,
    ) -> HostCrawl:
        """Return a crawl of a daemon whose stream is open."""
        resolver = DidResolver(
            self.outbound, [self.network.plc_url], plc_rate=1_000, allow_private_hosts=True, clock=time
        )
        identities = IdentityCache(resolver, self.db.identities, self.metrics, clock=time, refresh_rate=inf)
        scope = Scope(track=track, signal_collections=filter_of(signals))
        return HostCrawl(
            self.db,
            self.outbound,
            identities,
            self.metrics,
            self.conditions,
            CurrentScope(self.db.scope, replace(STORE_ALL, scope=scope)),
            {self.network.relay_url: self.network.relay.url},
            lambda: self.network.relay.url,
            lambda _source: None,
            settings,
            new_accounts,
            1_000.0,
        )

    async def save_cursors(self, lags: Mapping[str, float]) -> None:
        """Store the cursors of the relay: of these shards, so many seconds behind. That of a host is not."""
        async with self.db.connection() as connection:
            await connection.execute("delete from indexer.cursor")
        now, relay = time(), self.network.relay_url
        cursors = [Cursor(relay, shard, 1, caught_up_at=now - lag) for shard, lag in lags.items()]
        cursors.append(Cursor(self.network.pdses[0].url, "0/1", 1, caught_up_at=now + 60))
        await self.db.write(Batch(cursors=tuple(cursors)))

    def name(self, pds: int = 0) -> str:
        """Return the name of a PDS."""
        return self.network.pdses[pds].url.partition("://")[2]

    async def read(self, crawl: HostCrawl | None = None, pds: int = 0) -> HostList:
        """Read the list of one PDS; return its stored state."""
        crawl = crawl or self.crawl()
        await crawl.read_hosts(self.network.relay_url)
        await crawl.read_list(self.name(pds), Work())
        return await self.stored(pds)

    async def stored(self, pds: int = 0) -> HostList:
        """Return the stored state of the list of a PDS."""
        stored = await self.db.host_lists.load(self.name(pds))
        assert stored is not None
        return stored

    async def view(self, pds: int = 0, name: str = "hosts") -> dict[str, Any]:
        """Return the row of a PDS in a public view."""
        async with self.db.connection() as connection:
            query = f"select * from atproto.{name} where host = $1"  # noqa: S608
            row = await connection.fetchrow(query, self.name(pds))
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
        hosts = Hosts(network, db, outbound)
        await hosts.save_cursors(CAUGHT_UP)
        yield hosts
