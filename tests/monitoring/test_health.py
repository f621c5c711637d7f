from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import hdrs
from prometheus_client.parser import text_string_to_metric_families

from indexer import __version__
from indexer.monitoring.health import serve_health
from indexer.monitoring.metrics import Metrics
from indexer.settings import Address


@dataclass
class FakeProbe:
    stalled: str | None = None
    not_ready: str | None = None
    rows: dict[str, Any] = field(default_factory=dict)

    def alive(self) -> str | None:
        return self.stalled

    def ready(self) -> str | None:
        return self.not_ready

    def status(self) -> Mapping[str, Any]:
        return self.rows


@pytest.fixture
def probe() -> FakeProbe:
    return FakeProbe()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
async def client(probe: FakeProbe, metrics: Metrics) -> AsyncIterator[aiohttp.ClientSession]:
    async with (
        serve_health(Address("127.0.0.1", 0), probe, metrics.registry) as address,
        aiohttp.ClientSession(f"http://{address}") as session,
    ):
        yield session


async def test_checks_of_a_ready_daemon_return_200(client: aiohttp.ClientSession) -> None:
    for path in ("/healthz", "/readyz"):
        async with client.get(path) as response:
            assert (response.status, await response.json()) == (200, {"status": "ok"})


async def test_lagging_daemon_is_alive_but_not_ready(client: aiohttp.ClientSession, probe: FakeProbe) -> None:
    probe.not_ready = "the newest event is 300 s old"
    async with client.get("/healthz") as response:
        assert response.status == 200
    async with client.get("/readyz") as response:
        assert response.status == 503
        assert await response.json() == {"status": "unavailable", "reason": "the newest event is 300 s old"}


async def test_daemon_with_a_stalled_stage_is_neither_alive_nor_ready(
    client: aiohttp.ClientSession, probe: FakeProbe
) -> None:
    probe.stalled = "writer"
    for path in ("/healthz", "/readyz"):
        async with client.get(path) as response:
            assert (response.status, (await response.json())["reason"]) == (503, "writer")


async def test_metrics_are_served_in_both_formats(client: aiohttp.ClientSession, metrics: Metrics) -> None:
    metrics.received("commit")
    async with client.get("/metrics") as response:
        assert response.headers[hdrs.CONTENT_TYPE].startswith("text/plain; version=0.0.4")
        families = {family.name: family for family in text_string_to_metric_families(await response.text())}
        counts = {sample.labels["kind"]: sample.value for sample in families["indexer_events_received"].samples}
        assert counts["commit"] == 1
    async with client.get("/metrics", headers={hdrs.ACCEPT: "application/openmetrics-text; version=1.0.0"}) as response:
        assert response.headers[hdrs.CONTENT_TYPE].startswith("application/openmetrics-text")
        assert (await response.text()).endswith("# EOF\n")


async def test_xrpc_health_returns_the_version(client: aiohttp.ClientSession) -> None:
    async with client.get("/xrpc/_health") as response:
        assert await response.json() == {"version": __version__}


async def test_status_page_escapes_markup(client: aiohttp.ClientSession, probe: FakeProbe) -> None:
    probe.not_ready = "<b>late</b>"
    probe.rows = {"cursor": 1234567, "repos": {"<i>": 2}, "last error": "<script>", "handle": None}
    async with client.get("/") as response:
        text = await response.text()
        assert response.content_type == "text/html"
    assert "1,234,567" in text
    assert "&lt;script&gt;" in text
    assert "&lt;i&gt;: 2" in text
    assert not any(markup in text for markup in ("<script>", "<b>", "<i>"))


async def test_unknown_paths_and_methods_are_rejected(client: aiohttp.ClientSession) -> None:
    async with client.get("/nothing") as response:
        assert response.status == 404
    async with client.post("/healthz") as response:
        assert response.status == 405


async def test_address_in_use_raises_os_error(probe: FakeProbe, metrics: Metrics) -> None:
    async with serve_health(Address("127.0.0.1", 0), probe, metrics.registry) as address:
        with pytest.raises(OSError, match=str(address.port)):
            async with serve_health(address, probe, metrics.registry):
                pass
