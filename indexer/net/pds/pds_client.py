"""Fetch exports and latest commits from a PDS, or from a relay that redirects to it (docs/protocol.md#exports)."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path
from time import monotonic

from indexer.atproto.car import split_car
from indexer.atproto.cid import cid_text, parse_cid
from indexer.atproto.limits import Limits
from indexer.atproto.syntax import is_tid
from indexer.concurrency.bounded_dict import BoundedDict
from indexer.crash_points import crash_point
from indexer.errors import UnavailableError, UpstreamError
from indexer.net.http.http_client import OutboundClient, Response
from indexer.net.pds.xrpc import QUERY_TIMEOUT, query, xrpc_error, xrpc_url
from indexer.reasons import FetchFailure
from indexer.sync.export import ExportReader
from indexer.sync.identity import MAX_HOSTS

LARGE_BYTES = 32 * 1024 * 1024
"""Size above which an export is large. About one repo in a thousand is."""

CAR_TYPE = "application/vnd.ipld.car"
_CAR_TYPES = frozenset({CAR_TYPE, "application/octet-stream", ""})
"""Usual media types of exports. Proxies send the other two."""
_MIN_SECONDS = 0.001
MAX_BLOCKS, MIN_BLOCKS = 100, 20
"""Blocks per request: a CID takes 65 bytes of the URL, and many proxies allow 8 KiB. Some servers allow 20 values."""
_TOO_LONG = frozenset(
    {HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_URI_TOO_LONG, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE}
)
_COULD_NOT_FIND = "Could not find"
"""In the message of the reference PDS if a block is missing."""

ReaderFactory = Callable[[Path, Limits], ExportReader]
"""Returns a reader that may write a file in a directory. It raises `UnavailableError` (SPOOL_FULL)."""


@dataclass(slots=True)
class ExportDownload:
    """An export whose body is read on demand, so that the caller decides whether a large one goes on."""

    reader: ExportReader  # every block received so far, hashed; nothing in it is proven yet
    _chunks: AsyncIterator[bytes]
    _connection: AsyncExitStack
    server: str | None = None  # the network address that sends the export, if it is known
    content_type: str = CAR_TYPE
    received: int = field(default=0, init=False)  # bytes
    _opened_at: float = field(default_factory=monotonic, init=False)
    _completed_at: float | None = field(default=None, init=False)

    @property
    def complete(self) -> bool:
        """True if the host has sent the whole export: the file does not end within a block."""
        return self._completed_at is not None

    @property
    def rate(self) -> float:
        """The mean rate in bytes per second since the response began."""
        until = monotonic() if self._completed_at is None else self._completed_at
        return self.received / max(until - self._opened_at, _MIN_SECONDS)

    async def fetch(self, max_bytes: int | None = None) -> bool:
        """Read until the end, or until more than `max_bytes` have arrived; return True if the export is complete.

        A complete download closes its connection, so that the host's request slot is free while the export is checked.

        Raises:
            UpstreamError: The file breaks a rule of the CAR format.
            UnavailableError: The host failed, the disk is full or has an error, the file ends within a block
                (EXPORT_INCOMPLETE), or it is not a CAR and has the media type of something else (BAD_ANSWER).
        """
        async for chunk in self._chunks:
            self.received += len(chunk)
            with self._format_errors():
                self.reader.write(chunk)
            crash_point("export.spooled")
            if max_bytes is not None and self.received > max_bytes:
                return False
        with self._format_errors():
            self.reader.finish()
        self._completed_at = monotonic()
        await self._connection.aclose()
        return True

    @contextmanager
    def _format_errors(self) -> Iterator[None]:
        """Let the content decide whether a body of another media type is an export: a CAR proves itself."""
        try:
            yield
        except (UpstreamError, UnavailableError) as error:
            of_host = isinstance(error, UpstreamError) or error.reason is FetchFailure.EXPORT_INCOMPLETE
            media_type = self.content_type.partition(";")[0].strip().lower()
            if not of_host or media_type in _CAR_TYPES:
                raise
            detail = f"media type {media_type[:80]!r} for an export, and no valid CAR: {error}"
            raise UnavailableError(FetchFailure.BAD_ANSWER, detail) from None


@dataclass(eq=False)
class PdsClient:
    """Requests to hosts about single repos.

    `host` is a base URL of which only the origin is used. All failures of a request are `UnavailableError`: as
    `OutboundClient` raises it, from an XRPC error, or BAD_ANSWER.
    """

    outbound: OutboundClient
    limits: Limits
    spool_directory: Path  # exports are written to files in it; it is created if it is missing
    reader: ReaderFactory
    export_timeout: float = 600.0  # seconds within which an export must arrive
    export_min_rate: float = 1_024.0  # bytes per second

    def __post_init__(self) -> None:
        self._blocks_per_request = BoundedDict[str, int](MAX_HOSTS)
        self.spool_directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    @asynccontextmanager
    async def open_export(self, did: str, host: str) -> AsyncIterator[ExportDownload]:
        """Request the export of `did` (`getRepo`) and yield the download. Nothing of the body has been read yet.

        Raises:
            UnavailableError: The request failed, or the spool directory cannot be used (SPOOL_FULL).
        """
        with closing(self.reader(self.spool_directory, self.limits)) as reader:
            async with AsyncExitStack() as connection:
                stream = await connection.enter_async_context(
                    self.outbound.stream(
                        xrpc_url(host, "com.atproto.sync.getRepo", {"did": did}),
                        max_bytes=self.limits.repo_bytes,
                        timeout=self.export_timeout,
                        min_rate=self.export_min_rate,
                        accept=CAR_TYPE,
                    )
                )
                if stream.status != HTTPStatus.OK:
                    raise xrpc_error(stream.status, await stream.read())
                chunks = await connection.enter_async_context(aclosing(stream.chunks()))
                content_type = stream.headers.get("content-type", "")
                yield ExportDownload(reader, chunks, connection, stream.server, content_type)

    async def fetch_record_proof(self, did: str, path: str, host: str) -> Response:
        """Return a response with the CAR of a record and its proof (`getRecord` of `com.atproto.sync`).

        Nothing has been verified. `path` is the collection and the record key. For an absent key, the reference PDS
        sends the nodes that prove its absence.

        Raises:
            UnavailableError: The host cannot be reached, or refuses the request.
        """
        collection, _, rkey = path.partition("/")
        parameters = {"did": did, "collection": collection, "rkey": rkey}
        url = xrpc_url(host, "com.atproto.sync.getRecord", parameters)
        response = await self._get_car(url, self.limits.commit_blocks_bytes)
        if response.status != HTTPStatus.OK:
            raise xrpc_error(response.status, response.body)
        return response

    async def fetch_blocks(self, did: str, cids: Sequence[bytes], host: str, max_bytes: int) -> dict[bytes, bytes]:
        """Return the blocks that the host sends (`getBlocks`), by CID. They are hashed and have at most `max_bytes`.

        The reference PDS refuses all if it lacks one. Servers and proxies that refuse long URLs get shorter ones.

        Raises:
            UpstreamError: The body is no CAR, or a block has another hash.
            UnavailableError: The host cannot be reached, refuses the request, or sends more bytes.
        """
        found: dict[bytes, bytes] = {}
        while cids:
            count = self._blocks_per_request.get(host, MAX_BLOCKS)
            wanted = {cid: cid_text(cid) for cid in cids[:count]}
            parameters = {"did": did, "cids": list(wanted.values())}
            response = await self._get_car(xrpc_url(host, "com.atproto.sync.getBlocks", parameters), max_bytes)
            if response.status == HTTPStatus.OK:
                split = partial(split_car, max_bytes=max_bytes, rootless=True)
                _, blocks = await asyncio.to_thread(split, response.body, self.limits)
                found |= {cid: block for cid, block in blocks.items() if cid in wanted}
                cids, max_bytes = cids[count:], max_bytes - len(response.body)
                continue
            error = xrpc_error(response.status, response.body)
            # A block may also be missing, which has no status and no name of its own.
            is_long = error.reason is FetchFailure.HTTP_STATUS and _COULD_NOT_FIND not in error.detail
            if response.status not in _TOO_LONG or not is_long or len(wanted) <= MIN_BLOCKS:
                raise error
            self._blocks_per_request[host] = max(len(wanted) // 2, MIN_BLOCKS)
        return found

    async def _get_car(self, url: str, max_bytes: int) -> Response:
        return await self.outbound.get(url, max_bytes=max_bytes, timeout=QUERY_TIMEOUT, accept=CAR_TYPE)

    async def fetch_latest_commit(self, did: str, host: str) -> tuple[bytes, str]:
        """Return the CID and the rev of the latest commit on the host (`getLatestCommit`)."""
        method = "com.atproto.sync.getLatestCommit"
        body = await query(self.outbound, host, method, {"did": did})
        cid, rev = body.get("cid"), body.get("rev")
        if not (isinstance(cid, str) and isinstance(rev, str) and is_tid(rev)):
            raise UnavailableError(FetchFailure.BAD_ANSWER, f"{method}: the response is not a commit")
        try:
            return parse_cid(cid), rev
        except ValueError as error:
            raise UnavailableError(FetchFailure.BAD_ANSWER, str(error)) from None
