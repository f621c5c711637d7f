"""Requests to hosts that respond correctly, slowly, incompletely or not at all."""

import asyncio
import gzip
import tracemalloc
from dataclasses import replace

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from indexer.net.http.host_limits import RateLimits
from indexer.net.http.http_client import OutboundClient, Response
from indexer.reasons import FetchFailure
from tests.net.http.conftest import LOCAL, SHORT_TIMEOUTS
from tests.net.http.http_requests import CHUNKED, failure_of, read_all, reset, writes
from tests.net.http.scripted_host import Script, ScriptedHost, gzip_response, hang, http_response


def impatient(**limits: float) -> OutboundClient:
    """Return a client for local networks with some other time limits."""
    return OutboundClient(replace(LOCAL, timeouts=replace(SHORT_TIMEOUTS, **limits)))


async def test_headers_of_a_request(host: ScriptedHost, outbound: OutboundClient) -> None:
    host.pages["/a?did=did:plc:x"] = http_response(b"{}", headers={"X-Thing": "1"})
    response = await outbound.get(f"{host.url}/a?did=did:plc:x", max_bytes=10)
    assert response == Response(200, response.headers, b"{}", response.server)
    assert response.headers["x-thing"] == response.headers["X-THING"] == "1"
    line, *fields = host.requests[0].split("\r\n")
    assert line == "get /a?did=did:plc:x http/1.1"
    assert dict(field.split(": ", 1) for field in fields if field) == {
        "host": f"127.0.0.1:{host.port}",
        "user-agent": "test (mailto:someone@example.com)",
        "accept": "application/json",
        "accept-encoding": "gzip",
    }


async def test_cookies_credentials_and_proxies_are_not_used(
    host: ScriptedHost, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    netrc = tmp_path_factory.mktemp("home") / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password secret\n")
    for name, value in {"HTTP_PROXY": "http://127.0.0.1:1", "ALL_PROXY": "http://127.0.0.1:1", "NETRC": netrc}.items():
        monkeypatch.setenv(name, str(value))
        monkeypatch.setenv(name.lower(), str(value))
    host.pages["/"] = http_response(b"{}", headers={"Set-Cookie": "session=1; Path=/"})
    async with OutboundClient(LOCAL) as outbound:
        for _ in range(2):
            await outbound.get(f"{host.url}/", max_bytes=10)
    assert "cookie" not in host.requests[1]
    assert "authorization" not in host.requests[1]


async def test_connections_are_reused_also_after_redirects_and_errors(
    host: ScriptedHost, outbound: OutboundClient
) -> None:
    host.pages["/"] = http_response(b"<html>", status=302, headers={"Location": "/there"})
    host.pages["/there"] = gzip_response(b"{}")
    host.pages["/not"] = http_response(b"{}", status=404)
    for page in ("/", "/not", "/"):
        await outbound.get(f"{host.url}{page}", max_bytes=10)
    assert host.connections == 1


@pytest.mark.parametrize("status", [204, 404, 503])
async def test_error_statuses_are_returned_with_a_truncated_body(
    host: ScriptedHost, outbound: OutboundClient, status: int
) -> None:
    body = b"" if status == 204 else b"<html>" + b"x" * 60_000
    host.pages["/"] = http_response(body, status=status)
    response = await outbound.get(f"{host.url}/", max_bytes=10)
    assert (response.status, response.body) == (status, body[:16_384])


async def test_compressed_body_is_streamed_decompressed(host: ScriptedHost, outbound: OutboundClient) -> None:
    body = b"block" * 100_000
    host.pages["/"] = http_response(gzip.compress(body), headers={"Content-Encoding": "gzip"})
    async with outbound.stream(f"{host.url}/", max_bytes=len(body), timeout=5, min_rate=1, accept="x/y") as stream:
        assert stream.status == 200
        sizes = [len(chunk) async for chunk in stream.chunks()]
    assert sum(sizes) == len(body)
    assert max(sizes) <= 65_536
    assert "accept: x/y" in host.requests[0]


# Slow hosts

TRICKLE = writes(CHUNKED, b"1\r\nx\r\n", every=0.02, forever=True)


@pytest.mark.parametrize(
    ("script", "seconds", "min_rate", "detail"),
    [
        pytest.param(hang, 5.0, 0.0, "", id="never responds"),
        pytest.param(writes(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n", every=0.02, forever=True), 0.1, 0.0, "", id="headers"),
        pytest.param(writes(http_response(b"half", length=8), every=60), 5.0, 0.0, "", id="stops within the body"),
        pytest.param(TRICKLE, 60.0, 1_000.0, "bytes in", id="below the minimum rate"),
        pytest.param(TRICKLE, 0.1, 0.0, "", id="longer than the timeout"),
    ],
)
async def test_host_that_is_too_slow(
    host: ScriptedHost, script: Script, seconds: float, min_rate: float, detail: str
) -> None:
    host.pages["/"] = script
    async with impatient(read=30.0 if detail else 0.2, rate_grace=0.1) as outbound:
        failure = await failure_of(read_all(outbound, f"{host.url}/", timeout=seconds, min_rate=min_rate))
    assert failure.reason is FetchFailure.TIMEOUT
    assert detail in failure.detail


@pytest.mark.slow
async def test_time_of_the_caller_does_not_count_for_the_rate(host: ScriptedHost, outbound: OutboundClient) -> None:
    host.pages["/"] = http_response(b"x" * 200_000)
    pauses = [SHORT_TIMEOUTS.rate_grace * 2]

    async def work() -> None:
        await asyncio.sleep(pauses.pop() if pauses else 0)

    assert await read_all(outbound, f"{host.url}/", min_rate=250_000, after_each=work) == 200_000
    assert not pauses


# Large responses


async def test_body_above_the_limit_is_refused(host: ScriptedHost, outbound: OutboundClient) -> None:
    host.pages["/"] = http_response(b"x" * 1_001)
    assert (await failure_of(outbound.get(f"{host.url}/", max_bytes=1_000))).reason is FetchFailure.TOO_LARGE
    assert len((await outbound.get(f"{host.url}/", max_bytes=1_001)).body) == 1_001


async def test_endless_body_is_refused(host: ScriptedHost, outbound: OutboundClient) -> None:
    host.pages["/"] = writes(CHUNKED, b"10000\r\n" + b"x" * 0x10000 + b"\r\n", forever=True)
    assert (await failure_of(read_all(outbound, f"{host.url}/"))).reason is FetchFailure.TOO_LARGE


async def test_highly_compressed_body_is_refused_at_the_limit(host: ScriptedHost, outbound: OutboundClient) -> None:
    host.pages["/"] = http_response(gzip.compress(bytes(20_000_000)), headers={"Content-Encoding": "gzip"})
    tracemalloc.start()
    try:
        failure = await failure_of(read_all(outbound, f"{host.url}/", max_bytes=10_000_000))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert failure.reason is FetchFailure.TOO_LARGE
    assert peak < 2_000_000


async def test_endless_gzip_stream_without_content_is_refused(host: ScriptedHost, outbound: OutboundClient) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n"
    start = gzip.compress(b"")[:10]
    empty = b"\x00\x00\x00\xff\xff" * 10_000  # stored blocks without bytes
    script = writes(head, b"a\r\n" + start + b"\r\n", f"{len(empty):x}\r\n".encode() + empty + b"\r\n", forever=True)
    host.pages["/"] = script
    assert (await failure_of(read_all(outbound, f"{host.url}/", max_bytes=1_000_000))).reason is FetchFailure.TOO_LARGE


async def test_endless_headers_are_refused(host: ScriptedHost, outbound: OutboundClient) -> None:
    host.pages["/"] = writes(b"HTTP/1.1 200 OK\r\n", b"X: " + b"y" * 10_000 + b"\r\n", forever=True)
    assert (await failure_of(outbound.get(f"{host.url}/", max_bytes=10))).reason is FetchFailure.UNREACHABLE


# Malformed and truncated responses

CUT_GZIP = http_response(gzip.compress(b"x" * 100, mtime=0)[:-3], headers={"Content-Encoding": "gzip"})


@pytest.mark.parametrize(
    "page",
    [
        http_response(b"half", length=8),
        CHUNKED + b"8\r\nhalf",
        CHUNKED + b"4\r\nhalf\r\n",
        CHUNKED + b"zz\r\n",
        CUT_GZIP,
        b"SSH-2.0-OpenSSH_9.9\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"\x00" * 100,
        b"",
        reset,
    ],
)
async def test_truncated_or_malformed_response(
    host: ScriptedHost, outbound: OutboundClient, page: bytes | Script
) -> None:
    host.pages["/"] = writes(page) if isinstance(page, bytes) else page
    assert (await failure_of(read_all(outbound, f"{host.url}/"))).reason is FetchFailure.UNREACHABLE


@pytest.mark.parametrize("encoding", ["br", "gzip", "zstd"])
async def test_unsupported_or_malformed_encoding(host: ScriptedHost, outbound: OutboundClient, encoding: str) -> None:
    host.pages["/"] = http_response(b"not what it says", headers={"Content-Encoding": encoding})
    assert (await failure_of(read_all(outbound, f"{host.url}/"))).reason is FetchFailure.BAD_ANSWER


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "read", "reason"),
    [
        ((CHUNKED, b"5\r\nhello\r\nZZ\r\n"), 30.0, FetchFailure.UNREACHABLE),
        ((CHUNKED + b"5\r\nhello\r\n", b"ZZ\r\n"), 0.3, FetchFailure.TIMEOUT),
    ],
    ids=["before it is awaited", "while it is awaited"],
)
async def test_malformed_chunk_after_a_valid_one(
    host: ScriptedHost, parts: tuple[bytes, bytes], read: float, reason: FetchFailure
) -> None:
    """The parser of aiohttp forgets the body then, so its reader is not told of the error."""

    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(parts[0])
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.write(parts[1])

    host.pages["/"] = script
    async with asyncio.timeout(30), impatient(read=read) as outbound:
        assert (await failure_of(read_all(outbound, f"{host.url}/", timeout=60.0))).reason is reason


async def test_exceptions_of_the_caller_are_not_converted(host: ScriptedHost, outbound: OutboundClient) -> None:
    host.pages["/"] = http_response(b"x")
    with pytest.raises(TimeoutError):
        async with outbound.stream(f"{host.url}/", max_bytes=10, timeout=5, min_rate=0, accept="*/*"):
            raise TimeoutError


async def test_cancelled_request_releases_its_slot(host: ScriptedHost) -> None:
    requested = asyncio.Event()

    async def signal_and_hang(writer: asyncio.StreamWriter) -> None:
        requested.set()
        await hang(writer)

    host.pages["/hang"] = signal_and_hang
    host.pages["/"] = http_response(b"x")
    async with OutboundClient(replace(LOCAL, rates=RateLimits(host_concurrency=1))) as outbound:
        hanging = asyncio.create_task(outbound.get(f"{host.url}/hang", max_bytes=10))
        await requested.wait()
        hanging.cancel()
        assert (await outbound.get(f"{host.url}/", max_bytes=10)).body == b"x"


async def test_post_sends_the_body_once_and_follows_no_redirect(outbound: OutboundClient) -> None:
    received: list[tuple[bytes, str]] = []

    async def receive(request: web.Request) -> web.Response:
        received.append((await request.read(), request.headers["X-Test"]))
        return web.Response(status=302, headers={"Location": "/"}, body=bytes(200_000))

    application = web.Application()
    application.router.add_post("/", receive)
    async with TestServer(application) as server:
        url = str(server.make_url("/"))
        status = await outbound.post(url, b"hello", headers={"X-Test": "1"})
    assert (status, received) == (302, [(b"hello", "1")])
    assert (await failure_of(outbound.post(url, b"", headers={}))).reason is FetchFailure.UNREACHABLE
