"""One `getRepo` response that is being written to a spool file (docs/protocol.md#exports)."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager
from time import monotonic

from indexer.crash_points import crash_point
from indexer.errors import UnavailableError, UpstreamError
from indexer.reasons import FetchFailure
from indexer.sync.export import ExportReader

CAR_TYPE = "application/vnd.ipld.car"
_CAR_TYPES = frozenset({CAR_TYPE, "application/octet-stream", ""})
"""Usual media types of exports. Proxies send the other two."""
_MIN_SECONDS = 0.001


class ExportDownload:
    """An export whose body is read on demand, so that the caller decides whether a large one goes on.

    `PdsClient.open_export` opens and closes it.

    Attributes:
        reader: Every block received so far, hashed. Nothing in it is proven yet.
        server: The network address that sends the export; None if it is unknown.
        received: Bytes received so far.
    """

    def __init__(
        self,
        reader: ExportReader,
        chunks: AsyncIterator[bytes],
        connection: AsyncExitStack,
        server: str | None = None,
        content_type: str = CAR_TYPE,
    ) -> None:
        self.reader = reader
        self.server = server
        self.received = 0
        self._opened_at = monotonic()
        self._completed_at: float | None = None
        self._chunks = chunks
        self._connection = connection
        self._media_type = content_type.partition(";")[0].strip().lower()

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
            if not of_host or self._media_type in _CAR_TYPES:
                raise
            detail = f"media type {self._media_type[:80]!r} for an export, and no valid CAR: {error}"
            raise UnavailableError(FetchFailure.BAD_ANSWER, detail) from None
