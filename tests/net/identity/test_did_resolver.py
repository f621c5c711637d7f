import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from threading import Lock, get_ident
from typing import Any

import pytest

from indexer.atproto.crypto import PrivateKey
from indexer.atproto.did_document import DidDocument
from indexer.atproto.plc import verify_log
from indexer.errors import UnavailableError
from indexer.net.identity.did_resolver import LOG_BYTES, DidResolver, PlcLookup
from indexer.reasons import FetchFailure, LogFlaw
from indexer.sync.identity import StoredIdentity
from tests.atproto.plc_logs import KEYS, Log
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
    loopback: Loopback,
    *bases: str,
    local: bool = True,
    rate: float = 1_000,
    timeout: float = 10.0,
    lookup: PlcLookup = "document",
    logs: Counter[tuple[str, str]] | None = None,
) -> DidResolver:
    def count(directory: str, result: str) -> None:
        if logs is not None:
            logs[directory, result] += 1

    return DidResolver(
        loopback,
        bases or (loopback.host.url,),
        plc_rate=rate,
        allow_private_hosts=local,
        clock=lambda: NOW,
        request_timeout=timeout,
        plc_lookup=lookup,
        on_log=count,
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


HOST, OTHER = KEYS[0], KEYS[1]
LOG, OTHER_LOG = Log(HOST), Log(OTHER)
LOG.update(HOST, alsoKnownAs=["at://Bob.test"])
FORGED, ENDED = Log(HOST), Log(HOST)
FORGED.update(OTHER, verificationMethods={"atproto": OTHER.public.did_key()})
ENDED.end(HOST)
PATH = f"/{LOG.did}/log/audit"
NOT_REGISTERED = json.dumps({"message": f"DID not registered: {LOG.did}"}).encode()


def log_page(entries: Sequence[Mapping[str, Any]]) -> bytes:
    return http_response(json.dumps(entries).encode())


def without_method(body: str) -> bytes:
    """Return what a directory without logs answers."""
    return http_response(body.encode(), status=404)


LOG_FAULTS: dict[str, tuple[bytes, LogFlaw | None]] = {
    "forged key": (log_page(FORGED.entries), LogFlaw.SIGNATURE_INVALID),
    "changed operation": (log_page([LOG.entries[0], LOG.entries[1] | {"cid": "x"}]), LogFlaw.INCONSISTENT),
    "of another DID": (log_page(OTHER_LOG.entries), LogFlaw.OTHER_DID),
    "named like this DID": (log_page([one | {"did": LOG.did} for one in OTHER_LOG.entries]), LogFlaw.OTHER_DID),
    "without its beginning": (log_page(LOG.entries[1:]), LogFlaw.BROKEN_CHAIN),
    "wrong marks": (log_page([one | {"nullified": True} for one in LOG.entries]), LogFlaw.INCONSISTENT),
    "too many operations": (log_page(LOG.entries[:1] * 1_001), LogFlaw.TOO_LARGE),
    "too large": (http_response(b" " * LOG_BYTES + b"[]"), None),
    "document": (page(LOG.did), LogFlaw.MALFORMED),
    "not UTF-8": (http_response(b'["\xff"]'), LogFlaw.MALFORMED),
    "deeply nested": (http_response(b"[" * 60_000), LogFlaw.MALFORMED),
    "server error": (http_response(b"{}", status=500), None),
    "no such path": (without_method(f"Cannot GET {PATH}"), None),
    "no such path in JSON": (without_method(json.dumps({"message": f"Cannot GET {PATH}"})), None),
    "another DID is not registered": (without_method(NOT_REGISTERED.decode().replace(LOG.did, DID)), None),
    "deeply nested error": (without_method("[" * 10_000), None),
    "list as an error": (without_method(f'["{LOG.did}"]'), None),
}


@pytest.mark.parametrize("fault", LOG_FAULTS)
async def test_next_directory_is_asked_if_a_log_proves_nothing(loopback: Loopback, fault: str) -> None:
    body, flaw = LOG_FAULTS[fault]
    first, second = f"{loopback.host.url}/first", f"{loopback.host.url}/second"
    loopback.host.pages |= {f"/first{PATH}": body, f"/second{PATH}": log_page(LOG.entries)}
    logs = Counter[tuple[str, str]]()
    identity = await resolver(loopback, first, second, lookup="log", logs=logs).resolve(LOG.did)
    key = LOG.entries[0]["operation"]["verificationMethods"]["atproto"]
    assert identity == StoredIdentity(LOG.did, "bob.test", "https://pds.example", key, NOW)
    assert logs == Counter([(second, "verified")] + [(first, flaw)] * (flaw is not None))
    with pytest.raises(UnavailableError, match=flaw or "too-large|http-status") as failure:
        await resolver(loopback, first, lookup="log").resolve(LOG.did)
    assert failure.value.reason is FetchFailure.IDENTITY_UNAVAILABLE


async def test_log_that_ends_with_a_tombstone_is_certain_and_a_denial_without_one_is_not(loopback: Loopback) -> None:
    loopback.host.pages[f"/{ENDED.did}/log/audit"] = log_page(ENDED.entries)
    identity = await resolver(loopback, lookup="log").resolve(ENDED.did)
    assert (identity.gone, identity.signing_key, identity.problem) == (True, None, "not registered, or tombstoned")
    for status in (404, 410):
        loopback.host.pages[PATH] = http_response(NOT_REGISTERED, status=status)
        denied = await resolver(loopback, loopback.host.url, "http://127.0.0.1:1", lookup="log").resolve(LOG.did)
        assert (denied.denials, denied.gone, denied.denied_at) == (1, False, NOW)


async def test_large_logs_are_verified_in_a_thread_one_at_a_time(
    loopback: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs, threads, alone, overlaps = [Log(key) for key in KEYS], set[int](), Lock(), []
    for log, key in zip(logs, KEYS, strict=True):
        while len(log.entries) < 300:
            log.update(key)
        loopback.host.pages[f"/{log.did}/log/audit"] = log_page(log.entries)

    def verify(did: str, log: Any, *, allow_http: bool) -> DidDocument | None:
        threads.add(get_ident())
        overlaps.append(not alone.acquire(blocking=False))
        try:
            return verify_log(did, log, allow_http=allow_http)
        finally:
            alone.release()

    monkeypatch.setattr("indexer.net.identity.did_resolver.verify_log", verify)
    dids = resolver(loopback, lookup="log")
    found = await asyncio.gather(*(dids.resolve(log.did) for log in logs))
    assert [identity.problem for identity in found] == [None] * len(logs)
    assert overlaps == [False] * len(logs)
    assert get_ident() not in threads
