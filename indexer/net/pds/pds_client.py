"""Fetch exports and latest commits from a PDS, or from a relay that redirects to it (docs/protocol.md#exports)."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, closing
from http import HTTPStatus
from pathlib import Path

from indexer.atproto.cid import parse_cid
from indexer.atproto.limits import Limits
from indexer.atproto.syntax import is_tid
from indexer.errors import UnavailableError
from indexer.net.http import OutboundClient
from indexer.net.pds.export_download import CAR_TYPE, ExportDownload
from indexer.net.pds.xrpc import query, xrpc_error, xrpc_url
from indexer.reasons import FetchFailure
from indexer.sync.export import ExportReader

LARGE_BYTES = 32 * 1024 * 1024
"""Size above which an export is large. About one repo in a thousand is."""

_QUERY_TIMEOUT = 20.0
_QUERY_BYTES = 65_536

ReaderFactory = Callable[[Path, Limits], ExportReader]
"""Returns a reader that may write a file in a directory. It raises `UnavailableError` (SPOOL_FULL)."""


class PdsClient:
    """Requests to hosts about single repos.

    `host` is a base URL of which only the origin is used. All failures of a request are `UnavailableError`: as
    `OutboundClient` raises it, from an XRPC error, or BAD_ANSWER.
    """

    def __init__(
        self,
        outbound: OutboundClient,
        limits: Limits,
        spool_directory: Path,
        reader: ReaderFactory,
        *,
        export_timeout: float = 600.0,
        export_min_rate: float = 1_024.0,
    ) -> None:
        """Write exports to files in `spool_directory`, which is created if it is missing.

        An export must arrive within `export_timeout` seconds, at `export_min_rate` bytes per second or more. `reader`
        makes the reader of each export.
        """
        self._outbound = outbound
        self._limits = limits
        self._spool_directory = spool_directory
        self._export_timeout = export_timeout
        self._export_min_rate = export_min_rate
        self._reader = reader
        spool_directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    @asynccontextmanager
    async def fetch_export(self, did: str, host: str) -> AsyncIterator[ExportReader]:
        """Fetch the whole export of `did` (`getRepo`) and yield it. Nothing but its blocks is checked.

        Raises:
            UpstreamError: As `ExportDownload.fetch` raises it.
            UnavailableError: As `open_export` and `ExportDownload.fetch` raise it.
        """
        async with self.open_export(did, host) as download:
            await download.fetch()
            yield download.reader

    @asynccontextmanager
    async def open_export(self, did: str, host: str) -> AsyncIterator[ExportDownload]:
        """Request the export of `did` (`getRepo`) and yield the download. Nothing of the body has been read yet.

        Raises:
            UnavailableError: The request failed, or the spool directory cannot be used (SPOOL_FULL).
        """
        with closing(self._reader(self._spool_directory, self._limits)) as reader:
            async with AsyncExitStack() as connection:
                stream = await connection.enter_async_context(
                    self._outbound.stream(
                        xrpc_url(host, "com.atproto.sync.getRepo", {"did": did}),
                        max_bytes=self._limits.repo_bytes,
                        timeout=self._export_timeout,
                        min_rate=self._export_min_rate,
                        accept=CAR_TYPE,
                    )
                )
                if stream.status != HTTPStatus.OK:
                    raise xrpc_error(stream.status, await stream.read())
                chunks = await connection.enter_async_context(aclosing(stream.chunks()))
                content_type = stream.headers.get("content-type", "")
                yield ExportDownload(reader, chunks, connection, stream.server, content_type)

    async def fetch_record_proof(self, did: str, path: str, host: str) -> bytes:
        """Return a CAR with a record and its proof (`getRecord` of `com.atproto.sync`). Nothing has been verified.

        `path` is the collection and the record key.
        """
        collection, _, rkey = path.partition("/")
        parameters = {"did": did, "collection": collection, "rkey": rkey}
        response = await self._outbound.get(
            xrpc_url(host, "com.atproto.sync.getRecord", parameters),
            max_bytes=self._limits.commit_blocks_bytes,
            timeout=_QUERY_TIMEOUT,
            accept=CAR_TYPE,
        )
        if response.status != HTTPStatus.OK:
            raise xrpc_error(response.status, response.body)
        return response.body

    async def fetch_latest_commit(self, did: str, host: str) -> tuple[bytes, str]:
        """Return the CID and the rev of the latest commit on the host (`getLatestCommit`)."""
        method = "com.atproto.sync.getLatestCommit"
        body = await query(self._outbound, host, method, {"did": did}, max_bytes=_QUERY_BYTES, timeout=_QUERY_TIMEOUT)
        cid, rev = body.get("cid"), body.get("rev")
        if not (isinstance(cid, str) and isinstance(rev, str) and is_tid(rev)):
            raise UnavailableError(FetchFailure.BAD_ANSWER, f"{method}: the response is not a commit")
        try:
            return parse_cid(cid), rev
        except ValueError as error:
            raise UnavailableError(FetchFailure.BAD_ANSWER, str(error)) from None
