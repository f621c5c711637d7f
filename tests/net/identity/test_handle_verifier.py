import asyncio
from typing import Any

import dns.rcode
import pytest

from indexer.errors import UnavailableError
from indexer.net.identity.handle_verifier import HandleVerifier
from indexer.reasons import FetchFailure
from indexer.sync.identity import INVALID_HANDLE
from tests.net.http.http_requests import writes
from tests.net.http.scripted_host import Script, gzip_response, hang, http_response
from tests.net.identity.conftest import Loopback
from tests.net.identity.name_server import NameServer

DID = "did:plc:ewvi7nxzyoun6zhxrhs64oiz"
OTHER = "did:plc:aaaaaaaaaaaaaaaaaaaaaaaa"
HANDLE = "alice.test"
RECORD = f"_atproto.{HANDLE}"
PAGE = "/.well-known/atproto-did"


def verifier_with(
    loopback: Loopback, name_server: NameServer, *, dns_timeout: float = 3.0, http_timeout: float = 3.0
) -> HandleVerifier:
    return HandleVerifier(
        loopback, [name_server.address], allow_private_hosts=True, dns_timeout=dns_timeout, http_timeout=http_timeout
    )


@pytest.fixture
def verifier(loopback: Loopback, name_server: NameServer) -> HandleVerifier:
    return verifier_with(loopback, name_server)


def redirect(location: str) -> bytes:
    return http_response(status=302, headers={"Location": location})


RESPOND_SLOWLY = writes(b"HTTP/1.1 200 OK\r\nContent-Length: 2000\r\n\r\n", b"d", every=0.05, forever=True)
"""Sends one byte at a time, each before the read timeout."""


async def test_txt_record_with_the_did_is_valid(verifier: HandleVerifier, name_server: NameServer) -> None:
    whole, parts = f'"did={DID}"', f'"did={DID[:9]}" "{DID[9:]}"'
    for texts in ([whole], [parts], [whole, '"v=spf1 -all"', '"did=no did"'], [whole, parts]):
        name_server.texts[RECORD] = texts
        assert await verifier.verify_handle(DID, "Alice.Test") == HANDLE
        assert await verifier.verify_handle(OTHER, HANDLE) == INVALID_HANDLE


async def test_txt_record_with_another_did_is_invalid_whatever_the_host_says(
    verifier: HandleVerifier, name_server: NameServer, loopback: Loopback
) -> None:
    loopback.host.pages[PAGE] = http_response(DID.encode())
    for texts in ([f'"did={DID}"', f'"did={OTHER}"'], [f'"did={OTHER}"']):
        name_server.texts[RECORD] = texts
        assert await verifier.verify_handle(DID, HANDLE) == INVALID_HANDLE
    assert loopback.requests == []


@pytest.mark.parametrize("texts", [None, [], ['"v=spf1 -all"'], ['"did=no did"'], [r'"did=\255\254"']])
async def test_without_a_txt_record_the_host_of_the_handle_decides(
    verifier: HandleVerifier, name_server: NameServer, loopback: Loopback, texts: list[str] | None
) -> None:
    if texts is not None:
        name_server.texts[RECORD] = texts
    loopback.host.pages[PAGE] = http_response(f"  {DID}\r\n".encode())
    assert await verifier.verify_handle(DID, HANDLE) == HANDLE
    assert await verifier.verify_handle(OTHER, HANDLE) == INVALID_HANDLE
    assert loopback.requests[0] == f"https://{HANDLE}{PAGE}"


async def test_handle_without_did_in_dns_and_http_is_invalid(verifier: HandleVerifier, loopback: Loopback) -> None:
    for page in (http_response(status=404), http_response(b"<html>"), http_response(b"\xff\xfe"), http_response()):
        loopback.host.pages[PAGE] = page
        assert await verifier.verify_handle(DID, HANDLE) == INVALID_HANDLE
    loopback.missing_hosts.add(HANDLE)
    assert await verifier.verify_handle(DID, HANDLE) == INVALID_HANDLE


@pytest.mark.parametrize(
    "disturb",
    [
        pytest.param({"silent": True}, marks=pytest.mark.slow, id="silent"),
        pytest.param({"rcode": dns.rcode.SERVFAIL}, id="failing"),
        pytest.param({"garbled": True}, marks=pytest.mark.slow, id="garbled"),
    ],
)
async def test_http_decides_if_dns_fails(name_server: NameServer, loopback: Loopback, disturb: dict[str, Any]) -> None:
    vars(name_server).update(disturb)
    verifier = verifier_with(loopback, name_server, dns_timeout=0.3)
    loopback.host.pages[PAGE] = http_response(DID.encode())
    assert await verifier.verify_handle(DID, HANDLE) == HANDLE
    loopback.host.pages[PAGE] = http_response(status=404)
    with pytest.raises(UnavailableError):
        await verifier.verify_handle(DID, HANDLE)


async def close_connection(_writer: asyncio.StreamWriter) -> None:
    """Close the connection without a response."""


@pytest.mark.parametrize(
    ("page", "reason", "seconds"),
    [
        pytest.param(hang, FetchFailure.TIMEOUT, 0.3, marks=pytest.mark.slow),
        pytest.param(RESPOND_SLOWLY, FetchFailure.TIMEOUT, 0.3, marks=pytest.mark.slow),
        (http_response(status=500), FetchFailure.HTTP_STATUS, 3.0),
        (http_response(status=503), FetchFailure.HTTP_STATUS, 3.0),
        (http_response(status=429), FetchFailure.THROTTLED, 3.0),
        (close_connection, FetchFailure.UNREACHABLE, 3.0),
        (writes(http_response(DID.encode(), length=100)), FetchFailure.UNREACHABLE, 3.0),
    ],
)
async def test_failure_of_the_host_is_unavailable(
    name_server: NameServer, loopback: Loopback, page: bytes | Script, reason: FetchFailure, seconds: float
) -> None:
    loopback.host.pages[PAGE] = page
    with pytest.raises(UnavailableError) as failure:
        await verifier_with(loopback, name_server, http_timeout=seconds).verify_handle(DID, HANDLE)
    assert failure.value.reason is reason


LOGIN_PAGE = b"<!DOCTYPE html><html>" + b"<p>Log in</p>" * 8_000


@pytest.mark.parametrize(
    "pages",
    [
        pytest.param({PAGE: http_response(LOGIN_PAGE)}, id="large page"),
        pytest.param({PAGE: gzip_response(LOGIN_PAGE)}, id="large compressed page"),
        pytest.param({PAGE: http_response(LOGIN_PAGE, status=404)}, id="large page of an error"),
        pytest.param({PAGE: http_response(status=204)}, id="no content"),
        pytest.param({PAGE: http_response(DID.encode(), headers={"Content-Encoding": "br"})}, id="unknown encoding"),
        pytest.param({PAGE: http_response(DID.encode(), headers={"Content-Encoding": "gzip"})}, id="not gzip"),
        pytest.param({PAGE: redirect("/login"), "/login": http_response(LOGIN_PAGE)}, id="redirect to a large page"),
        pytest.param({PAGE: redirect(PAGE)}, id="endless redirect"),
        pytest.param({PAGE: redirect("ftp://alice.test/")}, id="redirect to no web page"),
        pytest.param({PAGE: http_response(status=302)}, id="redirect to nowhere"),
    ],
)
async def test_a_definite_answer_without_a_did_is_no_handle(
    verifier: HandleVerifier, loopback: Loopback, pages: dict[str, bytes]
) -> None:
    loopback.host.pages.update(pages)
    assert await verifier.verify_handle(DID, HANDLE) == INVALID_HANDLE


async def test_page_of_a_handle_is_read_as_other_programs_read_it(verifier: HandleVerifier, loopback: Loopback) -> None:
    for body in (f"\ufeff{DID}\n", f"\r\n {DID} \r\n# my DID\r\n", f"{DID}\n{OTHER}"):
        loopback.host.pages[PAGE] = http_response(body.encode())
        assert await verifier.verify_handle(DID, HANDLE) == HANDLE
        assert await verifier.verify_handle(OTHER, HANDLE) == INVALID_HANDLE


@pytest.mark.parametrize(
    "claimed", ["no_handle", "alice.local", "ALICE.INTERNAL", "alice.onion", "alice", "", "x." * 130]
)
async def test_handle_that_cannot_resolve_is_not_looked_up(
    verifier: HandleVerifier, name_server: NameServer, loopback: Loopback, claimed: str
) -> None:
    assert await verifier.verify_handle(DID, claimed) == INVALID_HANDLE
    assert name_server.queries == []
    assert loopback.requests == []


async def test_handle_too_long_for_dns_is_resolved_by_http(
    verifier: HandleVerifier, name_server: NameServer, loopback: Loopback
) -> None:
    long = ".".join(["a" * 60] * 4) + ".test"
    loopback.host.pages[PAGE] = http_response(DID.encode())
    assert await verifier.verify_handle(DID, long) == long
    assert name_server.queries == []


async def test_truncated_dns_response_is_requested_by_tcp(verifier: HandleVerifier, name_server: NameServer) -> None:
    name_server.truncated = True
    name_server.texts[RECORD] = [f'"{"x" * 200}"'] * 10 + [f'"did={DID}"']
    assert await verifier.verify_handle(DID, HANDLE) == HANDLE
    assert name_server.tcp_queries == [RECORD]
