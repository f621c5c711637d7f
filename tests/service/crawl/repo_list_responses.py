"""Responses of a scripted host to requests for its repo list, one page per cursor."""

import orjson

from tests.outbound.scripted_host import ScriptedHost, http_response

PATH = "/xrpc/com.atproto.sync.listRepos?limit=1000"
FAILURE = http_response(status=404)  # unlike a 5xx status, this does not make the client pause requests to the host


def page(*entries: tuple[str, str] | dict[str, object], cursor: str | None = None) -> bytes:
    """Return a page of accounts, each given as (DID, rev) or as the complete entry."""
    repos = [{"did": entry[0], "rev": entry[1]} if isinstance(entry, tuple) else entry for entry in entries]
    return http_response(orjson.dumps({"repos": repos} | ({"cursor": cursor} if cursor else {})))


def path(cursor: str | None = None) -> str:
    return f"{PATH}&cursor={cursor}" if cursor else PATH


def requested_cursors(host: ScriptedHost) -> list[str | None]:
    """Return the cursors of all requests, in order."""
    lines = [request.split(" ")[1] for request in host.requests]
    return [line.partition("&cursor=")[2] or None for line in lines]
