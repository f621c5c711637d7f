"""Read the operations of a PLC directory: pages of its export, its stream, or a file with the lines of an export.

A position is the number of an operation as text, or its time if the directory does not number operations. Operations
must come in the order of their positions, otherwise the reading ends with an error. No signature is verified here.
"""

import asyncio
import gzip
import zlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from pathlib import Path
from time import time
from typing import NamedTuple

import orjson

from indexer.atproto.plc import LogEntry, parse_entry
from indexer.errors import PlcLogError, UnavailableError
from indexer.net.http.http_client import OutboundClient
from indexer.net.relay.stream_socket import ConnectionSettings, open_stream
from indexer.reasons import FetchFailure

STREAM_PATH = "/export/stream"
PAGE_LINES = 1_000
PAGE_BYTES = 16 << 20
LINE_BYTES = 200_000
"""Maximum size of a line: an operation with the fields that a directory adds."""
REQUEST_TIMEOUT = 60.0
IDLE_SECONDS = 30.0
"""Time without an operation after which the stream is closed. The next page shows if any were missed."""
GATHER_SECONDS = 0.2
"""Time in which operations of the stream are gathered to be written together."""
OVERLAP = timedelta(seconds=10)
"""If a position is a time, reading begins so long before it: an operation may appear after a later one."""
CLOCK_SECONDS = 3_600.0
"""Maximum time by which the clock of a directory may be ahead."""
EARLIEST = datetime(2000, 1, 1, tzinfo=UTC)
"""An operation with an earlier time is refused."""


class UnknownPositionError(UnavailableError):
    """The directory has no operations up to this position: it is another one, or was restored."""


class ReadOperations(NamedTuple):
    """Operations that were read together."""

    operations: Sequence[LogEntry]
    read_until: float  # the time (Unix seconds) up to which all operations were read


@dataclass(frozen=True, slots=True)
class PlcExport:
    """The export of the directory with this URL."""

    outbound: OutboundClient
    url: str
    user_agent: str

    async def pages(self, position: str | None) -> AsyncGenerator[ReadOperations]:
        """Yield the operations after a position, or all, page by page, until nothing is left.

        The operation at the position may be repeated; without numbers, also those shortly before it. Servers may ignore
        `count`, and may begin a page with the last line of the one before.

        Raises:
            UnavailableError: The directory cannot be read, or does not serve operations in their order.
        """
        known, overlap = set[tuple[str, str]](), OVERLAP
        while True:
            after, asked_at = _step_back(position, overlap), time()
            response = await self.outbound.get(
                f"{self.url}/export?count={PAGE_LINES}&after={after}",
                max_bytes=PAGE_BYTES,
                timeout=REQUEST_TIMEOUT,
                accept="application/jsonlines",
            )
            if response.status != HTTPStatus.OK:
                raise UnavailableError(FetchFailure.HTTP_STATUS, f"{response.status} from the export of {self.url}")
            lines = response.body.split(b"\n", PAGE_LINES)[:PAGE_LINES]
            numbered = position is not None and position.isdigit()
            page = await asyncio.to_thread(_parse, lines, after, numbered=numbered)
            if not page and position is not None:
                raise UnknownPositionError(FetchFailure.BAD_ANSWER, f"{self.url} has no operation at {position}")
            new = [one for one in page if (one.did, str(one.cid)) not in known]
            if not new and len(page) >= PAGE_LINES:
                raise UnavailableError(FetchFailure.BAD_ANSWER, f"a page of one millisecond at {position}")
            known, overlap = {(one.did, str(one.cid)) for one in page}, timedelta(milliseconds=1)
            if not new:
                yield ReadOperations((), asked_at)
                return
            position = position_of(new[-1])
            yield ReadOperations(new, _time_of(new[-1]))

    async def stream(self, position: str | None) -> AsyncGenerator[ReadOperations]:
        """Yield the operations after a number, or only new ones, as they are accepted.

        It ends if the directory offers no stream, closes it, or sends nothing for a while.

        Raises:
            UnavailableError: The directory does not send operations in their order, does not know the position, or, if
                there is no position, offers no stream.
        """
        cursor, opened = None if position is None else int(position), False
        try:
            async with open_stream(
                self.url, cursor, LINE_BYTES, self.user_agent, ConnectionSettings(), self.outbound.opening, STREAM_PATH
            ) as socket:
                opened = True
                while True:
                    async with asyncio.timeout(IDLE_SECONDS):
                        lines = [await socket.receive()]
                    with suppress(OSError):  # if the stream has ended, the next message says so
                        async with asyncio.timeout(GATHER_SECONDS):
                            while len(lines) < PAGE_LINES:
                                lines.append(await socket.receive())
                    if operations := await asyncio.to_thread(_parse, lines, position or "0", numbered=True):
                        position = position_of(operations[-1])
                        yield ReadOperations(operations, _time_of(operations[-1]))
        except OSError as error:  # includes TimeoutError
            if "FutureCursor" in str(error):
                detail = f"{self.url} has no operation at {position}"
                raise UnknownPositionError(FetchFailure.BAD_ANSWER, detail) from error
            if cursor is None and not opened:
                detail = f"{self.url} offers no stream ({error!s:.200}): `indexer identities import` has to come first"
                raise UnavailableError(FetchFailure.UNREACHABLE, detail) from error


async def operations_in_file(path: Path, position: str | None) -> AsyncGenerator[ReadOperations]:
    """Yield the operations after a position in a file of lines of an export, or in one that gzip has compressed.

    Raises:
        UnavailableError: A line is not one of an export, or its operation comes before that of an earlier line.
        OSError: The file cannot be read.
    """
    last = "0"
    with path.open("rb") as raw:
        file = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw

        def read() -> Sequence[LogEntry] | None:
            try:
                lines = [line for line in (file.readline(LINE_BYTES) for _ in range(PAGE_LINES)) if line]
            except (EOFError, zlib.error) as error:
                raise UnavailableError(FetchFailure.BAD_ANSWER, f"{path}: {error}") from None
            return _parse(lines, last) if lines else None

        while (operations := await asyncio.to_thread(read)) is not None:
            last = position_of(operations[-1]) if operations else last
            if new := [one for one in operations if not _is_before(one, position)]:
                yield ReadOperations(new, _time_of(new[-1]))


def position_of(operation: LogEntry) -> str:
    """Return the position of an operation."""
    return str(operation.seq) if operation.seq is not None else _text(operation.accepted_at)


def _text(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _step_back(position: str | None, overlap: timedelta) -> str:
    """Return the value of `after` for which the directory repeats the operation at a position."""
    if position is None or position.isdigit():
        return str(max(0, int(position or 0) - 1))
    return _text(datetime.fromisoformat(position) - overlap)


def _is_before(operation: LogEntry, position: str | None) -> bool:
    """Return True if an operation is before a position, or at it if that is a number: times are not unique."""
    if position is None:
        return False
    if position.isdigit():
        return operation.seq is not None and operation.seq <= int(position)
    return operation.accepted_at < datetime.fromisoformat(position)


def _time_of(operation: LogEntry) -> float:
    return min(time(), operation.accepted_at.timestamp())


def _parse(lines: Iterable[bytes], after: str, *, numbered: bool = False) -> Sequence[LogEntry]:
    """Return the operations of lines, which come in their order after a position. With `numbered`, all have numbers.

    Raises:
        UnavailableError: With BAD_ANSWER, if a line is not of an export, or not at its place.
    """
    lines = [line for line in lines if line.strip()]
    if any(len(line) > LINE_BYTES for line in lines):  # to decode a page of empty lists would block all threads
        raise UnavailableError(FetchFailure.BAD_ANSWER, f"a line of an export has more than {LINE_BYTES:,} bytes")
    try:
        parsed = [parse_entry(orjson.loads(line)) for line in lines]
    except (orjson.JSONDecodeError, PlcLogError) as error:
        raise UnavailableError(FetchFailure.BAD_ANSWER, f"not a line of an export: {error!s:.200}") from None
    operations, latest = [one for one in parsed if one is not None], datetime.fromtimestamp(time() + CLOCK_SECONDS, UTC)
    for one in operations:
        in_time = EARLIEST <= one.accepted_at <= latest
        if not in_time or (numbered and one.seq is None) or _is_before(one, after):
            detail = f"the operation at {position_of(one)} of {one.accepted_at} follows the one at {after}"
            raise UnavailableError(FetchFailure.BAD_ANSWER, detail)
        after = position_of(one)
    return operations
