"""Clients of `/subscribe` that send without end, or nothing at all: commits and other subscribers go on."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import aiohttp
import pytest

from indexer.net.server.address import Address
from indexer.readers.connection import READ_BYTES_PER_SECOND
from indexer.readers.jetstream import subscriber
from tests.daemon.running_daemon import LIKE, post
from tests.readers.jetstream_client import describe, feed, subscribed
from tests.waiting import until

pytestmark = pytest.mark.slow

HANDSHAKE = b"""GET /subscribe?requireHello=true HTTP/1.1\r
Host: x\r
Connection: Upgrade\r
Upgrade: websocket\r
Sec-WebSocket-Version: 13\r
Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r
\r
"""
MASK = b"\x00\x00\x00\x00"
FRAMES = {
    "fragments without an end": (b"\x01\x80" + MASK, b"\x00\x80" + MASK),
    "binary messages": (b"", b"\x82\xfe\x0f\xff" + MASK + bytes(0x0FFF)),
}
"""For each attack: the bytes that a client sends once, and the bytes that it then repeats without end."""
COMMITS = 60
BUFFER_BYTES = 12 << 20
"""More than the operating system and the daemon buffer of one connection."""


@contextmanager
def hostile_sockets(count: int) -> Iterator[list[socket.socket]]:
    """Open sockets of another network than that of the other clients."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for opened in sockets:
            opened.setblocking(False)
            opened.bind(("127.0.0.9", 0))
        yield sockets
    finally:
        for opened in sockets:
            opened.close()


async def send_without_end(client: socket.socket, address: Address, first: bytes, data: bytes, sent: list[int]) -> None:
    """Send the data again and again, and count its bytes in `sent`."""
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, tuple(address))
    await loop.sock_sendall(client, HANDSHAKE + first)
    while True:
        await loop.sock_sendall(client, data)
        sent[0] += len(data)


@pytest.mark.parametrize(("first", "frame"), FRAMES.values(), ids=FRAMES)
async def test_no_client_makes_the_daemon_read_without_end(
    database: str, tmp_path: Path, first: bytes, frame: bytes
) -> None:
    async with feed(database, tmp_path) as (daemon, address), subscribed(address) as client:
        account = daemon.create_account("ada.test", records=1)
        await daemon.wait_until_equal()
        assert describe(await client.next()).startswith("create")
        data, sent, began = frame * ((1 << 18) // len(frame)), [0], monotonic()
        with hostile_sockets(1) as [hostile]:
            sending = asyncio.create_task(send_without_end(hostile, address, first, data, sent))
            await until(lambda: sent[0] > 0)
            for number in range(COMMITS):
                account.create(LIKE, post("like"), rkey=f"{number}")
                assert describe(await client.next()) == f"create {LIKE}/{number}"
            assert not sending.done()
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        assert sent[0] < BUFFER_BYTES + READ_BYTES_PER_SECOND * (monotonic() - began)


async def test_pings_are_limited_like_messages(database: str, tmp_path: Path) -> None:
    async with feed(database, tmp_path, roles="feed") as (_, address), subscribed(address) as client:
        began = monotonic()
        pongs = [await client.connection.ping() for _ in range(10)]
        await asyncio.gather(*pongs)
        assert monotonic() - began > 9 * subscriber.MESSAGE_SECONDS


async def test_subscriber_that_says_no_hello_is_disconnected(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber, "HELLO_SECONDS", 0.05)
    async with feed(database, tmp_path, roles="feed") as (daemon, address):
        async with subscribed(address, ("requireHello", "true")) as client:
            assert (await client.rest())[1] == (1008, "no options_update came in time after requireHello=true")
        await until(lambda: daemon.counter("feed_disconnections", kind="jetstream", reason="no-hello") == 1)


async def test_network_that_has_all_websockets_gives_one_to_another(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber, "CLOSE_SECONDS", 0.1)  # the displaced client does not answer
    async with feed(database, tmp_path) as (daemon, address), aiohttp.ClientSession() as session:
        with hostile_sockets(112) as sockets:
            loop = asyncio.get_running_loop()
            for opened in sockets:
                await loop.sock_connect(opened, tuple(address))
                await loop.sock_sendall(opened, HANDSHAKE)
                assert await loop.sock_recv(opened, 4_096)
            async with subscribed(address) as client:
                account = daemon.create_account("ada.test", records=1)
                assert (await client.next())["did"] == account.did
                await daemon.wait_until_equal()
            await until(lambda: daemon.counter("feed_disconnections", kind="jetstream", reason="displaced") == 1)
            received = b""
            while b"your network has the most connections" not in received:
                received += (piece := await loop.sock_recv(sockets[-1], 4_096))
                assert piece, received
            await until(lambda: daemon.stages.jetstream_reader.subscribers == 111)
            replaced = {"X-Forwarded-For": "127.0.0.9"}
            async with session.ws_connect(f"http://{address}/subscribe", headers=replaced):
                with pytest.raises(aiohttp.WSServerHandshakeError, match="503"):
                    await session.ws_connect(f"http://{address}/subscribe", headers=replaced)
            assert daemon.counter("feed_disconnections", kind="jetstream", reason="refused") == 1
