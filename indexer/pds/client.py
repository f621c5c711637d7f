"""Questions to a host about one repo. The host is a PDS, or a relay that sends us on to it."""

from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

from indexer.atproto.cid import parse_cid
from indexer.atproto.limits import Limits
from indexer.atproto.syntax import is_tid
from indexer.errors import UnavailableError
from indexer.outbound import Outbound
from indexer.pds.spool import Spool
from indexer.pds.xrpc import query, xrpc_error, xrpc_url
from indexer.reasons import FetchFailure

LARGE_BYTES = 32 * 1024 * 1024  # of an export; one in a thousand repos has more
CAR_TYPE = "application/vnd.ipld.car"
_CAR_TYPES = frozenset({CAR_TYPE, "application/octet-stream", ""})  # the latter two from proxies
_ANSWER_SECONDS = 20.0
_ANSWER_BYTES = 65_536


class PdsClient:
    """Fetches through `outbound`; exports go to files in `spool_directory`, which is made if it is missing.

    An export may take `export_seconds`, and comes at `export_rate` bytes a second or more (spec §4.8).
    `host` is a base URL; only its origin counts. Everything raises `UnavailableError`: what `Outbound` raises,
    what the host's error name says (`FetchFailure.parks` tells the definite ones), or BAD_ANSWER.
    """

    def __init__(
        self,
        outbound: Outbound,
        limits: Limits,
        spool_directory: Path,
        *,
        export_seconds: float = 600.0,
        export_rate: float = 1_024.0,
    ) -> None:
        self._outbound = outbound
        self._limits = limits
        self._spool_directory = spool_directory
        self._export_seconds = export_seconds
        self._export_rate = export_rate
        spool_directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    @asynccontextmanager
    async def fetch_repo(self, did: str, host: str, large: Callable[[], None] = lambda: None) -> AsyncIterator[Spool]:
        """The whole export of `did` (`getRepo`), every block hashed, nothing proven yet.

        `large` is called once more than `LARGE_BYTES` have come; what it raises ends the fetch.
        Raises `UpstreamError` too, for a file that breaks a rule of CAR; EXPORT_INCOMPLETE for one cut inside a block.
        """
        with Spool(self._spool_directory, self._limits) as spool:
            async with self._outbound.stream(
                xrpc_url(host, "com.atproto.sync.getRepo", {"did": did}),
                max_bytes=self._limits.repo_bytes,
                timeout=self._export_seconds,
                min_rate=self._export_rate,
                accept=CAR_TYPE,
            ) as stream:
                if stream.status != HTTPStatus.OK:
                    raise xrpc_error(stream.status, await stream.read())
                media_type = stream.headers.get("content-type", "").partition(";")[0].strip().lower()
                if media_type not in _CAR_TYPES:
                    raise UnavailableError(FetchFailure.BAD_ANSWER, f"{media_type[:80]!r} for an export")
                await spool.fill(_watched(stream.chunks(), large))
            yield spool

    async def latest_commit(self, did: str, host: str) -> tuple[bytes, str]:
        """The CID and the revision of the host's newest commit (`getLatestCommit`)."""
        answer = await self._ask(host, "com.atproto.sync.getLatestCommit", did)
        cid, rev = answer.get("cid"), answer.get("rev")
        if not (isinstance(cid, str) and isinstance(rev, str) and is_tid(rev)):
            raise UnavailableError(FetchFailure.BAD_ANSWER, f"no commit: {answer}"[:200])
        try:
            return parse_cid(cid), rev
        except ValueError as error:
            raise UnavailableError(FetchFailure.BAD_ANSWER, str(error)) from None

    async def _ask(self, host: str, method: str, did: str) -> dict[str, Any]:
        return await query(self._outbound, host, method, {"did": did}, max_bytes=_ANSWER_BYTES, seconds=_ANSWER_SECONDS)


async def _watched(chunks: AsyncIterable[bytes], large: Callable[[], None]) -> AsyncIterator[bytes]:
    size = 0
    async for chunk in chunks:
        if size <= LARGE_BYTES < size + len(chunk):
            large()
        size += len(chunk)
        yield chunk
