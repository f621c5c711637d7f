"""Stages made to do their work twice: what the guard must notice."""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from benchmarks import stages
from indexer.atproto.crypto import PublicKey
from indexer.pds import PdsClient, Spool
from indexer.relay.subscription import Subscription
from indexer.service import resync
from indexer.service.resync import Resync
from indexer.store import ResyncTransaction, Store
from indexer.store.apply import apply
from indexer.sync.diff import Diff, Difference
from indexer.sync.plan import Batch, RecordChange
from indexer.sync.repo import Repo
from indexer.sync.verify import Snapshot

Twice = Callable[[pytest.MonkeyPatch], None]


def called(owner: Any, name: str) -> Twice:
    work = getattr(owner, name)

    def both(*arguments: Any, **named: Any) -> Any:
        work(*arguments, **named)
        return work(*arguments, **named)

    return lambda patch: patch.setattr(owner, name, both)


def received(patch: pytest.MonkeyPatch) -> None:
    """Each message takes two: as many more have to be sent."""
    frames = Subscription.frames

    async def every_second(*arguments: Any) -> AsyncIterator[bytes]:
        async with aclosing(frames(*arguments)) as all_:
            async for _ in all_:
                yield await anext(all_)

    patch.setattr(Subscription, "frames", every_second)


def written(patch: pytest.MonkeyPatch) -> None:
    """What is read, and what is written, the first time to be taken back."""
    repos, write = Store.repos, Store.apply

    async def read(self: Store, dids: Sequence[str]) -> dict[str, Repo]:
        await repos(self, dids)
        return await repos(self, dids)

    async def written(self: Store, batch: Batch) -> frozenset[str]:
        async with self._connection() as connection:
            transaction = connection.transaction()
            await transaction.start()
            await apply(connection, batch)
            await transaction.rollback()
        return await write(self, batch)

    patch.setattr(Store, "repos", read)
    patch.setattr(Store, "apply", written)


def fetched(patch: pytest.MonkeyPatch) -> None:
    fetch = PdsClient.fetch_repo

    @asynccontextmanager
    async def both(*arguments: Any) -> AsyncIterator[Spool]:
        async with fetch(*arguments):
            pass
        async with fetch(*arguments) as spool:
            yield spool

    patch.setattr(PdsClient, "fetch_repo", both)


def compared(patch: pytest.MonkeyPatch) -> None:
    """Of a repo of which nothing is stored yet, and that is a chunk at most."""
    changes = Resync._changes

    def both(self: Resync, differences: Iterator[Difference], snapshot: Snapshot) -> tuple[bool, list[RecordChange]]:
        changes(self, Diff(self._chosen(snapshot)).rest(), snapshot)
        return changes(self, differences, snapshot)

    patch.setattr(Resync, "_changes", both)


def rewritten(patch: pytest.MonkeyPatch) -> None:
    write = Resync._write_chunk

    async def both(self: Resync, transaction: ResyncTransaction, changes: Sequence[RecordChange]) -> None:
        savepoint = transaction._connection.transaction()
        await savepoint.start()
        await write(self, transaction, changes)
        await savepoint.rollback()
        await write(self, transaction, changes)

    patch.setattr(Resync, "_write_chunk", both)


PLANNING: dict[tuple[str, ...], Twice] = {
    ("decode",): called(stages, "decode_frame"),
    ("split",): called(stages, "split_car"),
    ("commit",): called(stages, "decode_commit"),
    ("signature",): called(PublicKey, "verify"),
    ("inversion",): called(stages, "invert"),
    ("values",): called(stages, "decode_record"),
    ("plan", "in turn"): called(stages, "plan_batch"),
}
"""By the stages that take twice their time then."""

RESYNCING: dict[tuple[str, ...], Twice] = {
    ("fetch",): fetched,
    ("verify",): called(resync, "verify_snapshot"),
    ("diff",): compared,
    ("apply", "database"): rewritten,
}
