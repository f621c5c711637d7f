import asyncio
from collections.abc import Callable

import dns.rcode
import pytest

from indexer.errors import UnavailableError
from indexer.identity import INVALID_HANDLE, Handles
from indexer.reasons import FetchFailure
from tests.identity.conftest import Loopback
from tests.identity.names import NameServer
from tests.outbound.host import Script, answer

DID = "did:plc:ewvi7nxzyoun6zhxrhs64oiz"
OTHER = "did:plc:aaaaaaaaaaaaaaaaaaaaaaaa"
HANDLE = "alice.test"
RECORD = f"_atproto.{HANDLE}"
PAGE = "/.well-known/atproto-did"


@pytest.fixture
def handles(loopback: Loopback, name_server: NameServer) -> Handles:
    return Handles(loopback, [name_server.address], allow_private_hosts=True, dns_seconds=0.5, http_seconds=0.5)


async def hang(_writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


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


@pytest.mark.parametrize("trouble", [silence, fail])
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
