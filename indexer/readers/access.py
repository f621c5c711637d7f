"""Decide which clients may use the paths of a feed that change something or acknowledge events; answer as JSON."""

import hmac
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping
from ipaddress import ip_address
from typing import Any

import orjson
from aiohttp import hdrs, web

from indexer.db import DatabaseError
from indexer.errors import InvalidScopeError

USER = "admin"
"""The user name of Basic authentication, as clients of tap send it."""

MAX_BODY_BYTES = 1 << 20
"""Size of the body of a request: about 29,000 did:plc. It is the default of aiohttp's applications."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_CHALLENGE: dict[str, str] = {hdrs.WWW_AUTHENTICATE: f'Basic realm="{USER}", charset="UTF-8"'}


def answer(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return a response with a JSON body."""
    return web.Response(body=orjson.dumps(body), status=status, headers=headers, content_type="application/json")


def rev_header(rev: str | None) -> dict[str, str]:
    """Return the header by which PDSes say the rev of an account, too; none if there is no rev."""
    return {"Atproto-Repo-Rev": rev} if rev else {}


def problem(status: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return a response that says in one sentence what is wrong."""
    return answer({"message": message}, status, headers)


class Access:
    """Admits clients with the password. Without a password, it admits clients on loopback that are no web pages.

    A browser sends the header `Origin` with each websocket and each POST or PUT of a page, so that pages of other sites
    cannot use a feed on the machine of their visitor.
    """

    def __init__(self, password: str | None) -> None:
        self._credentials = None if password is None else b64encode(f"{USER}:{password}".encode())

    def guard(self, handler: Handler) -> Handler:
        """Return a handler that answers clients that are not admitted with status 401 or 403.

        Every error has a JSON body, also those of the HTTP server itself, such as a body that is too large. A scope
        that is not valid is answered with 400, and any request with 503 while the database does not answer.
        """

        async def guarded(request: web.Request) -> web.StreamResponse:
            try:
                return self._refusal(request) or await handler(request)
            except web.HTTPRequestEntityTooLarge:
                return problem(413, f"the body has more than {MAX_BODY_BYTES:,} bytes; send it in parts")
            except InvalidScopeError as error:
                return problem(400, str(error))
            except DatabaseError:
                return problem(503, "the database does not answer; try again later")
            except web.HTTPException as error:
                return problem(error.status, error.text or error.reason)

        return guarded

    def _refusal(self, request: web.Request) -> web.Response | None:
        if self._credentials is not None:
            if _has_credentials(request.headers.get(hdrs.AUTHORIZATION, ""), self._credentials):
                return None
            message = f"Basic authentication as {USER} is required, but the password is missing or wrong"
            return problem(401, message, _CHALLENGE)
        if not _is_loopback(request.remote):
            return problem(403, "only loopback clients are admitted; set INDEXER_ADMIN_PASSWORD to admit others")
        if hdrs.ORIGIN in request.headers:
            return problem(403, "web pages are not admitted; set INDEXER_ADMIN_PASSWORD to admit them")
        return None


def _has_credentials(header: str, credentials: bytes) -> bool:
    scheme, _, sent = header.partition(" ")
    # Only this encoding is accepted, which is the one that every client sends. The time tells nothing of the password.
    return scheme.lower() == "basic" and hmac.compare_digest(sent.strip().encode(errors="replace"), credentials)


def _is_loopback(address: str | None) -> bool:
    """Return True for a loopback address, and for an IPv4 one in an IPv6 address."""
    try:
        parsed = ip_address(address or "")
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback
