"""The routes of the status page, with a source that a test controls."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import hdrs, web
from aiohttp.test_utils import TestServer

from indexer.db import DatabaseError
from indexer.reasons import FetchFailure
from indexer.serve.account_status import account_status
from indexer.serve.status_document import StatusDocument
from indexer.serve.status_page import LOOKUPS_PER_SECOND, MAX_LOOKUPS, STATIC_FILES, status_routes
from tests import chromium
from tests.chromium import open_browser
from tests.serve.test_account_status import NOW, SYNCHRONIZED
from tests.waiting import until

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


class FakeSource:
    def __init__(self) -> None:
        self.documents = 0
        self.lookups: list[str] = []
        self.release = asyncio.Event()
        self.release.set()
        self.error: Exception | None = None

    def document(self) -> StatusDocument:
        self.documents += 1
        return StatusDocument(gaps_open=self.documents)

    async def account(self, account: str) -> dict[str, Any] | None:
        self.lookups.append(account)
        await self.release.wait()
        if self.error is not None:
            raise self.error
        return account_status(SYNCHRONIZED, NOW) if account == "did:plc:one" else None


@pytest.fixture
def source() -> FakeSource:
    return FakeSource()


@pytest.fixture
async def url(source: FakeSource) -> AsyncIterator[str]:
    application = web.Application()
    application.router.add_routes(status_routes(source.document, source.account))
    async with TestServer(application) as server:
        yield str(server.make_url("/"))


@pytest.fixture
async def client(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(url) as session:
        yield session


async def look_up(client: aiohttp.ClientSession, account: str) -> tuple[int, dict[str, Any]]:
    async with client.get("/account.json", params={"account": account}) as response:
        return response.status, await response.json()


async def test_every_answer_has_the_security_headers_and_no_inline_code(client: aiohttp.ClientSession) -> None:
    for path in (*STATIC_FILES, "/status.json", "/account.json"):
        async with client.get(path) as response:
            text = await response.text()
            assert response.headers["Content-Security-Policy"] == CONTENT_SECURITY_POLICY
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert response.headers[hdrs.CACHE_CONTROL] in {"no-cache", "no-store"}
        if "uplot" not in path:
            assert [forbidden for forbidden in ("style=", "innerHTML", "<style") if forbidden in text] == [], path
            assert text.count("<script") == text.count("<script src=")


async def test_many_requests_compute_one_document(client: aiohttp.ClientSession, source: FakeSource) -> None:
    async def get() -> Any:
        async with client.get("/status.json") as response:
            return await response.json()

    assert [answer["gaps_open"] for answer in await asyncio.gather(*(get() for _ in range(50)))] == [1] * 50
    assert source.documents == 1


async def test_account_is_looked_up_by_did_or_handle(client: aiohttp.ClientSession, source: FakeSource) -> None:
    status, found = await look_up(client, " did:plc:one ")
    assert (status, found["found"], found["did"], found["sync_status"]) == (200, True, "did:plc:one", "synchronized")
    status, unknown = await look_up(client, "@Nobody.Test")
    assert (status, unknown["found"]) == (200, False)
    assert unknown["summary"][0].startswith("nobody.test is not in the database.")
    assert source.lookups == ["did:plc:one", "nobody.test"]


async def test_bad_account_is_refused_before_a_query(client: aiohttp.ClientSession, source: FakeSource) -> None:
    for account in ("", "alice", "<img src=x onerror=alert(1)>", "did:plc:" + "a" * 4_000):
        status, body = await look_up(client, account)
        assert (status, source.lookups) == (400, [])
        assert "neither a DID nor a handle" in body["error"]
        assert len(body["error"]) < 200


async def test_concurrent_lookups_are_limited(client: aiohttp.ClientSession, source: FakeSource) -> None:
    source.release.clear()
    waiting = [asyncio.create_task(look_up(client, "did:plc:one")) for _ in range(MAX_LOOKUPS)]
    await until(lambda: len(source.lookups) == MAX_LOOKUPS)
    assert (await look_up(client, "did:plc:one"))[0] == 429
    source.release.set()
    assert [(await task)[0] for task in waiting] == [200] * MAX_LOOKUPS


async def test_rate_of_lookups_is_limited(client: aiohttp.ClientSession, source: FakeSource) -> None:
    statuses = [(await look_up(client, "did:plc:one"))[0] for _ in range(20 * int(LOOKUPS_PER_SECOND))]
    assert 429 in statuses
    assert len(source.lookups) == statuses.count(200) < len(statuses)


async def test_lookup_without_a_database_says_so(client: aiohttp.ClientSession, source: FakeSource) -> None:
    source.error = DatabaseError(FetchFailure.UNREACHABLE, "postgresql://user:secret@host")
    status, body = await look_up(client, "did:plc:one")
    assert (status, body) == (503, {"error": "the database does not answer; try again later"})


@pytest.mark.proof("browser")
@pytest.mark.skipif(chromium.EXECUTABLE is None, reason=f"Chromium is not installed: run {chromium.INSTALL_COMMAND}")
async def test_numbers_are_shown_in_human_units(url: str) -> None:
    shown = {
        "duration(0.01753)": "0.02 s",
        "duration(4.56)": "4.6 s",
        "duration(185)": "3 min 5 s",
        "duration(90000)": "1 d 1 h",
        "duration(null)": "\N{EN DASH}",
        "ago(0.3)": "just now",
        "ago(200)": "3 min ago",
        "count(9999)": "9,999",
        "count(1234567)": "1.2 M",
        "count(45e6)": "45 M",
        "plural(1, 'worker')": "1 worker",
        "plural(1200, 'worker')": "1,200 workers",
        "bytes(512)": "512 B",
        "bytes(12.3e6)": "12.3 MB",
        "rate(0.2)": "0.2/s",
        "rate(4321)": "4,321/s",
        "percent(0.99999)": "99.9 %",
        "percent(1)": "100 %",
    }
    async with open_browser() as page:
        await page.open(url)
        await page.wait_for("document.readyState === 'complete'")
        calls = ", ".join(f"format.{call}" for call in shown)
        texts = await page.evaluate(f"import('/page/format.js').then(format => [{calls}])")
        assert [text.replace("\N{NO-BREAK SPACE}", " ") for text in texts] == list(shown.values())
