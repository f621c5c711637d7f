"""The status page at `/`: its static files, its data as JSON, and the lookup of one account.

The page is self-contained: it loads nothing from other hosts. Its Content-Security-Policy allows no inline script or
style, so that a text from another host cannot become code, even if the page has a bug.
"""

import asyncio
import gzip
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.resources import files
from math import inf
from time import monotonic
from typing import Any

import orjson
from aiohttp import hdrs, web
from aiolimiter import AsyncLimiter

from indexer.atproto.syntax import normalize_account
from indexer.db import DatabaseError
from indexer.serve.status_document import StatusDocument

DOCUMENT_SECONDS = 1.0
"""Time for which the document is not computed again, however often it is requested."""
LOOKUPS_PER_SECOND = 5.0
MAX_LOOKUPS = 2
"""Concurrent lookups: each one uses a connection of the database."""
LOOKUP_TIMEOUT = 5.0
STATIC_FILES = {
    "/": ("index.html", "text/html"),
    "/page/status.css": ("status.css", "text/css"),
    "/page/status.js": ("status.js", "text/javascript"),
    "/page/format.js": ("format.js", "text/javascript"),
    "/page/charts.js": ("charts.js", "text/javascript"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
    "/page/uplot/uPlot.iife.min.js": ("uplot/uPlot.iife.min.js", "text/javascript"),
    "/page/uplot/uPlot.min.css": ("uplot/uPlot.min.css", "text/css"),
}
"""The files of the folder `page` and their content types, by path of the URL."""

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    hdrs.CACHE_CONTROL: "no-cache",
}


Document = Callable[[], StatusDocument]
"""Returns the present state."""
Account = Callable[[str], Awaitable[Mapping[str, Any] | None]]
"""Returns the state of a DID or of a handle in lower case; None if it is not in the database. It raises
`DatabaseError` if the database is unavailable."""


def status_routes(document: Document, account: Account) -> Sequence[web.RouteDef]:
    """Return the routes of the page."""
    static = [web.get(path, _StaticFile(*file).respond) for path, file in STATIC_FILES.items()]
    return [
        *static,
        web.get("/status.json", _DocumentResponse(document).respond),
        web.get("/account.json", _Lookups(account).respond),
    ]


class _StaticFile:
    """Serves a file of the package, which is read once."""

    def __init__(self, name: str, content_type: str) -> None:
        self._body = files("indexer.serve").joinpath("page", *name.split("/")).read_bytes()
        self._content_type = content_type

    async def respond(self, _: web.Request) -> web.Response:
        return web.Response(body=self._body, content_type=self._content_type, charset="utf-8", headers=_HEADERS)


class _DocumentResponse:
    """Serves the document, computed and compressed at most once per `DOCUMENT_SECONDS`."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._computed_at = -inf
        self._body = self._compressed = b""

    async def respond(self, request: web.Request) -> web.Response:
        if monotonic() - self._computed_at >= DOCUMENT_SECONDS:
            self._body = orjson.dumps(self._document().to_json())
            self._compressed = gzip.compress(self._body)
            self._computed_at = monotonic()
        if "gzip" in request.headers.get(hdrs.ACCEPT_ENCODING, ""):
            return _json_response(self._compressed, headers={hdrs.CONTENT_ENCODING: "gzip"})
        return _json_response(self._body)


class _Lookups:
    """Serves the state of one account. The number of lookups is limited for all clients together."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._rate = AsyncLimiter(2 * LOOKUPS_PER_SECOND, 2.0)
        self._running = 0

    async def respond(self, request: web.Request) -> web.Response:
        text = request.query.get("account", "").strip()
        account = normalize_account(text)
        if account is None:
            return _error(400, f"{text[:80]!r} is neither a DID nor a handle")
        if self._running >= MAX_LOOKUPS or not self._rate.has_capacity():
            return _error(429, "too many lookups; try again in a second", {hdrs.RETRY_AFTER: "1"})
        self._running += 1
        try:
            await self._rate.acquire()
            async with asyncio.timeout(LOOKUP_TIMEOUT):
                found = await self._account(account)
        except (DatabaseError, TimeoutError):
            return _error(503, "the database does not answer; try again later")
        finally:
            self._running -= 1
        if found is not None:
            return _json_response(orjson.dumps({"found": True, **found}))
        hint = "" if account.startswith("did:") else " A handle is found only after it was verified; try the DID."
        answer = {"found": False, "summary": [f"{account} is not in the database.{hint}"]}  # an answer, not an error
        return _json_response(orjson.dumps(answer))


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return _json_response(orjson.dumps({"error": message}), status, headers)


def _json_response(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    no_store = _HEADERS | {hdrs.CACHE_CONTROL: "no-store"} | (headers or {})
    return web.Response(body=body, status=status, content_type="application/json", headers=no_store)
