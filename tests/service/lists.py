"""A host that lists accounts, a page for each cursor, and fails when told to."""

import orjson

from tests.outbound.host import Host, answer

LIST = "/xrpc/com.atproto.sync.listRepos?limit=1000"
BROKEN = answer(status=404)  # five that are its own fault in a row, and a host is left alone for a while


def page(*entries: tuple[str, str] | dict[str, object], cursor: str | None = None) -> bytes:
    """Of accounts as (DID, rev), or as they come."""
    repos = [{"did": entry[0], "rev": entry[1]} if isinstance(entry, tuple) else entry for entry in entries]
    return answer(orjson.dumps({"repos": repos} | ({"cursor": cursor} if cursor else {})))


def path(cursor: str | None = None) -> str:
    return f"{LIST}&cursor={cursor}" if cursor else LIST


def asked(host: Host) -> list[str | None]:
    """The cursors in the order in which they were asked for."""
    lines = [request.split(" ")[1] for request in host.requests]
    return [line.partition("&cursor=")[2] or None for line in lines]
