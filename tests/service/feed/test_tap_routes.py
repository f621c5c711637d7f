"""The answers to questions of tap's clients, beside those of tap."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.daemon.running_daemon import RunningDaemon, running_daemon
from tests.waiting import until

ROLES = "live,resync,feed"


@asynccontextmanager
async def feed_client(daemon: RunningDaemon) -> AsyncIterator[aiohttp.ClientSession]:
    """Open a session with the HTTP server of a daemon."""
    async with daemon.stages.serve_http() as address, aiohttp.ClientSession(f"http://{address}") as session:
        yield session


async def get(client: aiohttp.ClientSession, path: str) -> tuple[int, Any]:
    async with client.get(path) as response:
        assert response.content_type == "application/json"
        return response.status, json.loads(await response.text(), object_pairs_hook=list)


@pytest.mark.slow
async def test_questions_are_answered_as_tap_answers_them(database: str, tmp_path: Path) -> None:
    async with running_daemon(database, tmp_path, http_bind="127.0.0.1:0", roles=ROLES) as daemon:
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
            assert await get(client, "/stats/cursors") == (
                200,
                [("firehose", daemon.network.relay.seq), ("list_repos", "")],
            )


@pytest.mark.slow
async def test_daemon_without_the_role_does_not_answer(database: str, tmp_path: Path) -> None:
    async with (
        running_daemon(database, tmp_path, http_bind="127.0.0.1:0") as daemon,
        feed_client(daemon) as client,
        client.get("/stats/repo-count") as response,
    ):
        assert response.status == 404


async def put(client: aiohttp.ClientSession, path: str, body: Any, method: str = "PUT") -> tuple[int, Any]:
    async with client.request(method, path, data=body if isinstance(body, str) else json.dumps(body)) as response:
        return response.status, await response.json(content_type=None)


@pytest.mark.slow
async def test_collections_are_changed_and_shown_and_bad_ones_change_nothing(database: str, tmp_path: Path) -> None:
    async with (
        running_daemon(database, tmp_path, http_bind="127.0.0.1:0", roles=ROLES) as daemon,
        feed_client(daemon) as client,
    ):

        async def is_stored() -> bool:
            return await daemon.store.scope() is not None

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


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/repos/add", "/repos/remove"])
async def test_bad_did_is_answered_with_one_clear_message_and_changes_nothing(
    database: str, tmp_path: Path, path: str
) -> None:
    async with (
        running_daemon(database, tmp_path, http_bind="127.0.0.1:0", roles=ROLES, track="listed") as daemon,
        feed_client(daemon) as client,
    ):
        good = "did:plc:" + "a" * 24
        status, body = await put(client, path, {"dids": [good, "nonsense"]}, "POST")
        assert status == 400
        assert "nonsense" in body["message"]
        assert await get(client, "/stats/repo-count") == (200, [("repo_count", 0)])
