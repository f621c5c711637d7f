"""Read the change log once for all Jetstream subscribers."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import structlog

from indexer.concurrency.stage_progress import StageProgress
from indexer.db import Database
from indexer.db.change_signal import ChangeSignal
from indexer.db.feed_page import LogTrimmedError
from indexer.db.periodic import DatabaseAttempt
from indexer.readers.jetstream.events import LogPosition
from indexer.readers.jetstream.pages import load_chunk
from indexer.readers.jetstream.window import EventWindow

WINDOW_BYTES = 32 << 20
WINDOW_SECONDS = 60.0
"""A subscriber that has caught up is disconnected when it is further behind than the window."""
RETRY_SECONDS = 1.0

log = structlog.get_logger(__name__)


class JetstreamReader:
    """Follows the change log while there are subscribers.

    Attributes:
        window: The newest events.
        stage: The progress of the stage.
        subscribers: The number of subscribers.
    """

    def __init__(self, db: Database) -> None:
        self._db = db
        self.window = EventWindow(WINDOW_BYTES, WINDOW_SECONDS)
        self.stage = StageProgress("jetstream reader")
        self.subscribers = 0
        self._wanted = asyncio.Event()
        self._signal: ChangeSignal | None = None

    @contextmanager
    def subscriber(self) -> Iterator[None]:
        """Follow the log during the block."""
        self.subscribers += 1
        self._wanted.set()
        if self._signal is not None and not self.window.is_open:
            self._signal.notify()  # open the window now, and not after the next change
        try:
            yield
        finally:
            self.subscribers -= 1
            if not self.subscribers:
                self._wanted.clear()
                self.window.close()  # also in an outage: the next subscriber begins with new events

    async def run(self) -> NoReturn:
        """Fill the window while there are subscribers. After a database error, continue at the same position."""
        while True:
            await self._wanted.wait()
            with DatabaseAttempt(self.stage):
                async with self._db.changes.signal() as signal:
                    await self._follow(signal)
            if self._wanted.is_set():
                await asyncio.sleep(RETRY_SECONDS)

    async def _follow(self, signal: ChangeSignal) -> None:
        """Fill the window until there are no subscribers."""
        self._signal = signal
        try:
            while self._wanted.is_set():
                try:
                    await self._read_available()
                except LogTrimmedError as error:
                    log.warning("jetstream.log-trimmed", error=str(error), subscribers=self.subscribers)
                    self.window.close()
                    continue
                self.stage.idle()
                await signal.wait()
        finally:
            self._signal = None
            if not self._wanted.is_set():
                self.window.close()

    async def _read_available(self) -> None:
        """Add the events of all entries of the log that are not in the window yet, until the window is closed."""
        self.stage.begin()
        if self.window.end is None:
            self.window.open(LogPosition(await self._db.changes.latest_seq()))
        while self.window.end is not None and (chunk := await load_chunk(self._db, self.window.end)):
            if not self.window.is_open:
                return  # the last subscriber left during the read
            self.window.add(chunk)
            self.stage.moved()
            await asyncio.sleep(0)  # subscribers send this chunk before the next one is read
