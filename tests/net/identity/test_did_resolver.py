import asyncio
import json
from typing import Any

import pytest

from indexer.atproto.crypto import PrivateKey
from indexer.errors import UnavailableError
from indexer.net.identity.did_resolver import DidResolver
from indexer.reasons import FetchFailure
from indexer.sync.identity import StoredIdentity
from tests.net.http.http_requests import writes
from tests.net.http.scripted_host import Script, gzip_response, hang, http_response
from tests.net.identity.conftest import Loopback

DID = "did:plc:ewvi7nxzyoun6zhxrhs64oiz"
KEY = PrivateKey.from_seed("p256", b"resolver").public
NOW = 1_000.0


def document(did: str = DID, **changes: Any) -> dict[str, Any]:
    method = {"id": f"{did}#atproto", "type": "Multikey", "controller": did, "publicKeyMultibase": KEY.multikey()}
    service = {"id": "#atproto_pds", "type": "AtprotoPersonalDataServer", "serviceEndpoint": "https://pds.test"}
    return {
        "id": did,
        "alsoKnownAs": ["at://Alice.test"],
        "verificationMethod": [method],
        "service": [service],
    } | changes


def page(did: str = DID, **changes: Any) -> bytes:
    return http_response(json.dumps(document(did, **changes)).encode())


def found(did: str = DID) -> StoredIdentity:
    return StoredIdentity(did, "alice.test", "https://pds.test", KEY.did_key(), NOW)


def resolver(
    loopback: Loopback, *bases: str, local: bool = True, rate: float = 1_000, timeout: float = 10.0
) -> DidResolver:
    return DidResolver(
        loopback,
        bases or (loopback.host.url,),
        plc_rate=rate,
        allow_private_hosts=local,
        clock=lambda: NOW,
        request_timeout=timeout,
    )


async def test_document_becomes_an_identity(loopback: Loopback) -> None:
    loopback.host.pages[f"/{DID}"] = page()
    assert await resolver(loopback).resolve(DID) == found()
    assert "accept: application/did+ld+json" in loopback.host.requests[0]


async def test_bytes_that_are_not_utf8_hide_no_identity(loopback: Loopback) -> None:
    text = json.dumps(document(DID) | {"comment": "?"}).encode().replace(b"?", b"\xff")
    loopback.host.pages[f"/{DID}"] = http_response(b"\xef\xbb\xbf" + text)
    assert await resolver(loopback).resolve(DID) == found()


@pytest.mark.parametrize(("status", "certain"), [(404, False), (410, True)])
async def test_unregistered_and_tombstoned_dids_are_denied(loopback: Loopback, status: int, certain: bool) -> None:
    loopback.host.pages[f"/{DID}"] = http_response(b'{"message":"DID not available"}', status=status)
    identity = await resolver(loopback, loopback.host.url, "http://127.0.0.1:1").resolve(DID)
    assert (identity.signing_key, identity.pds, identity.handle) == (None, None, None)
    assert identity.problem == "not registered, or tombstoned"
    assert (identity.denials > 0, identity.gone) == (True, certain)
    assert len(loopback.requests) == 1


RESPOND_SLOWLY = writes(b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n", b" ", every=0.05, forever=True)
"""Sends one byte at a time, each before the read timeout."""


FAULTS: dict[str, bytes | Script] = {
    "server error": http_response(b"{}", status=500),
    "forbidden": http_response(b"{}", status=403),
    "hang": hang,
    "slow": RESPOND_SLOWLY,
    "too large": http_response(b"[" * 70_000),
    "highly compressed": gzip_response(b" " * 10_000_000),
    "not JSON": http_response(b"<html>"),
    "not UTF-8": http_response(b'{"id":"\xff"}'),
    "deeply nested": http_response(b"[" * 60_000),
    "very long number": http_response(b'{"id":' + b"9" * 60_000 + b"}"),
    "not a document": http_response(b"[]"),
    "of another DID": page("did:plc:aaaaaaaaaaaaaaaaaaaaaaaa"),
}


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=[pytest.mark.slow] if fault in {"hang", "slow"} else []) for fault in FAULTS]
)
async def test_next_directory_is_asked_after_a_failure(loopback: Loopback, fault: str) -> None:
    loopback.host.pages[f"/first/{DID}"] = FAULTS[fault]
    loopback.host.pages[f"/second/{DID}"] = page()
    bases = (f"{loopback.host.url}/first", f"{loopback.host.url}/second")
    seconds = 1.0 if fault in {"hang", "slow"} else 5.0
    assert await resolver(loopback, *bases, timeout=seconds).resolve(DID) == found()
    with pytest.raises(UnavailableError) as failure:
        await resolver(loopback, bases[0], timeout=seconds / 5).resolve(DID)
    assert failure.value.reason is FetchFailure.IDENTITY_UNAVAILABLE


async def test_retry_after_of_the_directory_is_passed_on(loopback: Loopback) -> None:
    loopback.host.pages[f"/{DID}"] = http_response(b"slow down", status=429, headers={"Retry-After": "7"})
    with pytest.raises(UnavailableError) as failure:
        await resolver(loopback).resolve(DID)
    assert failure.value.retry_after == pytest.approx(7, abs=1)


async def test_requests_to_directories_are_rate_limited(loopback: Loopback) -> None:
    loopback.host.pages[f"/{DID}"] = page()
    slow = resolver(loopback, rate=0.01)
    await slow.resolve(DID)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(slow.resolve(DID), 0.1)
    assert len(loopback.requests) == 1


async def test_problem_names_the_missing_parts(loopback: Loopback) -> None:
    for changes, problem in (
        ({"verificationMethod": []}, "the document has no usable signing key"),
        ({"service": None}, "the document has no usable PDS"),
        ({"verificationMethod": 7, "service": {}}, "the document has no usable signing key and no PDS"),
    ):
        loopback.host.pages[f"/{DID}"] = page(**changes)
        identity = await resolver(loopback).resolve(DID)
        assert identity.problem == problem
        assert (identity.signing_key is None) == ("verificationMethod" in changes)
        assert (identity.pds is None) == ("service" in changes)


async def test_did_web_is_fetched_from_its_host(loopback: Loopback) -> None:
    did = "did:web:alice.bsky.team"
    loopback.host.pages["/.well-known/did.json"] = page(did)
    assert await resolver(loopback, local=False).resolve(did) == found(did)
    assert loopback.requests == ["https://alice.bsky.team/.well-known/did.json"]
    loopback.host.pages["/.well-known/did.json"] = FAULTS["server error"]
    with pytest.raises(UnavailableError) as failure:
        await resolver(loopback).resolve(did)
    assert failure.value.reason is FetchFailure.IDENTITY_UNAVAILABLE
    for status in (404, 410):
        loopback.host.pages["/.well-known/did.json"] = http_response(status=status)
        assert (await resolver(loopback, local=False).resolve(did)).problem == "no document at its host"
    loopback.missing_hosts.add("alice.bsky.team")
    assert (await resolver(loopback, local=False).resolve(did)).problem == "no such host"


async def test_did_web_with_port_and_http_only_on_local_networks(loopback: Loopback) -> None:
    did = f"did:web:localhost%3A{loopback.host.port}"
    loopback.host.pages["/.well-known/did.json"] = page(did)
    assert (await resolver(loopback, local=True).resolve(did)).problem is None
    assert (await resolver(loopback, local=False).resolve(did)).problem
    assert len(loopback.requests) == 1


UNSUPPORTED = """
    did:web:alice.bsky.team:u:alice did:web:alice.bsky.team%3A8443 did:web:alice.bsky.team%2Fetc
    did:web:alice%2ebsky.team did:web:127.0.0.1 did:web:localhost did:web:printer.local did:web:printer.LOCAL
    did:web:service.internal did:web:alice.test did:web:team did:plc:EWVI7NXZYOUN6ZHXRHS64OIZ
    did:plc:ewvi7nxzyoun6zhxrhs64oi did:plc:ewvi7nxzyoun6zhxrhs64oiz/../log
    did:key:zQ3shXjHeiBuRCKmM36cuYnm7YEMzhGnCmCyW92sRJ9pribSF did:method:val:two
"""


async def test_unsupported_did_is_not_looked_up(loopback: Loopback) -> None:
    for did in ("", *UNSUPPORTED.split()):
        identity = await resolver(loopback, local=False).resolve(did)
        assert identity.problem, did
        assert identity.signing_key is None
    assert loopback.requests == []
