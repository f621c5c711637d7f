"""HTTP clients for the tests of the local hosts."""

import ssl
from functools import cache
from typing import Any

import httpx


@cache
def default_tls() -> ssl.SSLContext:
    """Return the TLS context of all clients. Each context reads the certificates of the system, which takes 40 ms."""
    return httpx.create_ssl_context()


def http_client(**options: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(verify=default_tls(), **options)
