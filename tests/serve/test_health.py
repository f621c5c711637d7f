import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import structlog
from aiohttp import hdrs, web
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.parser import text_string_to_metric_families

from indexer import __version__
from indexer.errors import SettingsError
from indexer.net.server.address import Address
from indexer.net.server.connection_limit import FORWARDED_FOR, RESERVED_WEBSOCKETS, WEBSOCKETS, HeldWebsocket
from indexer.serve.health import HttpLimits, Listener, serve_http
from indexer.serve.status_document import ReadinessReason
from indexer.telemetry.conditions import HTTP_CONNECTIONS_LIMITED, WEBSOCKETS_LIMITED, Conditions
from indexer.telemetry.metrics import Metrics
from tests.waiting import until


@dataclass
class FakeProbe:
    stalls: list[ReadinessReason] = field(default_factory=list)
    reasons: list[ReadinessReason] = field(default_factory=list)

    @property
    def checks(self) -> dict[str, Callable[[], list[ReadinessReason]]]:
        return {"/healthz": lambda: self.stalls, "/readyz": lambda: self.stalls + self.reasons}


@pytest.fixture
def probe() -> FakeProbe:
    return FakeProbe()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


Serve = Callable[..., AbstractAsyncContextManager[Address]]
FREE = Address("127.0.0.1", 0)


@pytest.fixture
def serve(probe: FakeProbe, metrics: Metrics) -> Serve:
    """Return a function that serves on a free port during a block, with the given limits and routes."""

    def serve(
        limits: HttpLimits | None = None, address: Address = FREE, registry: Any = metrics.registry, **options: Any
    ) -> AbstractAsyncContextManager[Address]:
        limits = limits or HttpLimits()
        listener = Listener(address, limits.backlog)
        return serve_http(listener, probe.checks, registry, Conditions(), limits, **options)

    return serve


@pytest.fixture
async def client(serve: Serve) -> AsyncIterator[aiohttp.ClientSession]:
    async with (
        serve(HttpLimits(scrape_interval=0.0)) as address,
        aiohttp.ClientSession(f"http://{address}") as session,
    ):
        yield session


async def test_status_of_the_checks_and_the_reasons(client: aiohttp.ClientSession, probe: FakeProbe) -> None:
    async def get(path: str) -> tuple[int, dict[str, Any]]:
        async with client.get(path) as response:
            return response.status, await response.json()

    ok = (200, {"status": "ok"})
    assert [await get(path) for path in ("/healthz", "/readyz")] == [ok, ok]
    probe.reasons = [
        ReadinessReason("relay-disconnected", "no relay is connected", 12.5),
        ReadinessReason("lag", "the newest event is 300 s old", 300.0),
    ]
    assert await get("/healthz") == ok
    assert await get("/readyz") == (
        503,
        {
            "status": "unavailable",
            "reason": "no relay is connected",
            "reasons": [
                {"code": "relay-disconnected", "message": "no relay is connected", "value": 12.5},
                {"code": "lag", "message": "the newest event is 300 s old", "value": 300.0},
            ],
        },
    )
    probe.reasons = []
    probe.stalls = [ReadinessReason("stage-stalled", f"{name} stalled", 130.5) for name in ("inbox", "batch writer")]
    for path in ("/healthz", "/readyz"):
        status, body = await get(path)
        assert (status, body["reason"]) == (503, "inbox stalled")
        assert [reason["message"] for reason in body["reasons"]] == ["inbox stalled", "batch writer stalled"]
    assert await get("/xrpc/_health") == (200, {"version": __version__})


async def test_metrics_are_served_in_both_formats(client: aiohttp.ClientSession, metrics: Metrics) -> None:
    metrics.events_received["commit"].inc()
    async with client.get("/metrics") as response:
        assert response.headers[hdrs.CONTENT_TYPE].startswith("text/plain; version=0.0.4")
        families = {family.name: family for family in text_string_to_metric_families(await response.text())}
        counts = {sample.labels["kind"]: sample.value for sample in families["indexer_events_received"].samples}
        assert counts["commit"] == 1
    async with client.get("/metrics", headers={hdrs.ACCEPT: "application/openmetrics-text; version=1.0.0"}) as response:
        assert response.headers[hdrs.CONTENT_TYPE].startswith("application/openmetrics-text")
        assert (await response.text()).endswith("# EOF\n")


async def test_address_in_use_is_a_wrong_setting_that_the_message_names(serve: Serve) -> None:
    async with serve() as address:
        with pytest.raises(SettingsError, match=f"INDEXER_HTTP_BIND: cannot listen at {address}: another process uses"):
            async with serve(address=address):
                raise AssertionError("not reached")


@pytest.mark.parametrize("host", ["nowhere.invalid", "192.0.2.77"])
async def test_address_of_another_machine_is_a_wrong_setting(serve: Serve, host: str) -> None:
    address = Address(host, 2580)
    with pytest.raises(SettingsError, match=f"INDEXER_HTTP_BIND: cannot listen at {address}: "):
        async with serve(address=address):
            raise AssertionError("not reached")


async def half_send_requests(address: Address, count: int, source: str = "127.0.0.1") -> list[socket.socket]:
    """Open connections, and send a request without its end on each one."""
    loop, sockets = asyncio.get_running_loop(), []
    for _ in range(count):
        connection = socket.socket()
        connection.setblocking(False)
        connection.bind((source, 0))
        await loop.sock_connect(connection, tuple(address))
        await loop.sock_sendall(connection, b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        sockets.append(connection)
    return sockets


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def is_open(connection: socket.socket) -> bool:
    """Return True if the server has neither answered nor closed the connection."""
    try:
        connection.recv(1)
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False
    return False


async def echo(request: web.Request) -> web.StreamResponse:
    websocket = web.WebSocketResponse()
    with request.app[WEBSOCKETS].hold(request, websocket, for_anyone=request.path == "/open") as held:
        await websocket.prepare(request)
        closing = asyncio.create_task(close_when_displaced(websocket, held))
        async for message in websocket:
            await websocket.send_str(message.data)
        closing.cancel()
    return websocket


async def close_when_displaced(websocket: web.WebSocketResponse, held: HeldWebsocket) -> None:
    await held.displaced.wait()
    await websocket.close(message=b"displaced")


async def test_new_connections_do_not_close_websockets_which_have_a_limit_of_their_own(serve: Serve) -> None:
    limits = HttpLimits(max_connections=4, max_websockets=2, backlog=2)
    async with (
        serve(limits, routes=[web.get("/echo", echo)]) as address,
        aiohttp.ClientSession(f"http://{address}") as session,
        session.ws_connect("/echo") as first,
        session.ws_connect("/echo") as second,
    ):
        async with session.get("/echo") as response:
            assert (response.status, await response.text()) == (503, "2 websockets are open, which is the limit")
        sockets = await half_send_requests(address, 20)
        await until(lambda: sum(map(is_open, sockets)) <= limits.max_connections)
        for websocket in (first, second):
            await websocket.send_str("hello")
            assert await websocket.receive_str() == "hello"
        for connection in sockets:
            connection.close()


async def test_websockets_of_a_route_without_a_password_leave_some_to_those_with_one(serve: Serve) -> None:
    limits = HttpLimits(max_websockets=RESERVED_WEBSOCKETS + 2)
    routes = [web.get("/open", echo), web.get("/guarded", echo)]
    async with (
        serve(limits, routes=routes) as address,
        aiohttp.ClientSession(f"http://{address}") as session,
        session.ws_connect("/open"),
        session.ws_connect("/open"),
    ):
        async with session.get("/open") as response:
            assert (response.status, await response.text()) == (503, "2 websockets are open, which is the limit")
        async with session.ws_connect("/guarded") as websocket:
            await websocket.send_str("hello")
            assert await websocket.receive_str() == "hello"


async def test_networks_share_the_websockets_of_a_route_without_a_password(serve: Serve) -> None:
    """One network has all of them, until another one wants as many."""
    limits, conditions = HttpLimits(max_websockets=RESERVED_WEBSOCKETS + 4), Conditions()
    async with (
        serve_http(Listener(FREE), {}, Metrics().registry, conditions, limits, [web.get("/open", echo)]) as address,
        aiohttp.ClientSession(f"http://{address}") as session,
        AsyncExitStack() as stack,
    ):

        async def connect(network: str) -> aiohttp.ClientWebSocketResponse:
            headers = {FORWARDED_FOR: f"1.1.1.1, {network}"}
            return await stack.enter_async_context(session.ws_connect("/open", headers=headers))

        many = [await connect("8.8.8.8") for _ in range(4)]
        assert not conditions.active()
        with pytest.raises(aiohttp.WSServerHandshakeError, match="503"):
            await connect("8.8.8.8")
        others = [await connect("9.9.9.9") for _ in range(2)]
        assert [(await many[number].receive()).extra for number in (3, 2)] == ["displaced"] * 2
        for network in ("8.8.8.8", "9.9.9.9"):
            with pytest.raises(aiohttp.WSServerHandshakeError, match="503"):
                await connect(network)
        for websocket in (*many[:2], *others):
            await websocket.send_str("hello")
            assert await websocket.receive_str() == "hello"
        [condition] = conditions.active()
        assert (condition.kind, condition.count) == (WEBSOCKETS_LIMITED, 5)


async def test_requests_of_one_network_delay_those_of_others_by_one_turn(serve: Serve) -> None:
    answered = list[str]()

    async def note(request: web.Request) -> web.Response:
        answered.append(request.headers[FORWARDED_FOR])
        return web.Response()

    async with (
        serve(routes=[web.get("/note", note)]) as address,
        aiohttp.ClientSession(f"http://{address}", connector=aiohttp.TCPConnector(limit=0)) as session,
    ):

        async def get(network: str) -> None:
            async with session.get("/note", headers={FORWARDED_FOR: network}):
                pass

        many = [asyncio.create_task(get("8.8.8.8")) for _ in range(20)]
        await until(lambda: bool(answered))
        await get("9.9.9.9")
        before = answered.index("9.9.9.9")
        await asyncio.gather(*many)
        assert before < answered.count("8.8.8.8") == 20


async def test_network_with_the_most_connections_loses_the_oldest(serve: Serve) -> None:
    limits = HttpLimits(max_connections=8, backlog=2)
    async with serve(limits) as address:
        [oldest] = await half_send_requests(address, 1, source="127.0.0.2")
        many = await half_send_requests(address, 30)
        await until(lambda: sum(map(is_open, many)) < limits.max_connections)
        assert is_open(oldest)
        for connection in (oldest, *many):
            connection.close()


async def test_websockets_are_closed_with_a_reason_when_the_server_ends(serve: Serve) -> None:
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(serve(routes=[web.get("/echo", echo)]))
        async with aiohttp.ClientSession(f"http://{address}") as session, session.ws_connect("/echo") as websocket:
            closing = asyncio.create_task(stack.aclose())
            message = await websocket.receive()
            assert (message.data, message.extra) == (1001, "the server is stopping")
            await closing


@pytest.mark.slow
async def test_half_sent_requests_cannot_keep_more_connections_than_the_limit(serve: Serve) -> None:
    limits, before = HttpLimits(), open_files()
    async with serve() as address:
        with structlog.testing.capture_logs() as lines:
            sockets = await half_send_requests(address, 400)
            async with aiohttp.ClientSession(f"http://{address}") as session, session.get("/healthz") as response:
                assert response.status == 200
            await until(lambda: sum(map(is_open, sockets)) <= limits.max_connections)
            assert open_files() - before <= len(sockets) + limits.max_connections + limits.backlog
            assert is_open(sockets[-1]), "the newest connections remain"
        for connection in sockets:
            connection.close()
    assert [(line["event"], line["condition"]) for line in lines] == [
        ("condition.began", HTTP_CONNECTIONS_LIMITED.name)
    ]


@pytest.mark.slow
async def test_half_sent_request_is_closed_after_the_header_timeout(serve: Serve) -> None:
    limits = HttpLimits(header_timeout=0.5)
    async with serve(limits) as address:
        [connection] = await half_send_requests(address, 1)
        await until(lambda: not is_open(connection))
        connection.close()


async def test_repeated_scrapes_compute_the_metrics_once(serve: Serve) -> None:
    class CountingRegistry(CollectorRegistry):
        collected = 0

        def collect(self) -> Iterator[Metric]:
            self.collected += 1
            return iter(())

    registry = CountingRegistry()
    async with (
        serve(HttpLimits(scrape_interval=60.0, request_interval=0.0), registry=registry) as address,
        aiohttp.ClientSession(f"http://{address}") as session,
    ):
        for number in range(100):
            accept = ("text/plain", "application/openmetrics-text", f"text/plain; version={number}")[number % 3]
            async with session.get("/metrics", headers={hdrs.ACCEPT: accept}) as response:
                assert response.status == 200
    assert registry.collected == 2  # one per format


async def test_malformed_request_is_answered_without_a_log_line(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    async with serve() as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /healthz HTTP/9.9\r\nno colon\r\n\r\n")
        assert b" 400 " in await reader.readline()
        writer.close()
        await writer.wait_closed()
    assert not caplog.records
