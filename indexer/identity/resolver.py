"""DIDs to identities, over the network: did:plc by its directories, did:web by its host (spec §5.2, §5.3).

Handles are no part of it: a handle that can't be resolved, or hangs, must not keep anybody from a key.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from urllib.parse import unquote

from aiolimiter import AsyncLimiter

from indexer.atproto.did_document import parse_did_document
from indexer.atproto.syntax import is_handle
from indexer.errors import UnavailableError, UpstreamError
from indexer.reasons import FetchFailure
from indexer.sync.identity import StoredIdentity

DOCUMENT_BYTES = 65_536
REQUEST_SECONDS = 10.0
ACCEPT = "application/did+ld+json, application/json"
_PLC = re.compile(r"did:plc:[a-z2-7]{24}").fullmatch
_LOCAL = re.compile(r"localhost(:[0-9]{1,5})?").fullmatch
_NOT_FOUND = frozenset({404, 410})
_OK = 200
_DISALLOWED = ("alt", "arpa", "example", "internal", "invalid", "local", "localhost", "onion")


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
    ) -> None:
        self._outbound = outbound
        self._plc_urls = plc_urls
        self._plc_limiter = AsyncLimiter(max(plc_rate, 1.0), max(1.0, 1.0 / plc_rate))
        self._allow_private_hosts = allow_private_hosts
        self._clock = clock

    async def resolve(self, did: str) -> StoredIdentity:
        """The identity, or why there definitely is none (`problem`).

        Raises `UnavailableError` if nothing definite could be learned just now.
        """
        if _PLC(did):
            return await self._resolve_plc(did)
        if did.startswith("did:web:"):
            return await self._resolve_web(did)
        return self._none(did, "a DID method that the protocol doesn't use, or a malformed DID")

    async def _resolve_plc(self, did: str) -> StoredIdentity:
        failures = []
        for url in self._plc_urls:
            async with self._plc_limiter:
                try:
                    return await self._document(did, f"{url}/{did}")
                except UnavailableError as error:
                    failures.append(error)
        wait = max((failure.retry_after or 0.0 for failure in failures), default=0.0)
        raise UnavailableError(
            FetchFailure.IDENTITY_UNAVAILABLE, "; ".join(map(str, failures)), retry_after=wait or None
        )

    async def _resolve_web(self, did: str) -> StoredIdentity:
        host = unquote(did.removeprefix("did:web:"))
        if self._allow_private_hosts and _LOCAL(host):
            return await self._web_document(did, f"http://{host}")
        if not is_handle(host) or host != did.removeprefix("did:web:") or host.rsplit(".", 1)[-1] in _DISALLOWED:
            return self._none(did, "a did:web that is not a public host name alone")
        return await self._web_document(did, f"https://{host}")

    async def _web_document(self, did: str, base: str) -> StoredIdentity:
        try:
            return await self._document(did, f"{base}/.well-known/did.json")
        except UnavailableError as error:
            raise UnavailableError(
                FetchFailure.IDENTITY_UNAVAILABLE, str(error), retry_after=error.retry_after
            ) from None

    async def _document(self, did: str, url: str) -> StoredIdentity:
        answer = await self._outbound.get(url, max_bytes=DOCUMENT_BYTES, timeout=REQUEST_SECONDS, accept=ACCEPT)
        if answer.status in _NOT_FOUND:
            return self._none(did, "not registered, or tombstoned")
        if answer.status != _OK:
            raise UnavailableError(FetchFailure.HTTP_STATUS, f"{answer.status} from {url}")
        try:
            parsed = parse_did_document(_json(answer.body), did, allow_http=self._allow_private_hosts)
        except (ValueError, RecursionError, UpstreamError) as error:
            raise UnavailableError(FetchFailure.BAD_ANSWER, f"{url}: {error!s:.200}") from None
        missing = [name for name, part in (("signing key", parsed.signing_key), ("PDS", parsed.pds)) if part is None]
        return StoredIdentity(
            did=did,
            handle=parsed.handle,
            pds=parsed.pds,
            signing_key=parsed.signing_key.did_key() if parsed.signing_key else None,
            fetched_at=self._clock(),
            problem=f"the document has no usable {' and no '.join(missing)}" if missing else None,
        )

    def _none(self, did: str, problem: str) -> StoredIdentity:
        return StoredIdentity(did, None, None, None, self._clock(), problem=problem)


def _json(body: bytes) -> Any:
    return json.loads(body)
