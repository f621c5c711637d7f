"""The paths by which clients of tap choose repos and collections, and ask for the state of repos and of the feed."""

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson
from aiohttp import web

from indexer.atproto.did_document import build_did_document
from indexer.atproto.limits import max_items
from indexer.atproto.syntax import is_did
from indexer.db import Database, DatabaseError
from indexer.db.tap_feed import CountedTable
from indexer.errors import InvalidScopeError, UnavailableError
from indexer.net.identity.identity_cache import IdentityCache
from indexer.readers.access import Access, Handler, answer, problem, rev_header
from indexer.reasons import Desync
from indexer.sync.identity import INVALID_HANDLE
from indexer.sync.repo import SyncStatus

MAX_QUERIES = 2
"""Concurrent requests about repos and tables: each one uses a connection of the database, and may count many rows."""
MAX_ITEMS = 65_536
"""Maximum number of items in the JSON of a body. They are counted before it is decoded."""


_COUNTED_TABLES: dict[str, CountedTable] = {
    "repo-count": "repo",
    "record-count": "record",
    "resync-buffer": "buffered_event",
}


class TapRoutes:
    """Changes the scope, and answers questions about repos and about the feed as a whole."""

    def __init__(self, db: Database, identities: IdentityCache) -> None:
        self._db = db
        self._identities = identities
        self._queries = asyncio.Semaphore(MAX_QUERIES)

    def routes(self, access: Access) -> Sequence[web.RouteDef]:
        """Return the routes, for clients that are admitted."""
        handlers: dict[tuple[str, str], Handler] = {
            ("GET", "/info/{did}"): self._info,
            ("GET", "/resolve/{did}"): self._resolve,
            ("GET", "/stats/{name}"): self._statistic,
            ("GET", "/collection-filters"): self._collections,
            ("PUT", "/collection-filters"): self._collections,
            ("GET", "/signal-collections"): self._collections,
            ("PUT", "/signal-collections"): self._collections,
            ("POST", "/repos/add"): self._add,
            ("POST", "/repos/remove"): self._remove,
        }
        return [web.route(*route, access.guard(handler)) for route, handler in handlers.items()]

    async def _add(self, request: web.Request) -> web.Response:
        await self._db.scope.track(await _texts(request, "dids"))
        return web.Response()

    async def _remove(self, request: web.Request) -> web.Response:
        await self._db.scope.untrack(await _texts(request, "dids"))
        return web.Response()

    async def _collections(self, request: web.Request) -> web.Response:
        """Answer the collections of the scope, or its signal collections. A PUT changes them first."""
        of_signal = request.path == "/signal-collections"
        if request.method == "GET":
            scope = await self._db.scope.load()
        elif of_signal:
            scope = await self._db.scope.change(signal_collections=await _texts(request, "collections"))
        else:
            scope = await self._db.scope.change(collections=await _texts(request, "collections") or ["*"])
        patterns = (scope.signal_patterns if of_signal else scope.collections.patterns) if scope else ()
        return answer({"collections": list(patterns)})

    async def _info(self, request: web.Request) -> web.Response:
        did = request.match_info["did"]
        async with self._queries:
            report = await self._db.reports.repo(did) if is_did(did) else None
        if report is None or not report["tracked"]:
            return problem(404, "repo not found")
        info = {
            "did": report["did"],
            "error": report["last_error"] or "",
            "handle": report["handle"] or "",
            "records": report["records"],
            "retries": report["resync_attempts"],
            "rev": report["rev"] or "",
            "state": _state(report),
        }
        return answer(info, headers=rev_header(report["rev"] if report["visible"] else None))

    async def _resolve(self, request: web.Request) -> web.Response:
        did = request.match_info["did"]
        if not is_did(did):
            return problem(400, "improperly formatted DID")
        try:
            await self._identities.lookup(did)
        except DatabaseError:
            raise
        except UnavailableError as error:
            return problem(500, f"failed to resolve DID: {error}")
        identity = (await self._db.identities.load([did])).get(did)
        repo = (await self._db.repos.load([did])).get(did)
        if identity is None or (identity.problem and identity.pds is None and identity.signing_key is None):
            return problem(404, "DID not found")
        handle = None if identity.handle == INVALID_HANDLE else identity.handle
        document = build_did_document(did, handle, identity.signing_key, identity.pds)
        return answer(document, headers=rev_header(repo.shown_rev if repo else None))

    async def _statistic(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        async with self._queries:
            if name == "cursors":
                newest = max(await self._db.gaps.cursors(), key=lambda cursor: cursor.updated_at, default=None)
                return answer({"firehose": newest.seq if newest else 0, "list_repos": ""})
            if name == "outbox-buffer":
                return answer({"outbox_buffer": await self._db.feed.changes_behind()})
            if (table := _COUNTED_TABLES.get(name)) is not None:
                return answer({name.replace("-", "_"): await self._db.feed.count_rows(table)})
        return problem(404, "no such statistic")


def _state(report: dict[str, Any]) -> str:
    """Return the state of a repo in the words of tap."""
    match report["sync_status"]:
        case SyncStatus.SYNCHRONIZED:
            return "active"
        case SyncStatus.IN_PROGRESS:
            return "resyncing"
    if report["last_error"]:
        return "error"
    return "pending" if report["sync_reason"] == Desync.NEW else "desynchronized"


async def _texts(request: web.Request, name: str) -> list[str]:
    """Return a list of strings, the only field of a JSON body.

    Raises:
        InvalidScopeError: The body is something else.
    """
    text = await request.read()
    try:
        body: Any = orjson.loads(text) if max_items(text) <= MAX_ITEMS else None
    except orjson.JSONDecodeError:
        body = None
    texts = body.get(name) if isinstance(body, dict) else None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InvalidScopeError(f'the body must be JSON of the form {{"{name}": ["…"]}}')
    return texts
