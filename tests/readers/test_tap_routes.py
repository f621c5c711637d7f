"""The answers to questions of tap's clients, beside those of tap."""

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from indexer.db import Database
from indexer.readers.access import Access
from indexer.readers.tap.routes import MAX_QUERIES, TapRoutes
from tests.readers.tap_client import feed_client, tap_daemon
from tests.waiting import until

pytestmark = pytest.mark.slow


async def get(client: aiohttp.ClientSession, path: str) -> tuple[int, Any]:
    async with client.get(path) as response:
        assert response.content_type == "application/json"
        return response.status, json.loads(await response.text(), object_pairs_hook=list)


async def test_questions_are_answered_as_tap_answers_them(database: str, tmp_path: Path) -> None:
    async with tap_daemon(database, tmp_path) as daemon:
        account = daemon.create_account("ada.test")
        await daemon.wait_until_equal()
        async with feed_client(daemon) as client:
            # Keys in the order of tap, which sorts them.
            assert await get(client, f"/info/{account.did}") == (
                200,
                [
                    ("did", account.did),
                    ("error", ""),
                    ("handle", ""),
                    ("records", 5),
                    ("retries", 0),
                    ("rev", account.rev),
                    ("state", "active"),
                ],
            )
            assert await get(client, "/info/did:plc:abc") == (404, [("message", "repo not found")])
            assert await get(client, "/info/xyz") == (404, [("message", "repo not found")])
            assert await get(client, "/info/did:plc:a%00") == (404, [("message", "repo not found")])
            assert await get(client, "/resolve/xyz") == (400, [("message", "improperly formatted DID")])
            unknown = "did:plc:" + "a" * 24
            assert await get(client, f"/resolve/{unknown}") == (404, [("message", "DID not found")])
            status, document = await get(client, f"/resolve/{account.did}")
            assert (status, dict(document)["id"]) == (200, account.did)
            assert dict(document)["alsoKnownAs"] == ["at://ada.test"]
            assert dict(dict(document)["service"][0])["serviceEndpoint"] == account.pds.url
            assert dict(dict(document)["verificationMethod"][0])["publicKeyMultibase"].startswith("z")
            assert await get(client, "/stats/repo-count") == (200, [("repo_count", 1)])
            assert await get(client, "/stats/record-count") == (200, [("record_count", 5)])
            assert await get(client, "/stats/outbox-buffer") == (200, [("outbox_buffer", 6)]), "changes of 5 records"
            assert await get(client, "/stats/resync-buffer") == (200, [("resync_buffer", 0)])
            await daemon.execute("select atproto.untrack($1)", [account.did])
            assert await get(client, f"/info/{account.did}") == (404, [("message", "repo not found")])
            assert await get(client, "/stats/cursors") == (
                200,
                [("firehose", daemon.network.relay.seq), ("list_repos", "")],
            )


async def test_questions_use_a_limited_number_of_connections() -> None:
    """Otherwise, counts of many rows would occupy the connections of the stages."""
    running, most, release = 0, 0, asyncio.Event()

    class FakeDatabase:
        def __init__(self) -> None:
            self.feed = self

        async def count_rows(self, _: str) -> int:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await release.wait()
            running -= 1
            return 7

    application = web.Application()
    application.router.add_routes(TapRoutes(cast(Database, FakeDatabase()), cast(Any, None)).routes(Access(None)))
    async with TestServer(application) as server, aiohttp.ClientSession(server.make_url("/")) as client:
        asking = [asyncio.create_task(get(client, "/stats/record-count")) for _ in range(10)]
        await until(lambda: running == MAX_QUERIES)
        release.set()
        assert await asyncio.gather(*asking) == [(200, [("record_count", 7)])] * 10
    assert most == MAX_QUERIES


async def put(client: aiohttp.ClientSession, path: str, body: Any, method: str = "PUT") -> tuple[int, Any]:
    async with client.request(method, path, data=body if isinstance(body, str) else json.dumps(body)) as response:
        return response.status, await response.json(content_type=None)


async def test_scope_is_changed_and_shown_and_bad_requests_change_nothing(database: str, tmp_path: Path) -> None:
    async with tap_daemon(database, tmp_path, track="listed") as daemon, feed_client(daemon) as client:

        async def is_stored() -> bool:
            return await daemon.db.scope.load() is not None

        await until(is_stored)
        for path in ("/collection-filters", "/signal-collections"):
            chosen = {"collections": ["app.bsky.feed.post", "com.example.*"]}
            assert await put(client, path, chosen) == (200, chosen)
            for bad in ("", "x", "[]", {}, {"collections": "app.bsky.feed.post"}, {"collections": [1]}):
                status, body = await put(client, path, bad)
                assert (status, body) == (400, {"message": 'the body must be JSON of the form {"collections": ["…"]}'})
            status, body = await put(client, path, {"collections": ["not a pattern"]})
            assert status == 400
            assert "not a pattern" in body["message"]
            assert await get(client, path) == (200, list(chosen.items()))
        for path in ("/repos/add", "/repos/remove"):
            status, body = await put(client, path, {"dids": ["did:plc:" + "a" * 24, "nonsense"]}, "POST")
            assert status == 400
            assert "nonsense" in body["message"]
            assert await get(client, "/stats/repo-count") == (200, [("repo_count", 0)])
