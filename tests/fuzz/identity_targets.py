"""DID documents, and the hosts that a DID names."""

import asyncio
import json
from random import Random
from urllib.parse import urlsplit

from yarl import URL

from indexer.atproto.crypto import parse_did_key
from indexer.atproto.did_document import MAX_URL_CHARACTERS
from indexer.atproto.syntax import is_handle
from indexer.errors import UnavailableError
from indexer.identity.did_resolver import DidResolver, web_host
from indexer.reasons import FetchFailure
from indexer.sync.stored_identity import StoredIdentity
from tests.atproto.plc_operations import current_form, document_of
from tests.fuzz import syntax_reference as reference
from tests.fuzz.comparison import DifferenceError
from tests.fuzz.examples import DID, HANDLE
from tests.fuzz.fixed_response import FixedResponse, HostAnswers
from tests.fuzz.fuzz_target import TextTarget, text_of
from tests.fuzz.outcome_counts import OutcomeCounts
from tests.fuzz.seed_files import published_lines, seed_files, some_of
from tests.sync.signing_account import SigningAccount

RATE = 1e9
"""Requests per second to the directory: no input waits for another one."""
STATUSES = (200, 200, 200, 404, 410, 500)


class DidDocuments(HostAnswers):
    """Responses of a directory: a usable identity, or a documented failure."""

    def __init__(self) -> None:
        super().__init__(STATUSES)
        self._resolvers = [
            DidResolver(self._http, ["https://plc.test"], plc_rate=RATE, allow_private_hosts=local, clock=lambda: 1.0)
            for local in (False, True)
        ]
        self.counts = OutcomeCounts("documents", "with a key and a PDS", "with a handle", "refused", "denied")

    def seeds(self, _: Random, count: int) -> list[bytes]:
        """Return documents, each after one byte that selects the status, and published ones."""
        keys = [SigningAccount("documents", curve).key.public for curve in ("k256", "p256")]
        operation = {
            "type": "plc_operation",
            "alsoKnownAs": [f"at://{HANDLE}"],
            "services": {"atproto_pds": {"type": "AtprotoPersonalDataServer", "endpoint": "https://pds.example.com"}},
        }
        made = [document_of(DID, operation | {"verificationMethods": {"atproto": key.did_key()}}) for key in keys]
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
    if value.get("type") in {"create", "plc_operation"}:
        return [document_of(DID, current_form(value))]
    return [value] if "verificationMethod" in value else []


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
        self._resolver = DidResolver(
            self._http, ["https://plc.test"], plc_rate=RATE, allow_private_hosts=False, clock=lambda: 1.0
        )
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
