import asyncio
from collections.abc import Callable

import dns.rcode
import pytest

from indexer.errors import UnavailableError
from indexer.identity import Handles
from indexer.reasons import FetchFailure
from indexer.sync.identity import INVALID_HANDLE
from tests.identity.conftest import Loopback
from tests.identity.names import NameServer
from tests.outbound.host import Script, answer

DID = "did:plc:ewvi7nxzyoun6zhxrhs64oiz"
OTHER = "did:plc:aaaaaaaaaaaaaaaaaaaaaaaa"
HANDLE = "alice.test"
RECORD = f"_atproto.{HANDLE}"
PAGE = "/.well-known/atproto-did"


@pytest.fixture
def heard() -> list[tuple[str, str]]:
    """The look-ups that were told of."""
    return []


@pytest.fixture
def handles(loopback: Loopback, name_server: NameServer, heard: list[tuple[str, str]]) -> Handles:
    return Handles(
        loopback,
        [name_server.address],
        allow_private_hosts=True,
        dns_seconds=0.5,
        http_seconds=0.5,
        on_lookup=lambda *look_up: heard.append(look_up),
    )


async def hang(_writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def drip(writer: asyncio.StreamWriter) -> None:
    """One byte at a time, each of them in time."""
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
async def test_a_text_record_that_names_the_did(handles: Handles, name_server: NameServer, texts: list[str]) -> None:
    name_server.texts[RECORD] = texts
    assert await handles.verify_handle(DID, "Alice.Test") == HANDLE
    assert await handles.verify_handle(OTHER, HANDLE) == INVALID_HANDLE


async def test_text_records_that_differ_speak_for_none(
    handles: Handles, name_server: NameServer, loopback: Loopback
) -> None:
    name_server.texts[RECORD] = [f'"did={DID}"', f'"did={OTHER}"']
    loopback.host.pages[PAGE] = answer(DID.encode())
    assert await handles.verify_handle(DID, HANDLE) == INVALID_HANDLE
    assert loopback.asked == []


@pytest.mark.parametrize("texts", [None, [], ['"v=spf1 -all"'], ['"did=no did"'], [r'"did=\255\254"']])
async def test_without_a_record_its_own_host_is_asked(
    handles: Handles, name_server: NameServer, loopback: Loopback, texts: list[str] | None
) -> None:
    if texts is not None:
        name_server.texts[RECORD] = texts
    loopback.host.pages[PAGE] = answer(f"  {DID}\r\n".encode())
    assert await handles.verify_handle(DID, HANDLE) == HANDLE
    assert await handles.verify_handle(OTHER, HANDLE) == INVALID_HANDLE
    assert loopback.asked[0] == f"https://{HANDLE}{PAGE}"


async def test_the_record_goes_before_the_host(handles: Handles, name_server: NameServer, loopback: Loopback) -> None:
    name_server.texts[RECORD] = [f'"did={OTHER}"']
    loopback.host.pages[PAGE] = answer(DID.encode())
    assert await handles.verify_handle(DID, HANDLE) == INVALID_HANDLE


@pytest.mark.parametrize("page", [answer(status=404), answer(b"<html>"), answer(b"\xff\xfe"), answer()])
async def test_neither_names_a_did(handles: Handles, loopback: Loopback, page: bytes) -> None:
    loopback.host.pages[PAGE] = page
    assert await handles.verify_handle(DID, HANDLE) == INVALID_HANDLE


def silence(server: NameServer) -> None:
    server.silent = True


def fail(server: NameServer) -> None:
    server.rcode = dns.rcode.SERVFAIL


def garble(server: NameServer) -> None:
    server.garbled = True


@pytest.mark.parametrize("trouble", [silence, fail, garble])
async def test_a_name_server_in_trouble_leaves_it_to_the_host(
    handles: Handles, name_server: NameServer, loopback: Loopback, trouble: Callable[[NameServer], None]
) -> None:
    trouble(name_server)
    loopback.host.pages[PAGE] = answer(DID.encode())
    assert await handles.verify_handle(DID, HANDLE) == HANDLE
    loopback.host.pages[PAGE] = answer(status=404)
    with pytest.raises(UnavailableError):
        await handles.verify_handle(DID, HANDLE)


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        (hang, FetchFailure.TIMEOUT),
        (drip, FetchFailure.TIMEOUT),
        (answer(status=500), FetchFailure.HTTP_STATUS),
        (answer(b"x" * 3_000), FetchFailure.TOO_LARGE),
    ],
)
async def test_a_host_that_settles_nothing_is_unavailable(
    handles: Handles, loopback: Loopback, page: bytes | Script, reason: FetchFailure
) -> None:
    loopback.host.pages[PAGE] = page
    with pytest.raises(UnavailableError) as failure:
        await handles.verify_handle(DID, HANDLE)
    assert failure.value.reason is reason


@pytest.mark.parametrize(
    "claimed", ["no_handle", "alice.local", "ALICE.INTERNAL", "alice.onion", "alice", "", "x." * 130]
)
async def test_what_can_never_resolve_is_not_asked_for(
    handles: Handles, name_server: NameServer, loopback: Loopback, claimed: str
) -> None:
    assert await handles.verify_handle(DID, claimed) == INVALID_HANDLE
    assert name_server.asked == []
    assert loopback.asked == []


async def test_a_name_too_long_for_the_record_has_only_its_host(
    handles: Handles, name_server: NameServer, loopback: Loopback
) -> None:
    long = ".".join(["a" * 60] * 4) + ".test"
    loopback.host.pages[PAGE] = answer(DID.encode())
    assert await handles.verify_handle(DID, long) == long
    assert name_server.asked == []


async def test_an_answer_that_fits_no_datagram_is_asked_for_by_tcp(handles: Handles, name_server: NameServer) -> None:
    name_server.truncated = True
    name_server.texts[RECORD] = [f'"{"x" * 200}"'] * 10 + [f'"did={DID}"']
    assert await handles.verify_handle(DID, HANDLE) == HANDLE
    assert name_server.by_tcp == [RECORD]


async def closed(_writer: asyncio.StreamWriter) -> None:
    """The connection ends before there was an answer."""


@pytest.mark.parametrize("addresses", [["192.0.2.1"], ["2001:db8::1"]])
async def test_a_host_that_is_there_may_answer_another_time(
    handles: Handles, name_server: NameServer, loopback: Loopback, addresses: list[str]
) -> None:
    name_server.addresses[HANDLE] = addresses
    loopback.host.pages[PAGE] = closed
    with pytest.raises(UnavailableError) as failure:
        await handles.verify_handle(DID, HANDLE)
    assert failure.value.reason is FetchFailure.UNREACHABLE


async def test_a_name_that_is_gone_is_no_handle(handles: Handles, loopback: Loopback) -> None:
    loopback.gone.add(HANDLE)
    assert await handles.verify_handle(DID, HANDLE) == INVALID_HANDLE


async def test_look_ups_are_told_of(
    handles: Handles, name_server: NameServer, loopback: Loopback, heard: list[tuple[str, str]]
) -> None:
    loopback.host.pages[PAGE] = answer(status=500)
    with pytest.raises(UnavailableError):
        await handles.verify_handle(DID, HANDLE)
    loopback.host.pages[PAGE] = answer(DID.encode())
    await handles.verify_handle(DID, HANDLE)
    name_server.texts[RECORD] = [f'"did={DID}"']
    await handles.verify_handle(DID, HANDLE)
    assert heard == [
        ("dns", "missing"),
        ("https", "http-status"),
        ("dns", "missing"),
        ("https", "found"),
        ("dns", "found"),
    ]
