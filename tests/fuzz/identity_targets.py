"""DID documents, the hosts that a DID names, and the answers that verify handles: TXT records and HTTP bodies."""

import asyncio
import json
from random import Random
from typing import Any
from urllib.parse import urlsplit

import dns.flags
import dns.message
import dns.rrset
from dns.rdataclass import IN
from dns.rdatatype import RdataType
from dns.rdtypes.ANY.TXT import TXT
from yarl import URL

from indexer.atproto.crypto import parse_did_key
from indexer.atproto.did_document import MAX_URL_CHARACTERS
from indexer.atproto.plc import document_of, parse_operation
from indexer.atproto.syntax import is_did, is_handle
from indexer.demo.plc_operations import update
from indexer.errors import PlcLogError, UnavailableError
from indexer.net.identity.did_resolver import DidResolver, web_host
from indexer.net.identity.handle_verifier import HandleVerifier
from indexer.reasons import FetchFailure
from indexer.sync.identity import INVALID_HANDLE, StoredIdentity
from tests.fuzz import syntax_reference as reference
from tests.fuzz.comparison import DifferenceError
from tests.fuzz.examples import DID, HANDLE
from tests.fuzz.fixed_response import FixedResponse, HostAnswers, response_with
from tests.fuzz.fuzz_target import FuzzTarget, TextTarget, text_of
from tests.fuzz.outcome_counts import OutcomeCounts
from tests.fuzz.seed_files import published_lines, seed_files, some_of
from tests.sync.signing_account import SigningAccount

ASKING: dict[str, Any] = {"plc_rate": 1e9, "clock": lambda: 1.0, "plc_lookup": "document"}
"""No input waits for another one."""
DNS_TIMEOUT = 0.05
"""Seconds to wait for a valid message. Malformed ones are ignored, as they may be forged."""
HTTP_KINDS, RAW_KINDS, NEXT_RECORD = 100, 250, 255
STATUSES = (200, 200, 200, 404, 410, 500)


class DidDocuments(HostAnswers):
    """Responses of a directory: a usable identity, or a documented failure."""

    def __init__(self) -> None:
        super().__init__(STATUSES)
        self._resolvers = [
            DidResolver(self._http, ["https://plc.test"], allow_private_hosts=local, **ASKING)
            for local in (False, True)
        ]
        self.counts = OutcomeCounts("documents", "with a key and a PDS", "with a handle", "refused", "denied")

    def seeds(self, _: Random, count: int) -> list[bytes]:
        """Return documents, each after one byte that selects the status, and published ones."""
        keys = [SigningAccount("documents", curve).key.public for curve in ("k256", "p256")]
        pds = "https://pds.example.com"
        states = [update([], None, handle=HANDLE, signing_key=key.did_key(), pds=pds) for key in keys]
        made = [document_of(DID, state) for state in states]
        for text in seed_files("did-plc/**/*.json", "indigo/identity/*.json"):
            made += _documents(json.loads(text))
        return [
            bytes([n % len(STATUSES)]) + json.dumps(made[n % len(made)] | {"id": DID}).encode() for n in range(count)
        ]

    def compare(self, data: bytes) -> None:
        """Resolve a DID with this response. Raises `DifferenceError`."""
        self.counts.executions += 1
        status = self.answer(data)
        for local, resolver in enumerate(self._resolvers):
            try:
                identity = self._loop.run_until_complete(resolver.resolve(DID))
            except UnavailableError as error:
                if error.reason is not FetchFailure.IDENTITY_UNAVAILABLE:
                    raise DifferenceError(f"undocumented reason {error.reason}") from error
                self.counts.add("refused")
                continue
            if status != 200:
                self.counts.add("denied")
                continue
            _check_identity(identity, http=bool(local))
            self.counts.add("documents")
            self.counts.add("with a key and a PDS", identity.problem is None)
            self.counts.add("with a handle", identity.handle is not None)


def _documents(value: object) -> list[dict[str, object]]:
    """Return the documents in a published file: one document, one operation, or an audit log of operations."""
    if isinstance(value, list):
        return [document for item in value for document in _documents(item)]
    if not isinstance(value, dict):
        return []
    if isinstance(value.get("operation"), dict):
        return _documents(value["operation"])
    if "verificationMethod" in value:
        return [value]
    try:
        state = parse_operation(value).state
    except PlcLogError:
        return []
    return [] if state is None else [document_of(DID, state)]


def _check_identity(identity: StoredIdentity, *, http: bool) -> None:
    """Raise `DifferenceError` unless each part is one that the rest of the program can use."""
    if identity.signing_key is not None and parse_did_key(identity.signing_key).did_key() != identity.signing_key:
        raise DifferenceError(f"key {identity.signing_key} is not in its only form")
    if identity.handle is not None and not (is_handle(identity.handle) and identity.handle.islower()):
        raise DifferenceError(f"handle {identity.handle!r}")
    if identity.pds is None:
        return
    parts, url = urlsplit(identity.pds), URL(identity.pds)
    same = (parts.scheme, parts.hostname, parts.path, parts.query) == (url.scheme, url.host, "", "")
    if not same or parts.scheme not in ({"http", "https"} if http else {"https"}) or parts.username or url.user:
        raise DifferenceError(f"two parsers find different parts in {identity.pds!r}")
    if len(identity.pds) > MAX_URL_CHARACTERS:
        raise DifferenceError("a PDS that is too long")


class DidWebs(TextTarget):
    """DIDs of all kinds: a lookup goes to the host that the DID names, by HTTPS, and to no other place."""

    def __init__(self) -> None:
        self._http = FixedResponse()
        self._loop = asyncio.new_event_loop()
        self._resolver = DidResolver(self._http, ["https://plc.test"], allow_private_hosts=False, **ASKING)
        self.counts = OutcomeCounts("asked at a host", "asked at the directory", "not asked")

    def close(self) -> None:
        """Close the event loop."""
        self._loop.close()

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return published DIDs, a half if there are so many, and did:web with all kinds of names."""
        made = some_of(published_lines("atproto-interop-tests/syntax/did_syntax_*.txt"), random, count // 2)
        names = (
            HANDLE,
            "A.Test",
            "a.b:8080",
            "a.b%3A80",
            "localhost",
            "1.2.3.4",
            "a.b:path",
            "a.b%2f",
            "user@a.b",
            "a..b",
        )
        texts = [DID, "did:key:z6Mk", *(f"did:web:{name}" for name in names)]
        return made + [texts[number % len(texts)].encode() for number in range(count - len(made))]

    def compare(self, data: bytes) -> None:
        """Resolve a DID. Raises `DifferenceError`."""
        self.counts.executions += 1
        did, self._http.asked = text_of(data), ""
        identity = self._loop.run_until_complete(self._resolver.resolve(did))
        if identity.problem is None:
            raise DifferenceError(f"an identity without an answer: {identity}")
        url = URL(self._http.asked)
        if not self._http.asked:
            self.counts.add("not asked")
        elif did.startswith("did:web:"):
            if (url.scheme, url.host, url.path, url.user) != ("https", web_host(did), "/.well-known/did.json", None):
                raise DifferenceError(f"{did} is asked for at {url}")
            if url.explicit_port or not reference.is_handle(url.host or ""):
                raise DifferenceError(f"{did} is asked for at {url}, which is no public name")
            self.counts.add("asked at a host")
        elif self._http.asked == f"https://plc.test/{did}" and reference.is_did(did):
            self.counts.add("asked at the directory")
        else:
            raise DifferenceError(f"{did} is asked for at {url}")


class Handles(FuzzTarget):
    """Answers for one handle. The first byte of an input selects what the rest of it is.

    0 to 99: the body of `/.well-known/atproto-did`, without TXT records. 100 to 249: the strings of TXT records, each
    after a byte with its size; size 255 begins the next record. 250 to 255: the bytes of a DNS message after its ID.
    """

    def __init__(self) -> None:
        self._http = FixedResponse()
        self._loop = asyncio.new_event_loop()
        self._server = AnsweringServer()
        bound = self._loop.run_until_complete(
            self._loop.create_datagram_endpoint(lambda: self._server, local_addr=("127.0.0.1", 0))
        )
        address = bound[0].get_extra_info("sockname")[:2]
        self._verifier = HandleVerifier(self._http, [address], allow_private_hosts=False, dns_timeout=DNS_TIMEOUT)
        self.counts = OutcomeCounts("verified by DNS", "verified by HTTP", "invalid", "unavailable")

    def close(self) -> None:
        """Stop the DNS server."""
        self._server.close()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return answers of each kind, with the right DID, several DIDs, and other texts, a fifth of them published."""
        right = f"did={DID}".encode()
        others = some_of(published_lines("atproto-interop-tests/syntax/did_syntax_*.txt"), random, count // 10)
        texts = [
            [right],
            [right[:9], right[9:]],
            [right, b"\xff", b"v=spf1"],
            [right, b"\xff", b"did=did:web:a.b"],
            [b""],
            *([b"did=" + text] for text in others if len(text) < NEXT_RECORD - 4),
        ]
        made = [b"d" + b"".join(bytes([len(t)]) + t if t != b"\xff" else t for t in text) for text in texts]
        made += [
            bytes([n]) + body
            for n in range(len(STATUSES))
            for body in (DID.encode(), b" " + DID.encode() + b"\n", b"<html>", b"")
        ]
        made += [b"\0" + text for text in others]
        query = dns.message.make_query(f"_atproto.{HANDLE}", "TXT")
        made += [b"\xfa", b"\xfa" + _reply(query, [[right]]).to_wire()[2:]]
        return [made[n % len(made)] for n in range(count)]

    def compare(self, data: bytes) -> None:
        """Verify the handle with this answer. Raises `DifferenceError`."""
        self.counts.executions += 1
        kind, rest = (data[0] if data else 0), data[1:]
        self._http.response = response_with(STATUSES[kind % len(STATUSES)], rest if kind < HTTP_KINDS else b"")
        self._server.answer(b"" if kind < HTTP_KINDS else rest, raw=kind >= RAW_KINDS)
        try:
            found = self._loop.run_until_complete(self._verifier.verify_handle(DID, HANDLE))
        except UnavailableError:
            self.counts.add("unavailable")
            return
        by_http = STATUSES[kind % len(STATUSES)] == 200 and _first_line(rest) == DID
        right = by_http if kind < HTTP_KINDS else _txt_dids(rest) == {DID}
        if kind < RAW_KINDS and found != (HANDLE if right else INVALID_HANDLE):
            raise DifferenceError(f"handle {found!r}")
        method = "HTTP" if kind < HTTP_KINDS else "DNS"
        self.counts.add("invalid" if found == INVALID_HANDLE else f"verified by {method}")


def _first_line(body: bytes) -> str:
    return body.decode("utf-8-sig", "replace").strip().split("\n")[0].strip()


class AnsweringServer(asyncio.DatagramProtocol):
    """A DNS server that gives the same answer to each query."""

    def __init__(self) -> None:
        self._answer, self._raw = b"", False

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self._transport = transport

    def close(self) -> None:
        """Stop the server."""
        self._transport.close()

    def answer(self, data: bytes, *, raw: bool) -> None:
        """Answer with the TXT records in the data, or with the data itself after the ID of the query."""
        self._answer, self._raw = data, raw

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        """Answer a query."""
        if self._raw:
            self._transport.sendto(data[:2] + self._answer, address)
        else:
            reply = _reply(dns.message.from_wire(data), _txt_records(self._answer))
            self._transport.sendto(reply.to_wire(max_size=65_535), address)


def _txt_records(data: bytes) -> list[list[bytes]]:
    """Return the strings of each TXT record in an input; a record has at least one string."""
    records: list[list[bytes]] = [[]]
    while data:
        size, data = data[0], data[1:]
        if size == NEXT_RECORD:
            records.append([])
        else:
            records[-1].append(data[:size])
            data = data[size:]
    return [strings for strings in records if strings]


def _txt_dids(data: bytes) -> set[str]:
    """Return the DIDs that the TXT records of an input name."""
    texts = [_text(b"".join(strings)) for strings in _txt_records(data)]
    return {text[4:] for text in texts if text[:4] == "did=" and is_did(text[4:])}


def _text(data: bytes) -> str:
    return "".join(chr(byte) if byte < 128 else "\ufffd" for byte in data)


def _reply(query: dns.message.Message, records: list[list[bytes]]) -> dns.message.Message:
    """Return the response to a query for TXT records. Equal records occur once."""
    reply = dns.message.make_response(query)
    reply.flags |= dns.flags.RA
    found = [TXT(IN, RdataType.TXT, strings) for strings in records]
    if found:
        reply.answer.append(dns.rrset.from_rdata_list(query.question[0].name, 60, found))
    return reply
