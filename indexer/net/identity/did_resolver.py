"""Resolve DIDs: did:plc with its directories, did:web with its own host (docs/protocol.md#identity).

Handles are not verified here, so a handle that is slow to resolve never delays a key.
"""

import asyncio
import json
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from http import HTTPStatus
from typing import Any, Literal
from urllib.parse import unquote

from indexer.atproto.did_document import DidDocument, parse_did_document
from indexer.atproto.limits import max_items
from indexer.atproto.plc import verify_log
from indexer.atproto.syntax import is_handle, is_resolvable
from indexer.errors import PlcLogError, UnavailableError, UpstreamError
from indexer.net.http.http_client import OutboundClient
from indexer.reasons import FetchFailure, LogFlaw
from indexer.sync.identity import CERTAIN_DENIALS, StoredIdentity

DOCUMENT_BYTES = 65_536
LOG_BYTES = 1 << 20
"""Maximum size of a log of operations."""
SMALL_LOG_BYTES = 8_192
"""A log of up to this size is verified on the event loop. Larger ones are verified in a thread, one at a time."""
MAX_LOG_ITEMS = 100_000
"""JSON items of a log: decoding holds the interpreter's lock. An operation has about 20."""
REQUEST_TIMEOUT = 10.0
ACCEPT = "application/did+ld+json, application/json"
BURST_SECONDS = 1.0
MAX_NEW = 96
"""Lookups of new DIDs that wait for a turn. If there is one more, the oldest one ends."""
Method = Literal["plc", "web"]
METHODS: tuple[Method, ...] = ("plc", "web")
PlcLookup = Literal["log", "document"]
GONE = "not registered, or tombstoned"
"""The problem of a did:plc that its directory denies, or whose log ends with a tombstone."""

_PLC = re.compile(r"did:plc:[a-z2-7]{24}").fullmatch
_LOCAL = re.compile(r"localhost(:[0-9]{1,5})?").fullmatch


def method_of(did: str) -> Method:
    """Return "web" for a did:web, which any host can serve, and "plc" for all other DIDs."""
    return "web" if did.startswith("did:web:") else "plc"


def web_host(did: str) -> str | None:
    """Return the host in a did:web, as of `host_of`, which is known before any lookup; None for other DIDs."""
    if method_of(did) != "web":
        return None
    return unquote(did.removeprefix("did:web:").partition(":")[0]).lower()


@dataclass(eq=False)
class DidResolver:
    """Fetches DID documents, or logs of operations. The `plc_urls` are tried in order until one gives a usable answer.

    `on_log` is called with the URL of the directory, and with "verified" or the flaw of the log.
    """

    outbound: OutboundClient
    plc_urls: Sequence[str]
    _: KW_ONLY
    plc_rate: float  # maximum requests per second to directories
    allow_private_hosts: bool
    clock: Callable[[], float]  # returns Unix seconds
    request_timeout: float = REQUEST_TIMEOUT
    plc_lookup: PlcLookup = "log"
    on_log: Callable[[str, str], None] = lambda _directory, _result: None

    def __post_init__(self) -> None:
        self._large_log = asyncio.Lock()
        self._turns = DirectoryTurns(self.plc_rate)

    async def resolve(self, did: str, *, known: bool = True) -> StoredIdentity:
        """Return the identity. Its `problem` says why the DID definitely has no key or no PDS.

        A DID that is not `known` waits until no known one waits for a directory.

        Raises:
            UnavailableError: IDENTITY_UNAVAILABLE if there is no definite result now.
        """
        if _PLC(did):
            return await self._resolve_plc(did, known=known)
        if method_of(did) == "web":
            return await self._resolve_web(did)
        return _missing(did, "the DID is malformed, or its method is not supported", self.clock())

    async def _resolve_plc(self, did: str, *, known: bool) -> StoredIdentity:
        failures = []
        for url in self.plc_urls:
            if not await self._turns.wait(known=known):
                raise UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE, "too many new DIDs wait for a lookup")
            try:
                if self.plc_lookup == "log":
                    return await self._fetch_log(did, url)
                return await self._fetch(did, f"{url}/{did}")
            except UnavailableError as error:
                failures.append(error)
        raise _unavailable(failures)

    async def _resolve_web(self, did: str) -> StoredIdentity:
        name, asked_at = did.removeprefix("did:web:"), self.clock()
        if self.allow_private_hosts and _LOCAL(unquote(name)):
            base = f"http://{unquote(name)}"
        elif is_handle(name) and is_resolvable(name, local=self.allow_private_hosts):
            base = f"https://{name.lower()}"
        else:
            return _missing(did, "the did:web is not only a public host name", asked_at)
        try:
            return await self._fetch(did, f"{base}/.well-known/did.json")
        except UnavailableError as error:
            if error.reason is FetchFailure.NO_SUCH_HOST:
                return _missing(did, "no such host", asked_at)
            raise _unavailable([error]) from None

    async def _fetch(self, did: str, url: str) -> StoredIdentity:
        asked_at = self.clock()
        response = await self.outbound.get(url, max_bytes=DOCUMENT_BYTES, timeout=self.request_timeout, accept=ACCEPT)
        if response.status in {HTTPStatus.NOT_FOUND, HTTPStatus.GONE}:
            if method_of(did) == "web":
                return _missing(did, "no document at its host", asked_at)
            # Only a directory can deny that a DID exists; a 404 of it may be a mistake.
            return denied_identity(did, CERTAIN_DENIALS if response.status == HTTPStatus.GONE else 1, asked_at)
        if response.status != HTTPStatus.OK:
            raise UnavailableError(FetchFailure.HTTP_STATUS, f"{response.status} from {url}")
        try:
            raw: Any = json.loads(response.body.decode("utf-8-sig", "replace"))
            document = parse_did_document(raw, did, allow_http=self.allow_private_hosts)
        except (ValueError, RecursionError, UpstreamError) as error:
            raise UnavailableError(FetchFailure.BAD_ANSWER, f"{url}: {error!s:.200}") from None
        return identity_of(document, asked_at)

    async def _fetch_log(self, did: str, directory: str) -> StoredIdentity:
        url, asked_at = f"{directory}/{did}/log/audit", self.clock()
        response = await self.outbound.get(url, max_bytes=LOG_BYTES, timeout=self.request_timeout)
        if response.status in {HTTPStatus.NOT_FOUND, HTTPStatus.GONE} and _denies(response.body, did):
            return denied_identity(did, 1, asked_at)  # only a tombstone in a log is certain
        if response.status != HTTPStatus.OK:
            raise UnavailableError(FetchFailure.HTTP_STATUS, f"{response.status} from {url}")
        try:
            document = await self._verify(did, response.body)
        except PlcLogError as error:
            self.on_log(directory, error.reason)
            raise UnavailableError(FetchFailure.BAD_ANSWER, f"{url}: {error!s:.200}") from None
        self.on_log(directory, "verified")
        return denied_identity(did, CERTAIN_DENIALS, asked_at) if document is None else identity_of(document, asked_at)

    async def _verify(self, did: str, body: bytes) -> DidDocument | None:
        verify = partial(_verify_log, did, body, allow_http=self.allow_private_hosts)
        if len(body) <= SMALL_LOG_BYTES:
            return verify()
        async with self._large_log:
            return await asyncio.to_thread(verify)


def _verify_log(did: str, body: bytes, *, allow_http: bool) -> DidDocument | None:
    if max_items(body) > MAX_LOG_ITEMS:
        raise PlcLogError(LogFlaw.TOO_LARGE, f"more than {MAX_LOG_ITEMS:,} items")
    try:
        log = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise PlcLogError(LogFlaw.MALFORMED, str(error)) from None
    return verify_log(did, log, allow_http=allow_http)


def _denies(body: bytes, did: str) -> bool:
    """Return True if an error says that a DID does not exist: its message ends with it (`DID not registered: …`).

    The error of a directory without logs does not end so, although it may contain the path of the request.
    """
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(answer, dict) and str(answer.get("message")).endswith(did)


def denied_identity(did: str, denials: int, asked_at: float) -> StoredIdentity:
    """Return the identity of a did:plc that its directory denied at a time (Unix seconds). It counts as `denials`."""
    return replace(_missing(did, GONE, asked_at), denials=denials, denied_at=asked_at)


def _missing(did: str, problem: str, asked_at: float) -> StoredIdentity:
    return StoredIdentity(did, None, None, None, asked_at, problem=problem)


def identity_of(document: DidDocument, asked_at: float) -> StoredIdentity:
    """Return the identity that a document gave at a time (Unix seconds)."""
    parts = {"signing key": document.signing_key, "PDS": document.pds}
    missing = [name for name, part in parts.items() if part is None]
    return StoredIdentity(
        did=document.did,
        handle=document.handle,
        pds=document.pds,
        signing_key=document.signing_key.did_key() if document.signing_key else None,
        fetched_at=asked_at,
        problem=f"the document has no usable {' and no '.join(missing)}" if missing else None,
    )


def _unavailable(failures: Sequence[UnavailableError]) -> UnavailableError:
    retry_after = max((failure.retry_after or 0.0 for failure in failures), default=0.0)
    detail = "; ".join(map(str, failures))
    return UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE, detail, retry_after=retry_after or None)


class DirectoryTurns:
    """Allows `rate` requests per second. Lookups of known identities come first, because anyone can invent DIDs.

    The budgets of `IdentityCache` leave at least a quarter of the rate for new DIDs. Their newest lookup comes first,
    so that most are fast again right after a flood of made-up DIDs. If too many wait, the wait of the oldest ends.
    """

    def __init__(self, rate: float) -> None:
        self._interval = 1 / rate
        self._burst = max(0.0, BURST_SECONDS - self._interval)
        self._next_turn = 0.0
        self._known: deque[asyncio.Future[bool]] = deque()
        self._new: deque[asyncio.Future[bool]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self, *, known: bool) -> bool:
        """Wait for a turn; return False if too many new DIDs wait, so that there is none."""
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        waiting = self._known if known else self._new
        waiting.append(turn)
        self._hand_out()
        if len(self._new) > MAX_NEW:
            oldest = self._new.popleft()
            if not oldest.done():
                oldest.set_result(False)
        try:
            return await turn
        finally:
            if turn in waiting:  # the caller was cancelled
                waiting.remove(turn)

    def _hand_out(self) -> None:
        """Hand out the turns that the rate allows now. A timer calls this again if lookups still wait."""
        loop = asyncio.get_running_loop()
        self._next_turn = max(self._next_turn, loop.time() - self._burst)
        while (self._known or self._new) and self._next_turn <= loop.time():
            turn = self._known.popleft() if self._known else self._new.pop()
            if not turn.done():
                turn.set_result(True)
                self._next_turn += self._interval
        if self._timer is None and (self._known or self._new):
            self._timer = loop.call_at(self._next_turn, self._continue)

    def _continue(self) -> None:
        self._timer = None
        self._hand_out()
