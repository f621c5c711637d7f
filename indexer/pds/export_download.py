"""One `getRepo` response that is being written to a spool file (docs/protocol.md#exports)."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

from indexer.pds.spool import Spool


class ExportDownload:
    """An export whose body is read on demand, so that the caller decides whether a large one goes on.

    `PdsClient.open_export` opens and closes it.

    Attributes:
        spool: Every block received so far, hashed. Nothing in it is proven yet.
    """

    def __init__(self, spool: Spool, chunks: AsyncIterator[bytes], connection: AsyncExitStack) -> None:
        self.spool = spool
        self._chunks = chunks
        self._connection = connection
        self._received = 0

    async def fetch(self, max_bytes: int | None = None) -> bool:
        """Read until the end, or until more than `max_bytes` have arrived; return True if the export is complete.

        A complete download closes its connection, so that the host's request slot is free while the export is checked.

        Raises:
            UpstreamError: The file breaks a rule of the CAR format.
            UnavailableError: The host failed, the disk is full, or the file ends within a block (EXPORT_INCOMPLETE).
        """
        async for chunk in self._chunks:
            self._received += len(chunk)
            self.spool.write(chunk)
            if max_bytes is not None and self._received > max_bytes:
                return False
        self.spool.finish()
        await self._connection.aclose()
        return True
