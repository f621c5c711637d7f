"""Streams of hosts, whose names come from outside, are opened by the rules of all other requests."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from websockets.asyncio.server import ServerConnection, serve

from indexer.net.http.http_client import OutboundClient
from indexer.net.relay.stream_socket import STREAM_PATH, ConnectionSettings, StreamSocketError, open_stream
from indexer.reasons import FetchFailure
from tests.net.http.conftest import OutboundWorld
from tests.net.http.scripted_host import http_response

PUBLIC, PRIVATE = "93.184.216.34", "10.0.0.7"
PDS = "https://pds.example"


@asynccontextmanager
async def stream_server(world: OutboundWorld, certificate: Path) -> AsyncIterator[None]:
    """Let all names and addresses lead to a server that sends one message to each connection."""

    async def send(connection: ServerConnection) -> None:
        await connection.send(b"message")
        await connection.wait_closed()

    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    async with serve(send, "127.0.0.1", 0, ssl=tls) as server:
        world.host.port = server.sockets[0].getsockname()[1]
        yield


async def first_message(client: OutboundClient, url: str) -> bytes:
    async with open_stream(url, None, 1_000, "tests", ConnectionSettings(), client.opening) as stream:
        return await stream.receive()


async def error_of(client: OutboundClient, url: str) -> str:
    with pytest.raises(StreamSocketError) as failure:
        await first_message(client, url)
    return str(failure.value)


async def test_stream_goes_to_the_address_that_was_checked(
    world: OutboundWorld, public_client: OutboundClient, certificate: Path
) -> None:
    """DNS rebinding: the first lookup gives a public address, all later ones a private address."""
    world.names["pds.example"] = [[PRIVATE, PUBLIC], [PRIVATE]]
    async with stream_server(world, certificate):
        assert await first_message(public_client, PDS) == b"message"
    assert world.connected == [(PUBLIC, 443)]
    assert len(world.lookups) == 1


@pytest.mark.parametrize(
    "url",
    [
        "https://inside.example", "https://127.0.0.1", "https://[::1]", "https://[::ffff:10.0.0.7]",
        "http://pds.example", "https://pds.example:8443", "https://user@pds.example",
    ],
)  # fmt: skip
async def test_stream_to_any_other_address_is_refused(
    world: OutboundWorld, public_client: OutboundClient, certificate: Path, url: str
) -> None:
    world.names |= {"pds.example": [[PUBLIC]], "inside.example": [[PRIVATE]]}
    async with stream_server(world, certificate):
        assert FetchFailure.REFUSED_ADDRESS in await error_of(public_client, url)
    assert world.connected == []


async def test_certificate_of_a_stream_must_be_for_its_host(
    world: OutboundWorld, public_client: OutboundClient, certificate: Path
) -> None:
    world.names["other.example"] = [[PUBLIC]]
    async with stream_server(world, certificate):
        assert FetchFailure.UNREACHABLE in await error_of(public_client, "https://other.example")


async def test_host_without_a_stream_is_paused_and_a_redirect_is_not_followed(
    world: OutboundWorld, public_client: OutboundClient
) -> None:
    world.names["pds.example"] = [[PUBLIC]]
    for status in (302, 500, 500, 500, 500, 500):
        world.host.pages[STREAM_PATH] = http_response(status=status, headers={"Location": "https://pds.example/x"})
        assert f"HTTP {status}" in await error_of(public_client, PDS)
    assert FetchFailure.HOST_PAUSED in await error_of(public_client, PDS)
    assert len(world.host.requests) == 6


async def test_pause_that_a_host_asks_for_is_kept(world: OutboundWorld, public_client: OutboundClient) -> None:
    world.names["pds.example"] = [[PUBLIC]]
    world.host.pages[STREAM_PATH] = http_response(status=429, headers={"Retry-After": "600"})
    assert "HTTP 429" in await error_of(public_client, PDS)
    assert FetchFailure.THROTTLED in await error_of(public_client, PDS)
    assert len(world.host.requests) == 1
