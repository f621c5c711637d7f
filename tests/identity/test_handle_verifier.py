import asyncio
from collections.abc import Callable

import dns.rcode
import pytest

from indexer.errors import UnavailableError
from indexer.identity import HandleVerifier
from indexer.reasons import FetchFailure
from indexer.sync.stored_identity import INVALID_HANDLE
from tests.identity.conftest import Loopback
from tests.identity.name_server import NameServer
from tests.outbound.scripted_host import Script, hang, http_response

DID = "did:plc:ewvi7nxzyoun6zhxrhs64oiz"
OTHER = "did:plc:aaaaaaaaaaaaaaaaaaaaaaaa"
HANDLE = "alice.test"
RECORD = f"_atproto.{HANDLE}"
PAGE = "/.well-known/atproto-did"


@pytest.fixture
def lookups() -> list[tuple[str, str]]:
    """Collect the reported lookups: method and result."""
    return []


@pytest.fixture
def verifier(loopback: Loopback, name_server: NameServer, lookups: list[tuple[str, str]]) -> HandleVerifier:
    return HandleVerifier(
        loopback,
        [name_server.address],
        allow_private_hosts=True,
        dns_timeout=3.0,
        http_timeout=3.0,
        on_lookup=lambda *lookup: lookups.append(lookup),
    )


async def respond_slowly(writer: asyncio.StreamWriter) -> None:
    """Send one byte at a time, each before the read timeout."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2000\r\n\r\n")
    while True:
        writer.write(b"d")
        await writer.drain()
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    "texts",
    [
        [f'"did={DID}"'],
        [f'"did={DID[:9]}" "{DID[9:]}"'],
        [f'"did={DID}"', '"v=spf1 -all"', '"did=no did"'],
        [f'"did={DID}"', f'"did={DID[:9]}" "{DID[9:]}"'],
    ],
)
async def test_txt_record_with_the_did_is_valid(
    verifier: HandleVerifier, name_server: NameServer, texts: list[str]
) -> None:
    name_server.texts[RECORD] = texts
    assert await verifier.verify_handle(DID, "Alice.Test") == HANDLE
    assert await verifier.verify_handle(OTHER, HANDLE) == INVALID_HANDLE


async def test_txt_records_with_different_dids_are_invalid(
    verifier: HandleVerifier, name_server: NameServer, loopback: Loopback
) -> None:
    name_server.texts[RECORD] = [f'"did={DID}"', f'"did={OTHER}"']
    loopback.host.pages[PAGE] = http_response(DID.encode())
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


async def test_txt_record_takes_precedence_over_the_host(
    verifier: HandleVerifier, name_server: NameServer, loopback: Loopback
) -> None:
    name_server.texts[RECORD] = [f'"did={OTHER}"']
    loopback.host.pages[PAGE] = http_response(DID.encode())
    assert await verifier.verify_handle(DID, HANDLE) == INVALID_HANDLE


@pytest.mark.parametrize(
    "page", [http_response(status=404), http_response(b"<html>"), http_response(b"\xff\xfe"), http_response()]
)
async def test_handle_without_did_in_dns_and_http_is_invalid(
    verifier: HandleVerifier, loopback: Loopback, page: bytes
) -> None:
    loopback.host.pages[PAGE] = page
    assert await verifier.verify_handle(DID, HANDLE) == INVALID_HANDLE


def silence(server: NameServer) -> None:
    server.silent = True


def fail(server: NameServer) -> None:
    server.rcode = dns.rcode.SERVFAIL


def garble(server: NameServer) -> None:
    server.garbled = True


@pytest.mark.parametrize(
    "disturb", [pytest.param(silence, marks=pytest.mark.slow), fail, pytest.param(garble, marks=pytest.mark.slow)]
)
async def test_http_decides_if_dns_fails(
    verifier: HandleVerifier, name_server: NameServer, loopback: Loopback, disturb: Callable[[NameServer], None]
) -> None:
    disturb(name_server)
    loopback.host.pages[PAGE] = http_response(DID.encode())
    assert await verifier.verify_handle(DID, HANDLE) == HANDLE
    loopback.host.pages[PAGE] = http_response(status=404)
    with pytest.raises(UnavailableError):
        await verifier.verify_handle(DID, HANDLE)


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        pytest.param(hang, FetchFailure.TIMEOUT, marks=pytest.mark.slow),
        pytest.param(respond_slowly, FetchFailure.TIMEOUT, marks=pytest.mark.slow),
        (http_response(status=500), FetchFailure.HTTP_STATUS),
        (http_response(b"x" * 3_000), FetchFailure.TOO_LARGE),
    ],
)
async def test_failure_of_the_host_is_unavailable(
    verifier: HandleVerifier, loopback: Loopback, page: bytes | Script, reason: FetchFailure
) -> None:
    loopback.host.pages[PAGE] = page
    with pytest.raises(UnavailableError) as failure:
        await verifier.verify_handle(DID, HANDLE)
    assert failure.value.reason is reason


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


async def close_connection(_writer: asyncio.StreamWriter) -> None:
    """Close the connection without a response."""


@pytest.mark.parametrize("addresses", [["192.0.2.1"], ["2001:db8::1"]])
async def test_host_that_closes_the_connection_is_unavailable(
    verifier: HandleVerifier, name_server: NameServer, loopback: Loopback, addresses: list[str]
) -> None:
    name_server.addresses[HANDLE] = addresses
    loopback.host.pages[PAGE] = close_connection
    with pytest.raises(UnavailableError) as failure:
        await verifier.verify_handle(DID, HANDLE)
    assert failure.value.reason is FetchFailure.UNREACHABLE


async def test_handle_whose_host_does_not_exist_is_invalid(verifier: HandleVerifier, loopback: Loopback) -> None:
    loopback.missing_hosts.add(HANDLE)
    assert await verifier.verify_handle(DID, HANDLE) == INVALID_HANDLE


async def test_lookups_are_reported(
    verifier: HandleVerifier, name_server: NameServer, loopback: Loopback, lookups: list[tuple[str, str]]
) -> None:
    loopback.host.pages[PAGE] = http_response(status=500)
    with pytest.raises(UnavailableError):
        await verifier.verify_handle(DID, HANDLE)
    loopback.host.pages[PAGE] = http_response(DID.encode())
    await verifier.verify_handle(DID, HANDLE)
    name_server.texts[RECORD] = [f'"did={DID}"']
    await verifier.verify_handle(DID, HANDLE)
    assert lookups == [
        ("dns", "missing"),
        ("https", "http-status"),
        ("dns", "missing"),
        ("https", "found"),
        ("dns", "found"),
    ]
