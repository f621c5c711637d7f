from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import hdrs
from prometheus_client.parser import text_string_to_metric_families

from indexer import __version__
from indexer.config import Address
from indexer.health import serve_health
from indexer.metrics import Metrics


@dataclass
class Service:
    stopped: str | None = None
    behind: str | None = None
    shown: dict[str, Any] = field(default_factory=dict)

    def alive(self) -> str | None:
        return self.stopped

    def ready(self) -> str | None:
        return self.behind

    def status(self) -> Mapping[str, Any]:
        return self.shown


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
async def client(service: Service, metrics: Metrics) -> AsyncIterator[aiohttp.ClientSession]:
    async with (
        serve_health(Address("127.0.0.1", 0), service, metrics.registry) as address,
        aiohttp.ClientSession(f"http://{address}") as session,
    ):
        yield session


async def test_alive_and_ready(client: aiohttp.ClientSession) -> None:
    for path in ("/healthz", "/readyz"):
        async with client.get(path) as response:
            assert (response.status, await response.json()) == (200, {"status": "ok"})


async def test_alive_but_behind(client: aiohttp.ClientSession, service: Service) -> None:
    service.behind = "the newest event is 300 s old"
    async with client.get("/healthz") as response:
        assert response.status == 200
    async with client.get("/readyz") as response:
        assert response.status == 503
        assert await response.json() == {"status": "unavailable", "reason": "the newest event is 300 s old"}


async def test_a_stopped_stage_is_neither(client: aiohttp.ClientSession, service: Service) -> None:
    service.stopped = "writer"
    for path in ("/healthz", "/readyz"):
        async with client.get(path) as response:
            assert (response.status, (await response.json())["reason"]) == (503, "writer")


async def test_metrics_in_both_of_their_formats(client: aiohttp.ClientSession, metrics: Metrics) -> None:
    metrics.received("commit")
    async with client.get("/metrics") as response:
        assert response.headers[hdrs.CONTENT_TYPE].startswith("text/plain; version=0.0.4")
        families = {family.name: family for family in text_string_to_metric_families(await response.text())}
        counts = {sample.labels["kind"]: sample.value for sample in families["indexer_events_received"].samples}
        assert counts["commit"] == 1
    async with client.get("/metrics", headers={hdrs.ACCEPT: "application/openmetrics-text; version=1.0.0"}) as response:
        assert response.headers[hdrs.CONTENT_TYPE].startswith("application/openmetrics-text")
        assert (await response.text()).endswith("# EOF\n")


async def test_the_version(client: aiohttp.ClientSession) -> None:
    async with client.get("/xrpc/_health") as response:
        assert await response.json() == {"version": __version__}


async def test_the_page_shows_the_status_and_no_markup_of_others(
    client: aiohttp.ClientSession, service: Service
) -> None:
    service.behind = "<b>late</b>"
    service.shown = {"cursor": 1234567, "repos": {"<i>": 2}, "last error": "<script>", "handle": None}
    async with client.get("/") as response:
        text = await response.text()
        assert response.content_type == "text/html"
    assert "1,234,567" in text
    assert "&lt;script&gt;" in text
    assert "&lt;i&gt;: 2" in text
    assert not any(markup in text for markup in ("<script>", "<b>", "<i>"))


async def test_other_paths_and_methods_are_refused(client: aiohttp.ClientSession) -> None:
    async with client.get("/nothing") as response:
        assert response.status == 404
    async with client.post("/healthz") as response:
        assert response.status == 405


async def test_an_address_in_use_is_an_os_error(service: Service, metrics: Metrics) -> None:
    async with serve_health(Address("127.0.0.1", 0), service, metrics.registry) as address:
        with pytest.raises(OSError, match=str(address.port)):
            async with serve_health(address, service, metrics.registry):
                pass
