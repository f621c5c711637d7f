"""A scripted host with lists of repos, and reconciliations with it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from math import inf
from time import time
from typing import Any

import asyncpg
import orjson

from indexer.db import Database
from indexer.db.crawls import CrawlProgress
from indexer.db.gaps import OpenGaps
from indexer.db.scope import CurrentScope
from indexer.errors import UnavailableError
from indexer.net.http.http_client import OutboundClient
from indexer.net.identity.did_resolver import DidResolver
from indexer.net.identity.identity_cache import IdentityCache
from indexer.reasons import FetchFailure
from indexer.sync.identity import StoredIdentity
from indexer.sync.repo import Repo, StreamPoint
from indexer.sync.scope import Scope, Track
from indexer.sync.shard import Shard
from indexer.tasks.reconcile import Reconciliation, ReconciliationSettings
from indexer.telemetry.metrics import Metrics
from tests.db.repo_rows import did, head, synchronized
from tests.net.http.scripted_host import Script, ScriptedHost, http_response
from tests.net.pds.missing_methods import MissingMethodAnswer
from tests.sync.signing_account import STORE_ALL

OLDER, STORED, NEWER = "3laaaaaaaaa22", "3laaaaaaaab22", "3laaaaaaaac22"
DAY = 86_400.0
NO_WAIT = ReconciliationSettings(Shard(), interval=DAY, settle=0.0, poll=0.01, first_retry=0.01)
FAILURE = http_response(status=404)  # unlike a 5xx status, this does not make the client pause requests to the host
HIDDEN: dict[str, Any] = {"active": False, "hosting_status": "deactivated"}
_PATH = "/xrpc/com.atproto.sync.listRepos?limit=1000"


def stored(name: object, **fields: Any) -> Repo:
    return synchronized(name, head=head(STORED), **fields)


def page(*entries: tuple[str, str] | dict[str, object], cursor: str | None = None) -> bytes:
    """Return a page of accounts, each given as (DID, rev) or as the complete entry."""
    repos = [{"did": entry[0], "rev": entry[1]} if isinstance(entry, tuple) else entry for entry in entries]
    return http_response(orjson.dumps({"repos": repos} | ({"cursor": cursor} if cursor else {})))


def path(cursor: str | None = None) -> str:
    return f"{_PATH}&cursor={cursor}" if cursor else _PATH


def requested_cursors(host: ScriptedHost) -> list[str | None]:
    """Return the cursors of all requests, in order."""
    lines = [request.split(" ")[1] for request in host.requests]
    return [line.partition("&cursor=")[2] or None for line in lines]


def list_path(collection: str) -> str:
    """Return the path of the list of repos with records of a collection."""
    return f"/xrpc/com.atproto.sync.listReposByCollection?limit=2000&collection={collection}"


def list_of(*names: str) -> bytes:
    return http_response(orjson.dumps({"repos": [{"did": did(name)} for name in names]}))


def status_path(name: str) -> str:
    return f"/xrpc/com.atproto.sync.getRepoStatus?did={did(name)}"


def status_response(name: str, *, active: bool, status: str = "deactivated") -> bytes:
    return http_response(orjson.dumps({"did": did(name), "active": active} | ({} if active else {"status": status})))


def missing_method(server: MissingMethodAnswer) -> bytes:
    """Return the response of a server to a method that it does not offer."""
    body = orjson.dumps({"error": server.name, "message": f"{server.message} com.atproto.sync.method"})
    return http_response(body if server.name else b"Not Found", status=server.status)


def after(action: Callable[[], Awaitable[object]], response: bytes) -> Script:
    """Return a script that does something just before it sends the response."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        await action()
        writer.write(response)
        await writer.drain()

    return answer


class NoDirectory(DidResolver):
    """A directory that never answers."""

    def __init__(self) -> None:
        """Need no client."""

    async def resolve(self, did: str, *, known: bool = True) -> StoredIdentity:  # noqa: ARG002 - as the cache calls it
        raise UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE, "the directory is down")


@dataclass
class Crawl:
    """The database, and a host with a list of repos."""

    db: Database
    sql: asyncpg.Connection
    host: ScriptedHost
    outbound: OutboundClient
    metrics: Metrics = field(default_factory=Metrics)

    def lists(self, *entries: tuple[str, str] | dict[str, object], cursor: str | None = None) -> None:
        """Let the first page of the list have these accounts; the next one follows at the cursor."""
        self.host.pages[path()] = page(*entries, cursor=cursor)

    def tells(self, name: str, *, active: bool) -> None:
        """Let the host tell the status of an account."""
        self.host.pages[status_path(name)] = status_response(name, active=active)

    def requests_for(self, name: str) -> int:
        return sum(status_path(name).lower() in request for request in self.host.requests)

    def scope(self, track: Track = Track.LISTED) -> CurrentScope:
        return CurrentScope(self.db.scope, replace(STORE_ALL, scope=Scope(track=track)))

    def gaps(self, settings: ReconciliationSettings = NO_WAIT) -> OpenGaps:
        return OpenGaps(self.db.gaps, settings.shard, self.metrics)

    def reconciliation(
        self,
        settings: ReconciliationSettings = NO_WAIT,
        *,
        gaps: OpenGaps | None = None,
        sources: Sequence[str] | None = None,
        identities: IdentityCache | None = None,
        track: Track = Track.LISTED,
        stream_point: Callable[[str], StreamPoint | None] = lambda _source: None,
        sources_are_hosts: bool = False,
    ) -> Reconciliation:
        """Return the reconciliation of a daemon whose stream from the first source, or else from the host, is open."""
        return Reconciliation(
            self.db,
            self.outbound,
            self.metrics,
            gaps or self.gaps(settings),
            lambda: [self.host.url] if sources is None else sources[:1],
            stream_point,
            self.scope(track),
            settings,
            identities or IdentityCache(NoDirectory(), self.db.identities, self.metrics, clock=time, refresh_rate=inf),
            sources_are_hosts=sources_are_hosts,
        )

    async def reconcile(self, reconciliation: Reconciliation | None = None, **options: Any) -> CrawlProgress:
        """Compare the list of the host once."""
        reconciliation = reconciliation or self.reconciliation(**options)
        return await reconciliation.reconcile(self.host.url, lambda _progress: None)

    async def row(self, name: str) -> Repo:
        return (await self.db.repos.load([did(name)]))[did(name)]

    async def inactive(self) -> list[str]:
        return [row["did"] for row in await self.sql.fetch("select did from indexer.repo where not active")]

    async def behind(self) -> dict[str, str]:
        query = "select did, latest_unverified_rev from indexer.repo where sync_reason = 'behind'"
        return {row["did"]: row["latest_unverified_rev"] for row in await self.sql.fetch(query)}

    async def progress(self) -> CrawlProgress | None:
        return await self.db.crawls.progress("sweep", self.host.url)


@asynccontextmanager
async def running(reconciliation: Reconciliation) -> AsyncIterator[None]:
    """Run the reconciliation as the daemon does."""
    task = asyncio.create_task(reconciliation.run())
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
