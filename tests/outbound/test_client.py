"""Requests to hosts that behave well, badly, and worse."""

import asyncio
import gzip
import tracemalloc
from collections.abc import Awaitable, Callable

import pytest
from backports import zstd

from indexer.errors import UnavailableError
from indexer.outbound import Outbound, Rates, Response
from indexer.outbound.hosts import FAILURES
from indexer.reasons import FetchFailure
from tests.outbound.conftest import IMPATIENT
from tests.outbound.host import Host, Script, answer, zipped

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


async def failure_of(request: Awaitable[object]) -> UnavailableError:
    with pytest.raises(UnavailableError) as failure:
        await request
    return failure.value


async def drain(
    outbound: Outbound,
    url: str,
    *,
    max_bytes: int = 10_000_000,
    timeout: float = 5.0,  # noqa: ASYNC109
    min_rate: float = 0.0,
    after_each: Callable[[], Awaitable[object]] | None = None,
) -> int:
    """The size of a streamed body."""
    size = 0
    async with outbound.stream(url, max_bytes=max_bytes, timeout=timeout, min_rate=min_rate, accept="*/*") as stream:
        async for chunk in stream.chunks():
            size += len(chunk)
            if after_each is not None:
                await after_each()
    return size


def writes(*pieces: bytes, every: float = 0.0, forever: bool = False) -> Script:
    """Writes the pieces, one every so many seconds; the last one for ever if so told."""

    async def script(writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(every)
        while forever:
            writer.write(pieces[-1])
            await writer.drain()
            await asyncio.sleep(every)

    return script


async def test_a_request_says_who_asks_and_nothing_more(host: Host, outbound: Outbound) -> None:
    host.pages["/a?did=did:plc:x"] = answer(b"{}", headers={"X-Thing": "1"})
    response = await outbound.get(f"{host.url}/a?did=did:plc:x", max_bytes=10)
    assert response == Response(200, response.headers, b"{}", f"{host.url}/a?did=did:plc:x")
    assert response.headers["x-thing"] == response.headers["X-THING"] == "1"
    line, *fields = host.requests[0].split("\r\n")
    assert line == "get /a?did=did:plc:x http/1.1"
    assert dict(field.split(": ", 1) for field in fields if field) == {
        "host": f"127.0.0.1:{host.port}",
        "user-agent": "test (mailto:someone@example.com)",
        "accept": "application/json",
        "accept-encoding": "gzip, zstd",
    }


async def test_no_cookie_credential_or_proxy_is_taken_up(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    netrc = tmp_path_factory.mktemp("home") / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password secret\n")
    for name, value in {"HTTP_PROXY": "http://127.0.0.1:1", "ALL_PROXY": "http://127.0.0.1:1", "NETRC": netrc}.items():
        monkeypatch.setenv(name, str(value))
        monkeypatch.setenv(name.lower(), str(value))
    host.pages["/"] = answer(b"{}", headers={"Set-Cookie": "session=1; Path=/"})
    outbound = Outbound(user_agent="test", allow_private_hosts=True)
    for _ in range(2):
        await outbound.get(f"{host.url}/", max_bytes=10)
    await outbound.close()
    assert "cookie" not in host.requests[1]
    assert "authorization" not in host.requests[1]


async def test_connections_are_kept(host: Host, outbound: Outbound) -> None:
    host.pages["/"] = answer(b"<html>", status=302, headers={"Location": "/there"})
    host.pages["/there"] = zipped(b"{}")
    host.pages["/not"] = answer(b"{}", status=404)
    for page in ("/", "/not", "/"):
        await outbound.get(f"{host.url}{page}", max_bytes=10)
    assert host.connections == 1


@pytest.mark.parametrize("status", [204, 400, 404, 410, 500, 501, 503])
async def test_other_statuses_are_the_callers_to_judge(host: Host, outbound: Outbound, status: int) -> None:
    body = b"" if status == 204 else b"<html>" + b"x" * 60_000
    host.pages["/"] = answer(body, status=status)
    response = await outbound.get(f"{host.url}/", max_bytes=10)
    assert response.status == status
    assert response.body == body[:16_384]


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("zstd", zstd.compress)])
async def test_a_compressed_stream(
    host: Host, outbound: Outbound, encoding: str, pack: Callable[[bytes], bytes]
) -> None:
    body = b"block" * 100_000
    host.pages["/"] = answer(pack(body), headers={"Content-Encoding": encoding})
    async with outbound.stream(f"{host.url}/", max_bytes=len(body), timeout=5, min_rate=1, accept="x/y") as stream:
        assert stream.status == 200
        sizes = [len(chunk) async for chunk in stream.chunks()]
    assert sum(sizes) == len(body)
    assert max(sizes) <= 65_536
    assert "accept: x/y" in host.requests[0]


# What is too slow


async def test_a_host_that_never_answers(host: Host, outbound: Outbound) -> None:
    host.pages["/"] = writes(b"", every=60)
    assert (await failure_of(outbound.get(f"{host.url}/", max_bytes=10))).reason is FetchFailure.TIMEOUT


async def test_a_host_whose_header_never_ends(host: Host, outbound: Outbound) -> None:
    host.pages["/"] = writes(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n", every=0.02, forever=True)
    failure = await failure_of(outbound.get(f"{host.url}/", max_bytes=10, timeout=0.3))
    assert failure.reason is FetchFailure.TIMEOUT


async def test_a_host_that_falls_silent(host: Host, outbound: Outbound) -> None:
    host.pages["/"] = writes(answer(b"half", length=8), every=60)
    assert (await failure_of(drain(outbound, f"{host.url}/"))).reason is FetchFailure.TIMEOUT


async def test_a_host_that_drips(host: Host, outbound: Outbound) -> None:
    host.pages["/"] = writes(CHUNKED, b"1\r\nx\r\n", every=0.02, forever=True)
    failure = await failure_of(drain(outbound, f"{host.url}/", timeout=60, min_rate=1_000))
    assert failure.reason is FetchFailure.TIMEOUT
    assert "bytes in" in failure.detail


async def test_a_body_that_takes_longer_than_the_whole_may(host: Host, outbound: Outbound) -> None:
    host.pages["/"] = writes(CHUNKED, b"1\r\nx\r\n", every=0.02, forever=True)
    failure = await failure_of(outbound.get(f"{host.url}/", max_bytes=10_000, timeout=0.3))
    assert failure.reason is FetchFailure.TIMEOUT


async def test_our_own_slowness_is_not_the_hosts(host: Host, outbound: Outbound) -> None:
    host.pages["/"] = answer(b"x" * 200_000)
    pause = IMPATIENT.judged_after * 2

    async def work() -> None:
        await asyncio.sleep(pause)

    assert await drain(outbound, f"{host.url}/", min_rate=2_000_000, after_each=work) == 200_000


# What is too much


async def test_a_body_over_the_limit(host: Host, outbound: Outbound) -> None:
    host.pages["/"] = answer(b"x" * 1_001)
    assert (await failure_of(outbound.get(f"{host.url}/", max_bytes=1_000))).reason is FetchFailure.TOO_LARGE
    assert len((await outbound.get(f"{host.url}/", max_bytes=1_001)).body) == 1_001


async def test_a_body_without_end(host: Host, outbound: Outbound) -> None:
    host.pages["/"] = writes(CHUNKED, b"10000\r\n" + b"x" * 0x10000 + b"\r\n", forever=True)
    assert (await failure_of(drain(outbound, f"{host.url}/"))).reason is FetchFailure.TOO_LARGE


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("zstd", zstd.compress)])
async def test_a_bomb(host: Host, outbound: Outbound, encoding: str, pack: Callable[[bytes], bytes]) -> None:
    host.pages["/"] = answer(pack(bytes(100_000_000)), headers={"Content-Encoding": encoding})
    tracemalloc.start()
    try:
        failure = await failure_of(drain(outbound, f"{host.url}/", max_bytes=50_000_000))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert failure.reason is FetchFailure.TOO_LARGE
    assert peak < 2_000_000


async def test_a_gzip_stream_that_never_says_anything(host: Host, outbound: Outbound) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n"
    start = gzip.compress(b"")[:10]
    empty = b"\x00\x00\x00\xff\xff" * 10_000  # stored blocks of no bytes
    script = writes(head, b"a\r\n" + start + b"\r\n", f"{len(empty):x}\r\n".encode() + empty + b"\r\n", forever=True)
    host.pages["/"] = script
    assert (await failure_of(drain(outbound, f"{host.url}/", max_bytes=1_000_000))).reason is FetchFailure.TOO_LARGE


async def test_headers_without_end(host: Host, outbound: Outbound) -> None:
    host.pages["/"] = writes(b"HTTP/1.1 200 OK\r\n", b"X: " + b"y" * 10_000 + b"\r\n", forever=True)
    assert (await failure_of(outbound.get(f"{host.url}/", max_bytes=10))).reason is FetchFailure.UNREACHABLE


# What is broken


@pytest.mark.parametrize(
    "page",
    [
        answer(b"half", length=8),
        CHUNKED + b"8\r\nhalf",
        CHUNKED + b"4\r\nhalf\r\n",
        CHUNKED + b"zz\r\n",
        answer(gzip.compress(b"x" * 100, mtime=0)[:-3], headers={"Content-Encoding": "gzip"}),
        b"SSH-2.0-OpenSSH_9.9\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"\x00" * 100,
        b"",
    ],
)
async def test_an_answer_that_breaks_off(host: Host, outbound: Outbound, page: bytes) -> None:
    host.pages["/"] = writes(page)
    assert (await failure_of(drain(outbound, f"{host.url}/"))).reason is FetchFailure.UNREACHABLE


async def reset(writer: asyncio.StreamWriter) -> None:
    writer.write(answer(b"half", length=8))
    await writer.drain()
    writer.transport.abort()


async def test_a_reset_in_the_middle(host: Host, outbound: Outbound) -> None:
    host.pages["/"] = reset
    assert (await failure_of(drain(outbound, f"{host.url}/"))).reason is FetchFailure.UNREACHABLE


@pytest.mark.parametrize("encoding", ["br", "gzip", "zstd"])
async def test_an_encoding_that_is_none_of_ours(host: Host, outbound: Outbound, encoding: str) -> None:
    host.pages["/"] = answer(b"not what it says", headers={"Content-Encoding": encoding})
    assert (await failure_of(drain(outbound, f"{host.url}/"))).reason is FetchFailure.BAD_ANSWER


async def test_nobody_there(host: Host, outbound: Outbound) -> None:
    async with Host() as gone:
        url = gone.url
    assert (await failure_of(outbound.get(url, max_bytes=10))).reason is FetchFailure.UNREACHABLE


async def test_the_callers_own_errors_stay_its_own(host: Host, outbound: Outbound) -> None:
    host.pages["/"] = answer(b"x")
    with pytest.raises(TimeoutError):
        async with outbound.stream(f"{host.url}/", max_bytes=10, timeout=5, min_rate=0, accept="*/*"):
            raise TimeoutError


async def test_a_cancelled_request_gives_its_place_back(host: Host) -> None:
    outbound = Outbound(user_agent="test", allow_private_hosts=True, rates=Rates(host_concurrency=1))
    begun = asyncio.Event()

    async def hang(_writer: asyncio.StreamWriter) -> None:
        begun.set()
        await asyncio.get_running_loop().create_future()

    host.pages["/hang"] = hang
    host.pages["/"] = answer(b"x")
    hanging = asyncio.create_task(outbound.get(f"{host.url}/hang", max_bytes=10))
    await begun.wait()
    hanging.cancel()
    assert (await outbound.get(f"{host.url}/", max_bytes=10)).body == b"x"
    await outbound.close()


# Redirects


async def test_redirects_are_followed_a_few_times(host: Host, outbound: Outbound) -> None:
    for hop in range(5):
        host.pages[f"/{hop}"] = answer(status=[301, 302, 303, 307, 308][hop], headers={"Location": f"/{hop + 1}"})
    host.pages["/3"] = answer(b"here")
    response = await outbound.get(f"{host.url}/0", max_bytes=10)
    assert (response.body, response.url) == (b"here", f"{host.url}/3")
    host.pages["/3"] = answer(status=302, headers={"Location": "/4"})
    assert (await failure_of(outbound.get(f"{host.url}/0", max_bytes=10))).reason is FetchFailure.HTTP_STATUS
    assert sum("get /4 " in request for request in host.requests) == 0


async def test_redirects_in_a_circle_and_to_nowhere(host: Host, outbound: Outbound) -> None:
    host.pages["/"] = answer(status=302, headers={"Location": "/"})
    assert (await failure_of(outbound.get(f"{host.url}/", max_bytes=10))).reason is FetchFailure.HTTP_STATUS
    host.pages["/"] = answer(status=302)
    assert (await failure_of(outbound.get(f"{host.url}/", max_bytes=10))).reason is FetchFailure.HTTP_STATUS


# Hosts that want to be left alone


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7),
        ({"RateLimit-Limit": "3000", "RateLimit-Remaining": "0", "RateLimit-Reset": "40"}, 40),
        ({}, 60),
        ({"Content-Type": "text/html"}, 60),
    ],
)
async def test_a_host_that_asks_for_a_pause_gets_it(
    host: Host, outbound: Outbound, headers: dict[str, str], seconds: float
) -> None:
    host.pages["/"] = answer(b"<html>Too many requests</html>", status=429, headers=headers)
    first = await failure_of(outbound.get(f"{host.url}/", max_bytes=10))
    second = await failure_of(outbound.get(f"{host.url}/other", max_bytes=10))
    assert first.reason is second.reason is FetchFailure.THROTTLED
    assert first.retry_after == seconds
    assert first.host == second.host == host.url.removeprefix("http://")
    assert second.retry_after is not None
    assert seconds - 5 < second.retry_after <= seconds
    assert len(host.requests) == 1


async def test_a_busy_host_may_ask_for_a_pause_too(host: Host, outbound: Outbound) -> None:
    host.pages["/"] = answer(status=503, headers={"Retry-After": "7"})
    failure = await failure_of(outbound.get(f"{host.url}/", max_bytes=10))
    assert (failure.reason, failure.retry_after) == (FetchFailure.THROTTLED, 7)


# Hosts that are broken


async def settle(request: Awaitable[object]) -> None:
    try:
        await request
    except UnavailableError as error:
        assert error.reason is not FetchFailure.HOST_PAUSED  # noqa: PT017 - most don't fail


@pytest.mark.parametrize(
    "page",
    [
        writes(b"", every=60),
        writes(answer(b"half", length=8), every=60),
        writes(CHUNKED, b"1\r\nx\r\n", every=0.02, forever=True),
        reset,
        b"SSH-2.0-OpenSSH_9.9\r\n",
        answer(gzip.compress(b"x" * 100, mtime=0)[:-3], headers={"Content-Encoding": "gzip"}),
        answer(b"<html>", status=500),
        answer(b"<html>", status=502),
        answer(status=503),
    ],
)
async def test_a_host_that_fails_is_soon_left_alone(host: Host, outbound: Outbound, page: bytes | Script) -> None:
    host.pages["/"] = page
    for _ in range(FAILURES):
        await settle(drain(outbound, f"{host.url}/", timeout=0.4, min_rate=1_000))
    asked = len(host.requests)
    failure = await failure_of(outbound.get(f"{host.url}/other", max_bytes=10))
    assert failure.reason is FetchFailure.HOST_PAUSED
    assert failure.retry_after is not None
    assert failure.retry_after > 20
    assert len(host.requests) == asked >= FAILURES
    assert [state.streak for state in outbound.hosts.paused()] == [FAILURES]


@pytest.mark.parametrize(
    "page",
    [
        answer(b"{}"),
        answer(status=501),
        answer(b'{"error": "RepoNotFound"}', status=400),
        answer(b"<html>", status=404),
        answer(b"x" * 2_000),
        answer(b"not what it says", headers={"Content-Encoding": "gzip"}),
        answer(status=302, headers={"Location": "ftp://127.0.0.1/"}),
    ],
)
async def test_a_host_that_only_says_no_is_not(host: Host, outbound: Outbound, page: bytes) -> None:
    host.pages["/"] = page
    for _ in range(FAILURES + 1):
        await settle(outbound.get(f"{host.url}/", max_bytes=1_000))
    assert len(host.requests) == FAILURES + 1
    assert outbound.hosts.paused() == []


async def test_a_host_that_is_gone_is_soon_left_alone(outbound: Outbound) -> None:
    async with Host() as gone:
        url = gone.url
    for _ in range(FAILURES):
        assert (await failure_of(outbound.get(url, max_bytes=10))).reason is FetchFailure.UNREACHABLE
    assert (await failure_of(outbound.get(url, max_bytes=10))).reason is FetchFailure.HOST_PAUSED


async def test_what_comes_of_requests_is_told(host: Host) -> None:
    results: list[str] = []
    outbound = Outbound(
        user_agent="test",
        allow_private_hosts=True,
        patience=IMPATIENT,
        on_request=results.append,
        rates=Rates(host=1_000),
    )
    host.pages |= {
        "/": answer(status=302, headers={"Location": "/there"}),
        "/there": answer(b"{}"),
        "/not": answer(status=404),
        "/broken": answer(status=500),
        "/large": answer(b"x" * 100),
        "/hang": writes(b"", every=60),
        "/reset": reset,
        "/odd": answer(b"?", headers={"Content-Encoding": "br"}),
        "/wait": answer(status=429),
    }
    for page in host.pages:
        await settle(outbound.get(f"{host.url}{page}", max_bytes=10))
    for url in (host.url, "gopher://pds.example/"):
        await settle(outbound.get(url, max_bytes=10))
    await outbound.close()
    counted = "3xx 2xx 2xx 4xx 5xx too-large timeout unreachable bad-answer 4xx throttled refused-address"
    assert results == counted.split()


async def test_no_more_connections_than_may_be_to_however_many_hosts(host: Host) -> None:
    inside = most = 0
    full = asyncio.Event()

    async def resolve(_name: str, _port: int) -> list[str]:
        return ["127.0.0.1"]

    async def hold(writer: asyncio.StreamWriter) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        if inside == 20:
            full.set()
        await full.wait()
        inside -= 1
        writer.write(answer(b"{}", headers={"Connection": "close"}))
        await writer.drain()

    host.pages["/"] = hold
    outbound = Outbound(
        user_agent="test", allow_private_hosts=True, resolve=resolve, rates=Rates(total=100_000, concurrency=20)
    )
    urls = [f"http://{number}.example:{host.port}/" for number in range(300)]
    answers = await asyncio.gather(*[outbound.get(url, max_bytes=10) for url in urls])
    await outbound.close()
    assert {response.body for response in answers} == {b"{}"}
    assert most == 20
