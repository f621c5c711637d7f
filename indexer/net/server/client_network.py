"""Determine the network of a client. Each network has a share of the HTTP server, however many clients it has."""

from functools import lru_cache

from aiohttp import web

from indexer.net.http.public_addresses import is_public, network_of

FORWARDED_FOR = "X-Forwarded-For"


def client_network(request: web.Request) -> str:
    """Return the network of the client: an IPv4 address, or an IPv6 network of 64 bits.

    A peer without a public address (loopback, a private network) may be a reverse proxy. Then the last address of the
    header X-Forwarded-For is the client's: the proxy has set or appended it. Without the header, all clients of the
    proxy count as one. A client that connects from such an address itself, or whose proxy passes on its header, can
    name any address. So a network only decides about shares, and never about access.
    """
    peer = request.remote or ""
    client = peer if _is_public(peer) else request.headers.getall(FORWARDED_FOR, [peer])[-1].rpartition(",")[2].strip()
    return peer_network(client) or peer_network(peer)


@lru_cache(maxsize=4_096)
def peer_network(address: str) -> str:
    """Return the network of an IP address; "" for any other text."""
    try:
        return network_of(address)
    except ValueError:
        return ""


_is_public = lru_cache(maxsize=4_096)(is_public)
