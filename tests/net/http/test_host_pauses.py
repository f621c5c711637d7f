"""Redirects, hosts that fail or ask for a pause, and names that share the limits of a host."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from time import monotonic

import pytest

from indexer.errors import UnavailableError
from indexer.net.http.host_limits import FAILURE_THRESHOLD, RateLimits
from indexer.net.http.http_client import OutboundClient, Response, Timeouts, host_of
from indexer.reasons import FetchFailure
from tests.net.http.conftest import LOCAL
from tests.net.http.http_requests import failure_of, read_all, reset
from tests.net.http.scripted_host import Script, ScriptedHost, http_response
from tests.waiting import until

# Redirects


async def test_at_most_three_redirects_are_followed(host: ScriptedHost, outbound: OutboundClient) -> None:
    for hop in range(5):
        host.pages[f"/{hop}"] = http_response(
            status=[301, 302, 303, 307, 308][hop], headers={"Location": f"/{hop + 1}"}
        )
    host.pages["/3"] = http_response(b"here")
    response = await outbound.get(f"{host.url}/0", max_bytes=10)
    assert response.body == b"here"
    host.pages["/3"] = http_response(status=302, headers={"Location": "/4"})
    assert (await failure_of(outbound.get(f"{host.url}/0", max_bytes=10))).reason is FetchFailure.BAD_ANSWER
    assert sum("get /4 " in request for request in host.requests) == 0
    host.pages["/0"] = http_response(status=302)
    assert (await failure_of(outbound.get(f"{host.url}/0", max_bytes=10))).reason is FetchFailure.BAD_ANSWER


@pytest.fixture
async def target() -> AsyncIterator[ScriptedHost]:
    """Return a host to which another one redirects."""
    async with ScriptedHost() as target:
        target.pages["/honest"] = http_response(b"x")
        yield target


async def cut_off(writer: asyncio.StreamWriter) -> None:
    writer.write(http_response(b"x", length=2))
    await writer.drain()


async def redirected_requests(outbound: OutboundClient, host: ScriptedHost, target: ScriptedHost) -> UnavailableError:
    """Send requests that `host` redirects to `target`, and return the last failure."""
    host.pages["/"] = http_response(status=302, headers={"Location": f"{target.url}/page"})
    for _ in range(2 * FAILURE_THRESHOLD):
        failure = await failure_of(successful(outbound.get(f"{host.url}/", max_bytes=10)))
    assert len(target.requests) > 0
    return failure


async def successful(request: Awaitable[Response]) -> None:
    """Raise HTTP_STATUS for an error response, as callers do."""
    response = await request
    if response.status != 200:
        raise UnavailableError(FetchFailure.HTTP_STATUS, f"{response.status}")


@pytest.mark.parametrize(
    "page",
    [
        http_response(status=502),
        *[http_response(status=status, headers={"Retry-After": "600"}) for status in (429, 503)],
        cut_off,
    ],
)
async def test_failures_behind_a_redirect_do_not_pause_the_target(
    host: ScriptedHost, outbound: OutboundClient, target: ScriptedHost, page: bytes
) -> None:
    target.pages["/page"] = page
    failure = await redirected_requests(outbound, host, target)
    assert (await outbound.get(f"{target.url}/honest", max_bytes=10)).body == b"x"
    assert outbound.hosts.paused() == []
    assert failure.reason.counts_as_attempt
    assert failure.host is None, "no part of the program pauses the target"
    assert len(target.requests) == 2 * FAILURE_THRESHOLD + 1


async def test_direct_failures_count_although_others_were_redirected(host: ScriptedHost, target: ScriptedHost) -> None:
    target.pages["/page"] = http_response(status=502)
    async with OutboundClient(replace(LOCAL, rates=RateLimits(host=1_000))) as outbound:
        await redirected_requests(outbound, host, target)
        for _ in range(FAILURE_THRESHOLD):
            assert outbound.hosts.paused() == []
            await outbound.get(f"{target.url}/page", max_bytes=10)
        assert [state.host for state in outbound.hosts.paused()] == [host_of(target.url)]


async def test_only_a_pause_that_a_target_asks_for_counts_behind_a_configured_relay(
    host: ScriptedHost, target: ScriptedHost
) -> None:
    target.pages["/page"] = http_response(status=502)
    rates = RateLimits(configured_hosts={host_of(host.url): 100.0})
    async with OutboundClient(replace(LOCAL, rates=rates)) as outbound:
        await redirected_requests(outbound, host, target)
        assert (await outbound.get(f"{target.url}/honest", max_bytes=10)).body == b"x"
        target.pages["/page"] = http_response(status=429, headers={"Retry-After": "600"})
        failure = await failure_of(outbound.get(f"{host.url}/", max_bytes=10))
        assert (failure.reason, failure.host) == (FetchFailure.THROTTLED, host_of(target.url))
        requests = len(target.requests)
        await failure_of(outbound.get(f"{target.url}/honest", max_bytes=10))
        assert len(target.requests) == requests


# Pauses that hosts ask for


@pytest.mark.parametrize(
    ("status", "headers", "seconds"),
    [
        (429, {"Retry-After": "7"}, 7),
        (429, {"RateLimit-Limit": "3000", "RateLimit-Remaining": "0", "RateLimit-Reset": "40"}, 40),
        (429, {}, 60),
        (503, {"Retry-After": "7"}, 7),
    ],
)
async def test_host_gets_the_pause_that_it_asks_for(
    host: ScriptedHost, outbound: OutboundClient, status: int, headers: dict[str, str], seconds: float
) -> None:
    host.pages["/"] = http_response(b"<html>Too many requests</html>", status=status, headers=headers)
    first = await failure_of(outbound.get(f"{host.url}/", max_bytes=10))
    second = await failure_of(outbound.get(f"{host.url}/other", max_bytes=10))
    assert first.reason is second.reason is FetchFailure.THROTTLED
    assert first.retry_after == seconds
    assert first.host == second.host == host.url.removeprefix("http://")
    assert second.retry_after is not None
    assert seconds - 5 < second.retry_after <= seconds
    assert len(host.requests) == 1


# Hosts that fail


async def finish(request: Awaitable[object]) -> None:
    """Wait for a response, or any failure except HOST_PAUSED."""
    try:
        await request
    except UnavailableError as error:
        assert error.reason is not FetchFailure.HOST_PAUSED  # noqa: PT017 - most requests do not fail


@pytest.mark.parametrize("page", [reset, b"SSH-2.0-OpenSSH_9.9\r\n", http_response(b"<html>", status=500)])
async def test_host_is_paused_after_failures(
    host: ScriptedHost, outbound: OutboundClient, page: bytes | Script
) -> None:
    host.pages["/"] = page
    for _ in range(FAILURE_THRESHOLD):
        await finish(read_all(outbound, f"{host.url}/"))
    requests = len(host.requests)
    failure = await failure_of(outbound.get(f"{host.url}/other", max_bytes=10))
    assert failure.reason is FetchFailure.HOST_PAUSED
    assert failure.retry_after is not None
    assert failure.retry_after > 20
    assert len(host.requests) == requests >= FAILURE_THRESHOLD
    assert [state.consecutive_failures for state in outbound.hosts.paused()] == [FAILURE_THRESHOLD]


@pytest.mark.parametrize(
    "page",
    [
        http_response(b"{}"),
        http_response(status=501),
        http_response(b'{"error": "RepoNotFound"}', status=400),
        http_response(b"x" * 2_000),
        http_response(b"not what it says", headers={"Content-Encoding": "gzip"}),
        http_response(status=302, headers={"Location": "ftp://127.0.0.1/"}),
    ],
)
async def test_host_is_not_paused_after_other_responses(
    host: ScriptedHost, outbound: OutboundClient, page: bytes
) -> None:
    host.pages["/"] = page
    for _ in range(FAILURE_THRESHOLD + 1):
        await finish(outbound.get(f"{host.url}/", max_bytes=1_000))
    assert len(host.requests) == FAILURE_THRESHOLD + 1
    assert outbound.hosts.paused() == []


# Names that share an address or a registered domain


class NamesOfOneHost:
    """A client for which every name leads to `host`, on the address that `addresses` gives."""

    def __init__(
        self, host: ScriptedHost, addresses: Callable[[str], Sequence[str]] = lambda _name: ["127.0.0.1"]
    ) -> None:
        self.host = host
        self.addresses = addresses
        rates = RateLimits(host=40, host_concurrency=200, total=100_000)
        self.client = OutboundClient(replace(LOCAL, rates=rates, timeouts=Timeouts()), resolve=self.resolve)

    async def resolve(self, name: str, _port: int) -> Sequence[str]:
        return self.addresses(name)

    async def seconds(self, names: list[str]) -> float:
        """Send one request to each name at the same time; return how long that takes."""
        started = monotonic()
        urls = [f"http://{name}:{self.host.port}/" for name in names]
        async with asyncio.TaskGroup() as group:
            for url in urls:
                group.create_task(self.client.get(url, max_bytes=10))
        return monotonic() - started


@pytest.mark.slow
async def test_names_of_one_address_share_its_rate(host: ScriptedHost) -> None:
    """Of 60 names in different domains, 40 are the burst; the others take half a second, whether they answer or not."""
    names = NamesOfOneHost(host)
    async with names.client:
        for status in (404, 200):
            host.pages["/"] = http_response(b"x", status=status)
            assert await names.seconds([f"x.victim{number}.example" for number in range(60)]) >= 0.5


def own_address(name: str) -> list[str]:
    """Return an address on loopback for each of the names `x1` to `x255`."""
    return [f"127.0.0.{name.partition('.')[0][1:]}"]


@pytest.mark.slow
async def test_names_of_one_registered_domain_share_its_rate_until_they_answer() -> None:
    """Hosts of one operator that answer, like those of a large PDS operator, do not limit each other."""
    async with ScriptedHost(bind="0.0.0.0") as host:  # noqa: S104 - all addresses of loopback
        host.pages["/"] = http_response(status=404)
        names = NamesOfOneHost(host, own_address)
        async with names.client:
            hosts = [f"x{number}.victim.example.com" for number in range(2, 122)]
            assert await names.seconds(hosts[:60]) >= 0.5
            host.pages["/"] = http_response(b"x")
            assert await names.seconds(hosts) >= 2, "errors are no answers"
            assert await names.seconds(hosts) < 2


@pytest.mark.slow
async def test_names_that_lead_to_a_host_do_not_use_up_its_rate(host: ScriptedHost) -> None:
    """Any name may lead to the address of an honest host, which does not answer under this name."""
    host.pages |= {"/": http_response(status=404), "/honest": http_response(b"x")}
    names = NamesOfOneHost(host)
    async with names.client:
        honest = f"http://pds.honest.example:{host.port}/honest"
        await names.client.get(honest, max_bytes=10)
        flood = asyncio.create_task(names.seconds([f"x.hostile{number}.example" for number in range(120)]))
        await until(lambda: len(host.requests) >= 40)
        for _ in range(10):
            await names.client.get(honest, max_bytes=10)
        assert not flood.done()
        await flood
