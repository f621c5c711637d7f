"""Which clients may use the paths of a feed."""

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer, make_mocked_request

from indexer.readers.access import MAX_BODY_BYTES, Access


async def greet(_: web.Request) -> web.Response:
    return web.Response(text="hello")


def basic(credentials: str) -> str:
    return "Basic " + base64.b64encode(credentials.encode()).decode()


@asynccontextmanager
async def client_of(password: str | None) -> AsyncIterator[aiohttp.ClientSession]:
    """Open a session with a server on loopback."""
    application = web.Application()
    application.router.add_get("/", Access(password).guard(greet))
    async with TestServer(application) as server, aiohttp.ClientSession(server.make_url("/")) as session:
        yield session


async def test_client_with_the_password_is_admitted() -> None:
    async with (
        client_of("pässword:x") as client,
        client.get("/", headers={"Authorization": basic("admin:pässword:x")}) as response,
    ):
        assert (response.status, await response.text()) == (200, "hello")


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Basic",
        "Basic ?",
        "Bearer secret",
        basic("secret"),
        basic("admin:wrong"),
        basic("other:secret"),
        "Basic " + base64.b64encode(b"admin:\xff").decode(),
    ],
)
async def test_bad_password_is_answered_with_401_and_one_clear_message(header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    async with client_of("secret") as client, client.get("/", headers=headers) as response:
        assert response.status == 401
        assert response.headers["WWW-Authenticate"].startswith("Basic ")
        message = "Basic authentication as admin is required, but the password is missing or wrong"
        assert await response.json() == {"message": message}


async def test_credentials_that_are_not_utf_8_are_refused() -> None:
    request: Any = SimpleNamespace(headers={"Authorization": "Basic \udcff"})  # as the HTTP library decodes it
    assert (await Access("secret").guard(greet)(request)).status == 401


async def test_web_page_is_not_admitted_without_a_password() -> None:
    async with client_of(None) as client, client.get("/", headers={"Origin": "https://attacker.test"}) as response:
        assert response.status == 403
        assert "INDEXER_ADMIN_PASSWORD" in (await response.json())["message"]


async def test_body_that_is_too_large_is_answered_in_json_with_the_limit() -> None:
    async def read(request: web.Request) -> web.Response:
        return web.Response(text=str(len(await request.read())))

    app = web.Application()
    app.router.add_post("/", Access(None).guard(read))
    async with TestClient(TestServer(app)) as client:
        async with client.post("/", data=BytesIO(b"x" * MAX_BODY_BYTES)) as response:
            assert (response.status, await response.text()) == (200, "1048576")
        async with client.post("/", data=BytesIO(b"x" * (MAX_BODY_BYTES + 1))) as response:
            message = "the body has more than 1,048,576 bytes; send it in parts"
            assert (response.status, await response.json()) == (413, {"message": message})


async def test_errors_of_the_http_server_have_a_json_body() -> None:
    async def fail(_: web.Request) -> web.Response:
        raise web.HTTPServiceUnavailable(text="128 websockets are open, which is the limit")

    response = await Access(None).guard(fail)(make_mocked_request("GET", "/").clone(remote="127.0.0.1"))
    assert isinstance(response, web.Response)
    assert (response.status, response.text) == (503, '{"message":"128 websockets are open, which is the limit"}')


@pytest.mark.parametrize(
    ("remote", "status"),
    [
        *[(remote, 200) for remote in ("127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1")],
        *[(remote, 403) for remote in ("192.0.2.7", "10.0.0.1", "2001:db8::1", "::ffff:192.0.2.7", "")],
    ],
)
async def test_only_loopback_clients_are_admitted_without_a_password(remote: str, status: int) -> None:
    request = make_mocked_request("GET", "/").clone(remote=remote)
    assert (await Access(None).guard(greet)(request)).status == status
