"""Patches that make a stage do its work twice, to prove that `benchmarks.guard` notices it."""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    ExitStack,
    aclosing,
    asynccontextmanager,
    contextmanager,
)
from typing import Any
from unittest.mock import patch

from benchmarks import live_stages
from indexer.atproto.crypto import PublicKey
from indexer.core.spool import Spool
from indexer.db import database as database_module
from indexer.db import resync_transaction
from indexer.db.columns import Connection
from indexer.db.repos import Repos
from indexer.net.pds.pds_client import ExportDownload, PdsClient
from indexer.net.relay.subscription import Subscription
from indexer.sync import changes
from indexer.sync.export import ExportReader, Snapshot
from indexer.sync.repo import Repo

Doubling = Callable[[], AbstractContextManager[None]]
"""Doubles the work of stages inside its block."""


def _call_twice(*functions: tuple[Any, str]) -> Doubling:
    """Return the doubling that calls each of these functions (owner and name) twice."""

    def twice(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            function(*arguments, **named)
            return function(*arguments, **named)

        return call

    @contextmanager
    def doubled() -> Iterator[None]:
        with ExitStack() as patches:
            for owner, name in functions:
                patches.enter_context(patch.object(owner, name, twice(getattr(owner, name))))
            yield

    return doubled


def _write_twice(*functions: tuple[Any, str]) -> Doubling:
    """Return the doubling that calls each of these functions of a connection twice, and rolls the first call back."""

    def twice(write: Callable[..., Any]) -> Callable[..., Any]:
        async def call(connection: Connection, *arguments: Any) -> Any:
            savepoint = connection.transaction()
            await savepoint.start()
            await write(connection, *arguments)
            await savepoint.rollback()
            return await write(connection, *arguments)

        return call

    @contextmanager
    def doubled() -> Iterator[None]:
        with ExitStack() as patches:
            for owner, name in functions:
                patches.enter_context(patch.object(owner, name, twice(getattr(owner, name))))
            yield

    return doubled


@contextmanager
def _receive_twice() -> Iterator[None]:
    """Return every second message only, so that each one costs two. Twice as many messages must be sent."""
    receive = Subscription.frames

    async def frames(*arguments: Any) -> AsyncIterator[bytes]:
        async with aclosing(receive(*arguments)) as all_frames:
            async for _ in all_frames:
                yield await anext(all_frames)

    with patch.object(Subscription, "frames", frames):
        yield


@contextmanager
def _load_and_write_twice() -> Iterator[None]:
    load = Repos.load

    async def load_twice(self: Repos, dids: Sequence[str]) -> dict[str, Repo]:
        await load(self, dids)
        return await load(self, dids)

    with patch.object(Repos, "load", load_twice), _write_twice((database_module, "write"))():
        yield


class _DownloadTwice:
    """Downloads an export a second time within `fetch`."""

    def __init__(self, download: ExportDownload, second: AbstractAsyncContextManager[ExportDownload]) -> None:
        self._download = download
        self._second = second

    @property
    def reader(self) -> ExportReader:
        return self._download.reader

    @property
    def server(self) -> str | None:
        return self._download.server

    @property
    def complete(self) -> bool:
        return self._download.complete

    @property
    def rate(self) -> float:
        return self._download.rate

    async def fetch(self, *arguments: Any) -> bool:
        async with self._second as second:
            await second.fetch()
        return await self._download.fetch(*arguments)


@contextmanager
def _fetch_twice() -> Iterator[None]:
    open_once = PdsClient.open_export

    @asynccontextmanager
    async def open_export(*arguments: Any) -> AsyncIterator[_DownloadTwice]:
        async with open_once(*arguments) as download:
            yield _DownloadTwice(download, open_once(*arguments))

    with patch.object(PdsClient, "open_export", open_export):
        yield


@contextmanager
def _compare_twice() -> Iterator[None]:
    """Walk the tree of the export twice, read each record twice and decode it twice."""
    walk = Snapshot.records

    def records(self: Snapshot) -> Iterator[tuple[bytes, bytes]]:
        return (entry for entry, _ in zip(walk(self), walk(self), strict=True))

    with (
        patch.object(Snapshot, "records", records),
        _call_twice((Spool, "block"), (changes, "decode_record"))(),
    ):
        yield


PLANNING: dict[tuple[str, ...], Doubling] = {
    ("decode",): _call_twice((live_stages, "decode_frame")),
    ("split",): _call_twice((live_stages, "split_car")),
    ("commit",): _call_twice((live_stages, "decode_commit")),
    ("signature",): _call_twice((PublicKey, "verify")),
    ("inversion",): _call_twice((live_stages, "invert")),
    ("values",): _call_twice((live_stages, "decode_record")),
    ("plan", "interleaved"): _call_twice((live_stages, "plan_batch")),
}
"""By the stages whose time doubles."""

RECEIVING: dict[tuple[str, ...], Doubling] = {("socket",): _receive_twice}

WRITING: dict[tuple[str, ...], Doubling] = {("client", "database"): _load_and_write_twice}

RESYNCING: dict[tuple[str, ...], Doubling] = {
    ("fetch",): _fetch_twice,
    ("verify",): _call_twice((Spool, "verify")),
    ("diff",): _compare_twice,
    ("apply", "database"): _write_twice((resync_transaction, "create_records")),
}
