"""Links and counts are exact after random writes, and in every snapshot while everything runs at once."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from time import time
from typing import Any

import asyncpg
import pytest

from indexer.store import Store
from indexer.sync.plans import Batch, RecordChange, RepoWrite
from indexer.sync.repo_state import Repo, SyncStatus
from tests.store.change_log_helpers import connected
from tests.store.link_checks import assert_links_exact
from tests.store.link_steps import ALL, LIKE, finish_resync, like, maintenance, settle, turn_on
from tests.store.repo_rows import delete, did, head, insert, synchronized
from tests.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture
async def other(database: str) -> AsyncIterator[asyncpg.Connection]:
    async with connected(database) as connection:
        yield connection


async def test_random_writes_keep_links_and_counts_exact(store: Store, sql: asyncpg.Connection) -> None:
    """Batches, resyncs, takedowns and the background task in any order; exact after each of them."""
    numbers = random.Random(11)
    await turn_on(store)
    stored: dict[int, set[str]] = {}
    for _ in range(60):
        name = numbers.randrange(4)
        if name not in stored:
            await insert(store, synchronized(name), changes=(like("a"),))
            stored[name] = {"a"}
        elif numbers.random() < 0.2:
            await sql.execute("select atproto.request_takedown($1, $2)", did(name), numbers.random() < 0.5)
        elif numbers.random() < 0.2:
            await settle(store)
        else:
            await write_some(store, name, stored[name], numbers)
        await assert_links_exact(sql)


async def write_some(store: Store, name: int, rkeys: set[str], numbers: random.Random) -> None:
    """Change some records of a repo, with a batch or with a resync."""
    changes = []
    for rkey in numbers.sample("abcdef", 3):
        if rkey in rkeys and numbers.random() < 0.5:
            rkeys.remove(rkey)
            changes.append(delete(f"{LIKE}/{rkey}"))
        else:
            action: Any = "update" if rkey in rkeys else "create"
            changes.append(like(rkey, numbers.choice(["one", "two"]), action=action))
            rkeys.add(rkey)
    if numbers.random() < 0.5:
        await store.request_resyncs([did(name)])
        for claimed in await store.claim(1, ALL, 10.0, 1e10):
            await finish_resync(store, claimed, tuple(changes))
            return
    repo = (await store.repos([did(name)]))[did(name)]
    assert not (
        await store.write(Batch((RepoWrite(repo.version, repo._replace(version=repo.version + 1), tuple(changes)),)))
    ).skipped


class EverythingAtOnce:
    """Writers of every kind on the same few repos, each in a task of its own, until the checker has seen enough."""

    def __init__(self, store: Store, seed: int) -> None:
        self.store = store
        self.numbers = random.Random(seed)
        self.done = asyncio.Event()
        self.writes: Counter[str] = Counter()

    async def repeat(self, name: str, action: Callable[[], Awaitable[object]]) -> None:
        """Run an action again and again; count how often it changed something."""
        while not self.done.is_set():
            if await action():
                self.writes[name] += 1
            await asyncio.sleep(0)

    def any_did(self) -> str:
        return did(self.numbers.randrange(8))

    async def any_repo(self, status: SyncStatus) -> Repo | None:
        name = self.any_did()
        repo = (await self.store.repos([name])).get(name)
        return repo if repo is not None and repo.sync_status is status else None

    async def replace(self, repo: Repo, *changes: RecordChange, **fields: Any) -> bool:
        """Write a row as the batch writer does, unless it has changed."""
        after = repo._replace(version=repo.version + 1, **fields)
        return not (await self.store.write(Batch((RepoWrite(repo.version, after, changes),)))).skipped

    def some_changes(self, stored: set[str] | None = None) -> tuple[RecordChange, ...]:
        """Return changes of random records; with `stored`, those that fit the stored records."""
        changes = []
        for rkey in self.numbers.sample("abcdef", 3):
            known = stored is None or rkey in stored
            if known and self.numbers.random() < 0.4:
                changes.append(delete(f"{LIKE}/{rkey}"))
            else:
                action: Any = "update" if known else "create"
                changes.append(like(rkey, self.numbers.choice(["one", "two"]), action=action))
        return tuple(changes)

    async def live(self) -> bool:
        repo = await self.any_repo(SyncStatus.SYNCHRONIZED)
        return repo is not None and await self.replace(repo, *self.some_changes())

    async def resync(self) -> bool:
        await self.store.request_resyncs([self.any_did()])
        for claimed in await self.store.claim(1, ALL, 10.0, 1e10):
            async with self.store.resync(claimed) as transaction:
                paths = [path.decode() async for chunk in transaction.stored() for path, _ in chunk]
                if not await transaction.holds_claim():
                    return False
                await transaction.write(self.some_changes({path.partition("/")[2] for path in paths}))
                locked = await transaction.lock()
                if locked is None:
                    return False
                done = locked._replace(
                    version=locked.version + 1, sync_status=SyncStatus.SYNCHRONIZED, sync_reason=None, head=head(),
                    synchronized_at=1.5,
                )  # fmt: skip
                await transaction.finish(Batch((RepoWrite(locked.version, done, live=False),)))
                return True
        return False

    async def take_down(self, sql: asyncpg.Connection) -> bool:
        query = "select atproto.request_takedown($1, $2)"
        return bool(await sql.fetchval(query, self.any_did(), self.numbers.random() < 0.5))

    async def change_scope(self, sql: asyncpg.Connection) -> bool:
        name = self.any_did()
        await sql.execute("select atproto.untrack(array[$1])", name)
        await asyncio.sleep(0.005)
        return bool(await sql.fetchval("select atproto.track(array[$1])", name))

    async def delete_account(self) -> bool:
        repo = await self.any_repo(SyncStatus.SYNCHRONIZED)
        return repo is not None and await self.replace(repo, active=False, hosting_status="deleted", erase_at=5.0)

    async def restore_account(self) -> bool:
        repo = await self.any_repo(SyncStatus.DESYNCHRONIZED)
        return repo is not None and await self.replace(
            repo, active=True, hosting_status=None, erase_at=None, next_attempt_at=None
        )

    async def erase(self) -> bool:
        erased = await self.store.erase_batch(ALL, time() + 10)
        return erased is not None and erased.records > 0

    async def is_complete(self) -> bool:
        return (await self.store.link_state(ALL)).done

    async def check(self, sql: asyncpg.Connection, times: int) -> None:
        """Compare a number of snapshots with the records, after the backfill is complete."""
        try:
            await until(self.is_complete)
            for _ in range(times):
                await assert_links_exact(sql)
        finally:
            self.done.set()


@pytest.mark.timeout(300)
async def test_every_snapshot_is_exact_while_everything_runs_at_once(
    store: Store, sql: asyncpg.Connection, other: asyncpg.Connection, database: str
) -> None:
    """Live writes, resyncs, takedowns, the scope, deletions, erasures, the backfill and the maintenance of counts."""
    for number in range(8):
        await insert(store, synchronized(number), changes=tuple(like(rkey) for rkey in "abcdef"))
    many = await Store.open(database, connections=6)
    world, task = EverythingAtOnce(many, 11), maintenance(many)
    try:
        async with connected(database) as third, asyncio.timeout(240), asyncio.TaskGroup() as tasks:
            for name, action in {
                "live": world.live,
                "resync": world.resync,
                "takedown": lambda: world.take_down(other),
                "scope": lambda: world.change_scope(third),
                "deletion": world.delete_account,
                "restoration": world.restore_account,
                "erasure": world.erase,
                "maintenance": task.run_once,
            }.items():
                tasks.create_task(world.repeat(name, action))
            tasks.create_task(world.check(sql, 40))
        assert world.writes.keys() >= {"live", "resync", "takedown", "scope", "deletion", "erasure"}
        await settle(store)
        await assert_links_exact(sql)
    finally:
        await many.close()
