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
    """Return the routes of the page.

    The document is computed and compressed at most once per `DOCUMENT_SECONDS`. The number of lookups of accounts is
    limited for all clients together.
    """
    computed_at, body, compressed = -inf, b"", b""
    rate, slots = AsyncLimiter(2 * LOOKUPS_PER_SECOND, 2.0), asyncio.Semaphore(MAX_LOOKUPS)

    async def show_document(request: web.Request) -> web.Response:
        nonlocal computed_at, body, compressed
        if monotonic() - computed_at >= DOCUMENT_SECONDS:
            body = orjson.dumps(document().to_json())
            compressed = gzip.compress(body)
            computed_at = monotonic()
        if "gzip" in request.headers.get(hdrs.ACCEPT_ENCODING, ""):
            return _json_response(compressed, headers={hdrs.CONTENT_ENCODING: "gzip"})
        return _json_response(body)

    async def look_up(request: web.Request) -> web.Response:
        text = request.query.get("account", "").strip()
        name = normalize_account(text)
        if name is None:
            return _error(400, f"{text[:80]!r} is neither a DID nor a handle")
        if slots.locked() or not rate.has_capacity():
            return _error(429, "too many lookups; try again in a second", {hdrs.RETRY_AFTER: "1"})
        try:
            async with slots, asyncio.timeout(LOOKUP_TIMEOUT):
                await rate.acquire()
                found = await account(name)
        except (DatabaseError, TimeoutError):
            return _error(503, "the database does not answer; try again later")
        if found is not None:
            return _json_response(orjson.dumps({"found": True, **found}))
        hint = "" if name.startswith("did:") else " A handle is found only after it was verified; try the DID."
        answer = {"found": False, "summary": [f"{name} is not in the database.{hint}"]}  # an answer, not an error
        return _json_response(orjson.dumps(answer))

    static = [web.get(path, _serve_file(*file)) for path, file in STATIC_FILES.items()]
    return [*static, web.get("/status.json", show_document), web.get("/account.json", look_up)]


def _serve_file(name: str, content_type: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return a handler that serves a file of the package, which is read once."""
    body = files("indexer.serve").joinpath("page", *name.split("/")).read_bytes()

    async def respond(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type=content_type, charset="utf-8", headers=_HEADERS)

    return respond


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return _json_response(orjson.dumps({"error": message}), status, headers)


def _json_response(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    no_store = _HEADERS | {hdrs.CACHE_CONTROL: "no-store"} | (headers or {})
    return web.Response(body=body, status=status, content_type="application/json", headers=no_store)
