"""An export on disk: blocks by CID, with memory use that does not depend on the size of the repo.

Blocks are in memory until they exceed `BUFFER_BYTES`: those of a small export all are. Then they are in a SQLite
database. Its file has no name, so the system deletes it when it is closed or the process ends. It needs no journal,
because nobody reads it after a crash.
"""

import sqlite3
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Lock

from indexer.atproto.car import CarReader
from indexer.atproto.cid import CID_BYTES
from indexer.atproto.crypto import PublicKey
from indexer.atproto.limits import Limits
from indexer.errors import UnavailableError, UpstreamError
from indexer.reasons import FetchFailure
from indexer.sync.export import Snapshot, verify_snapshot

BUFFER_BYTES = 1 << 20
"""The blocks in memory are written to the file when they have this size."""
_HEAD_BYTES = 4 + CID_BYTES
_CREATE = """
pragma journal_mode = off;
pragma synchronous = off;
pragma locking_mode = exclusive;
create table block (cid blob primary key, data blob not null);
begin
"""


class Spool:
    """One export. `write` all of it, call `finish`, then read any `block`, from any thread. Call `close` last.

    Attributes:
        size: The size of all different blocks with their lengths and CIDs, in bytes. It is exact after `finish`.
    """

    def __init__(self, directory: Path, limits: Limits, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._directory = directory
        self._reader = CarReader(limits)
        self._buffer_bytes = buffer_bytes
        self._recent: dict[bytes, bytes] = {}  # blocks that are not in the file
        self._database: sqlite3.Connection | None = None  # most exports are small and need none
        self._lock = Lock()  # no thread reads while another one closes the database
        self.size = 0

    def write(self, chunk: bytes) -> None:
        """See `ExportReader`."""
        for cid, block in self._reader.feed(chunk):
            if cid not in self._recent:
                self._recent[cid] = block
                self.size += _HEAD_BYTES + len(block)
        if self._database is not None or self.size >= self._buffer_bytes:
            self._flush()

    def finish(self) -> None:
        """See `ExportReader`."""
        try:
            self._reader.close()
        except UpstreamError as error:
            raise UnavailableError(FetchFailure.EXPORT_INCOMPLETE, error.detail) from None

    @property
    def root(self) -> bytes:
        """The CID of the commit."""
        return self._reader.roots[0]

    def block(self, cid: bytes) -> bytes | None:
        """Return the bytes of a block; None if the export does not contain it.

        Raises:
            UnavailableError: SPOOL_UNREADABLE if the file cannot be read.
        """
        if self._database is None:
            return self._recent.get(cid)
        try:
            with self._lock:
                row = self._database.execute("select data from block where cid = ?", (cid,)).fetchone()
        except sqlite3.Error as error:
            raise UnavailableError(FetchFailure.SPOOL_UNREADABLE, str(error)) from error
        block: bytes | None = row and row[0]
        return block

    def verify(self, did: str, key: PublicKey, limits: Limits) -> Snapshot:
        """See `ExportReader`."""
        return verify_snapshot(did, self.root, self.block, key, limits, self.size)

    def close(self) -> None:
        """Delete the file and forget the blocks."""
        self._recent.clear()
        if self._database is not None:
            with self._lock:
                self._database.close()

    def _flush(self) -> None:
        try:
            if self._database is None:
                with NamedTemporaryFile(dir=self._directory) as file:
                    self._database = sqlite3.connect(file.name, isolation_level=None, check_same_thread=False)
                    self._database.executescript(_CREATE)
            cursor = self._database.cursor()
            for cid, block in self._recent.items():
                if not cursor.execute("insert or ignore into block values (?, ?)", (cid, block)).rowcount:
                    self.size -= _HEAD_BYTES + len(block)
        except (OSError, sqlite3.Error) as error:
            unreadable = "READ" in getattr(error, "sqlite_errorname", "")
            reason = FetchFailure.SPOOL_UNREADABLE if unreadable else FetchFailure.SPOOL_FULL
            raise UnavailableError(reason, str(error)) from error
        self._recent.clear()
