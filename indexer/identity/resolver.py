"""DIDs to identities, over the network: did:plc by its directories, did:web by its host (spec §5.2, §5.3).

Handles are no part of it: a handle that can't be resolved, or hangs, must not keep anybody from a key.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol
from urllib.parse import unquote

from aiolimiter import AsyncLimiter

from indexer.atproto.did_document import DidDocument, parse_did_document
from indexer.atproto.syntax import is_handle, is_resolvable
from indexer.errors import UnavailableError, UpstreamError
from indexer.reasons import FetchFailure
from indexer.sync.identity import StoredIdentity

DOCUMENT_BYTES = 65_536
REQUEST_SECONDS = 10.0
ACCEPT = "application/did+ld+json, application/json"
Method = Literal["plc", "web"]
METHODS: tuple[Method, ...] = ("plc", "web")
_PLC = re.compile(r"did:plc:[a-z2-7]{24}").fullmatch
_LOCAL = re.compile(r"localhost(:[0-9]{1,5})?").fullmatch
GONE = "not registered, or tombstoned"  # what a PLC directory means by 404 and 410 (spec §5.2)
_NOT_FOUND = frozenset({404, 410})
_OK = 200


def method_of(did: str) -> Method:
    """Who is asked: a did:web's own host, which may be anybody's, or the directory."""
    return "web" if did.startswith("did:web:") else "plc"


class Answer(Protocol):
    """An HTTP answer."""

    @property
    def status(self) -> int: ...
    @property
    def body(self) -> bytes: ...


class Getter(Protocol):
    """The outbound client, as far as it is needed here."""

    async def get(self, url: str, *, max_bytes: int, timeout: float, accept: str) -> Answer: ...  # noqa: ASYNC109


class Resolver:
    """Asks for documents; `plc_urls` in order until one of them answers, at most `plc_rate` times a second."""

    def __init__(
        self,
        outbound: Getter,
        plc_urls: Sequence[str],
        *,
        plc_rate: float,
        allow_private_hosts: bool,
        clock: Callable[[], float],
        request_seconds: float = REQUEST_SECONDS,
    ) -> None:
        self._outbound = outbound
        self._plc_urls = plc_urls
        self._plc_limiter = AsyncLimiter(max(plc_rate, 1.0), max(1.0, 1.0 / plc_rate))
        self._allow_private_hosts = allow_private_hosts
        self._clock = clock
        self._request_seconds = request_seconds

    async def resolve(self, did: str) -> StoredIdentity:
        """The identity, or why there definitely is none (`problem`).

        Raises `UnavailableError(IDENTITY_UNAVAILABLE)` if nothing definite could be learned just now.
        """
        if _PLC(did):
            return await self._resolve_plc(did)
        if method_of(did) == "web":
            return await self._resolve_web(did)
        return self._none(did, "a DID method that the protocol doesn't use, or a malformed DID")

    async def _resolve_plc(self, did: str) -> StoredIdentity:
        failures = []
        for url in self._plc_urls:
            async with self._plc_limiter:
                try:
                    return await self._ask(did, f"{url}/{did}")
                except UnavailableError as error:
                    failures.append(error)
        raise _unavailable(failures)

    async def _resolve_web(self, did: str) -> StoredIdentity:
        name = did.removeprefix("did:web:")
        if self._allow_private_hosts and _LOCAL(unquote(name)):
            base = f"http://{unquote(name)}"
        elif is_handle(name) and is_resolvable(name, local=self._allow_private_hosts):
            base = f"https://{name.lower()}"
        else:
            return self._none(did, "a did:web that is not a public host name alone")
        try:
            return await self._ask(did, f"{base}/.well-known/did.json")
        except UnavailableError as error:
            if error.reason is FetchFailure.NO_SUCH_HOST:
                return self._none(did, "no such host")
            raise _unavailable([error]) from None

    async def _ask(self, did: str, url: str) -> StoredIdentity:
        answer = await self._outbound.get(url, max_bytes=DOCUMENT_BYTES, timeout=self._request_seconds, accept=ACCEPT)
        if answer.status in _NOT_FOUND:
            return self._none(did, GONE if method_of(did) == "plc" else "no document at its host")
        if answer.status != _OK:
            raise UnavailableError(FetchFailure.HTTP_STATUS, f"{answer.status} from {url}")
        try:
            raw: Any = json.loads(answer.body)
            return self._found(parse_did_document(raw, did, allow_http=self._allow_private_hosts))
        except (ValueError, RecursionError, UpstreamError) as error:
            raise UnavailableError(FetchFailure.BAD_ANSWER, f"{url}: {error!s:.200}") from None

    def _found(self, document: DidDocument) -> StoredIdentity:
        parts = {"signing key": document.signing_key, "PDS": document.pds}
        missing = [name for name, part in parts.items() if part is None]
        return StoredIdentity(
            did=document.did,
            handle=document.handle,
            pds=document.pds,
            signing_key=document.signing_key.did_key() if document.signing_key else None,
            fetched_at=self._clock(),
            problem=f"the document has no usable {' and no '.join(missing)}" if missing else None,
        )

    def _none(self, did: str, problem: str) -> StoredIdentity:
        return StoredIdentity(did, None, None, None, self._clock(), problem=problem)


def _unavailable(failures: Sequence[UnavailableError]) -> UnavailableError:
    wait = max((failure.retry_after or 0.0 for failure in failures), default=0.0)
    detail = "; ".join(map(str, failures))
    return UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE, detail, retry_after=wait or None)
