"""Links of records and their counts: after every kind of write they are those of the visible records."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from time import time
from typing import Any

import asyncpg
import pytest

from indexer.atproto.links import links_of
from indexer.service.background.link_maintenance import LinkMaintenance
from indexer.store import FIRST_PATH, RecountPosition, Store
from indexer.sync.plans import Batch, RecordChange, RepoWrite
from indexer.sync.repo_state import Repo, SyncStatus
from indexer.sync.shard import Shard
from tests.store.change_log_helpers import connected
from tests.store.link_checks import assert_links_exact
from tests.store.repo_rows import delete, did, head, in_progress, insert, put, synchronized
from tests.waiting import until

pytestmark = pytest.mark.slow

ALL = range(256)
SHARD = Shard(0, 1)
LIKE, PATH = "app.bsky.feed.like", ".subject.uri"
CID = "bafkreibme22gw2h7y2h7tg2fhqotaqjucnbc24deqo72b6mkl2egezxhvy"


def post(name: object) -> str:
    return f"at://{did('author')}/app.bsky.feed.post/{name}"


def like(rkey: object, target: object = "one", **fields: Any) -> RecordChange:
    """Return a like of a post."""
    value = {"$type": LIKE, "subject": {"uri": post(target), "cid": CID}}
    return put(f"{LIKE}/{rkey}", json.dumps(value), **fields)


async def count(sql: asyncpg.Connection, target: object = "one") -> int | None:
    number: int | None = await sql.fetchval("select atproto.link_count($1, $2, $3)", post(target), LIKE, PATH)
    return number


def maintenance(store: Store, *, wanted: bool = True) -> LinkMaintenance:
    owned = asyncio.Event()
    owned.set()
    return LinkMaintenance(store, SHARD, owned, wanted=wanted)


async def turn_on(store: Store) -> None:
    """Keep links from now on, with a complete backfill."""
    task = maintenance(store)
    while not (await store.link_state(ALL)).done:
        await task.run_once()


async def settle(store: Store) -> None:
    """Do all work of the background task."""
    for name in await store.link_recounts_due(ALL, 100):
        after: RecountPosition | None = RecountPosition()
        while after is not None:
            after = await store.recount_links(name, after, 2)
    while await store.fold_link_deltas(ALL, 3):
        pass


@pytest.fixture
async def other(database: str) -> AsyncIterator[asyncpg.Connection]:
    async with connected(database) as connection:
        yield connection


async def test_links_follow_creates_updates_and_deletes(store: Store, sql: asyncpg.Connection) -> None:
    await turn_on(store)
    await insert(store, synchronized(1), changes=(like("a"), like("b"), like("c", "two"), put("app.test/d")))
    assert (await count(sql), await count(sql, "two"), await count(sql, "none")) == (2, 1, 0)
    row = await sql.fetchrow("select * from atproto.links where rkey = 'c'")
    assert tuple(row or ()) == (post("two"), "strong-ref", did(1), LIKE, "c", PATH)
    changes = (like("a", "two", action="update"), delete(f"{LIKE}/b"), delete(f"{LIKE}/absent"))
    await store.apply(Batch((RepoWrite(1, synchronized(1, version=2), changes),)))
    assert (await count(sql), await count(sql, "two")) == (0, 2)
    await assert_links_exact(sql)
    await settle(store)
    await assert_links_exact(sql)
    assert await sql.fetchval("select count(*) from indexer.link_delta") == 0
    assert await sql.fetchval("select count(*) from indexer.link_count where count = 0") == 0


async def test_the_last_of_several_changes_of_a_record_counts(store: Store, sql: asyncpg.Connection) -> None:
    await turn_on(store)
    changes = (like("a"), delete(f"{LIKE}/a"), like("a", "two"), like("b"), delete(f"{LIKE}/b"))
    await insert(store, synchronized(1), changes=changes)
    assert (await count(sql), await count(sql, "two")) == (0, 1)
    await assert_links_exact(sql)


async def test_links_found_while_planning_are_those_of_the_value(store: Store, sql: asyncpg.Connection) -> None:
    """A process that expects links has found them; in one that does not, the store finds them in the value."""
    await turn_on(store)
    for number, links in enumerate((None, links_of(like("x").value))):
        await insert(store, synchronized(number), changes=(like("a")._replace(links=links),))
    assert await count(sql) == 2


@pytest.mark.parametrize("hide", ["takedown", "account", "sql"])
async def test_links_of_a_hidden_repo_are_neither_shown_nor_counted(
    store: Store, sql: asyncpg.Connection, hide: str
) -> None:
    await turn_on(store)
    changes = tuple(like(number) for number in range(5))
    await insert(store, synchronized(1), synchronized(2), changes=changes)

    async def set_visible(version: int, *, visible: bool) -> None:
        fields = {"takedown": not visible} if hide == "takedown" else {"active": visible}
        if hide == "sql":
            await sql.execute("select atproto.request_takedown($1, $2)", did(1), not visible)
        else:
            assert not await store.apply(Batch((RepoWrite(version, synchronized(1, version=version + 1, **fields)),)))

    await settle(store)
    for settled in (True, False):
        version = await sql.fetchval("select version from indexer.repo where did = $1", did(1))
        await set_visible(version, visible=False)
        assert await count(sql) == 5
        if settled:
            await settle(store)
        assert await count(sql) == 5
        await assert_links_exact(sql)
        await set_visible(version + 1, visible=True)
        if settled:
            await settle(store)
        assert await count(sql) == 10
        await assert_links_exact(sql)
    await settle(store)
    assert await sql.fetchval("select count(*) from indexer.link_recount") == 0
    await assert_links_exact(sql)


async def test_records_written_to_a_hidden_repo_count_when_it_is_shown(store: Store, sql: asyncpg.Connection) -> None:
    await turn_on(store)
    await insert(store, synchronized(1, takedown=True), changes=(like("a"),))
    await settle(store)
    assert await count(sql) == 0
    await store.apply(Batch((RepoWrite(1, synchronized(1, version=2), (like("b"), like("a", action="update"))),)))
    assert await count(sql) == 2
    await settle(store)
    assert await count(sql) == 2
    await assert_links_exact(sql)


async def test_links_follow_a_resync_in_all_its_ways(store: Store, sql: asyncpg.Connection) -> None:
    """New records are copied, others are merged, and buffered events are drained."""
    await turn_on(store)
    claimed = await in_progress(store, 1)
    await finish_resync(store, claimed, (like("a"), like("b"), like("c")), drained=(like("d"), delete(f"{LIKE}/a")))
    assert await count(sql) == 3
    again = await claim_again(store, claimed)
    changes = (like("b", "two", action="update"), delete(f"{LIKE}/c"), like("e"))
    await finish_resync(store, again, changes)
    assert (await count(sql), await count(sql, "two")) == (2, 1)
    await assert_links_exact(sql)
    await settle(store)
    await assert_links_exact(sql)


async def claim_again(store: Store, claimed: Repo) -> Repo:
    assert await store.request_resyncs([claimed.did])
    [again] = await store.claim(1, ALL, 10.0, 1e10)
    return again


async def finish_resync(
    store: Store,
    claimed: Repo,
    changes: tuple[RecordChange, ...],
    drained: tuple[RecordChange, ...] = (),
    before_lock: Callable[[], Awaitable[object]] | None = None,
) -> None:
    async with store.resync(claimed) as transaction:
        await transaction.write(changes)
        if before_lock is not None:
            await before_lock()
        locked = await transaction.lock()
        assert locked is not None
        await transaction.write_drained(drained)
        done = locked._replace(
            version=locked.version + 1, sync_status=SyncStatus.SYNCHRONIZED, sync_reason=None, head=head(),
            synchronized_at=1.5,
        )  # fmt: skip
        await transaction.finish(Batch((RepoWrite(locked.version, done, live=False),)))


@pytest.mark.parametrize("recounted", [True, False])
async def test_a_takedown_during_a_resync_is_counted(store: Store, sql: asyncpg.Connection, *, recounted: bool) -> None:
    await turn_on(store)
    claimed = await in_progress(store, 1)

    async def take_down() -> None:
        await sql.execute("select atproto.request_takedown($1, true)", did(1))
        if recounted:
            await settle(store)

    await finish_resync(store, claimed, (like("a"), like("b")), before_lock=take_down)
    assert await count(sql) == 0
    await settle(store)
    assert await count(sql) == 0
    await sql.execute("select atproto.request_takedown($1, false)", did(1))
    assert await count(sql) == 2
    await assert_links_exact(sql)


async def test_an_abandoned_resync_leaves_links_as_they_were(store: Store, sql: asyncpg.Connection) -> None:
    await turn_on(store)
    claimed = await in_progress(store, 1)
    async with store.resync(claimed) as transaction:
        await transaction.write((like("a"),))
    assert await count(sql) == 0
    await assert_links_exact(sql)


async def test_an_erasure_removes_links(store: Store, sql: asyncpg.Connection) -> None:
    await turn_on(store)
    hidden = synchronized(1, active=False, hosting_status="deleted", erase_at=5.0)
    await insert(store, hidden, synchronized(2), changes=(like("a"), like("b")))
    await settle(store)
    erased = await store.erase_batch(ALL, 10.0)
    assert erased
    assert erased.records == 2
    assert await count(sql) == 2
    assert await sql.fetchval("select count(*) from indexer.link where did = $1", did(1)) == 0
    await settle(store)
    await assert_links_exact(sql)


@pytest.mark.parametrize("settled", [True, False])
async def test_links_of_an_untracked_repo_are_not_counted_until_it_is_tracked_again(
    store: Store, sql: asyncpg.Connection, *, settled: bool
) -> None:
    """Its records are erased later; meanwhile, it is hidden."""
    await turn_on(store)
    await insert(store, synchronized(1), synchronized(2), changes=(like("a"),))
    await sql.execute("select atproto.untrack(array[$1])", did(1))
    if settled:
        await settle(store)
    assert await count(sql) == 1
    await assert_links_exact(sql)
    await sql.execute("select atproto.track(array[$1])", did(1))
    await assert_links_exact(sql)
    await sql.execute("select atproto.untrack(array[$1])", did(1))
    assert await store.erase_batch(ALL, time() + 10)
    assert await count(sql) == 1
    await settle(store)
    assert await assert_links_exact(sql) == 1
    assert await sql.fetchval("select count(*) from indexer.link_recount") == 0


async def test_two_writers_of_links_to_one_target_do_not_wait_for_each_other(
    store: Store, sql: asyncpg.Connection
) -> None:
    """One transaction with likes of a post is open while another one commits, and the deltas are added."""
    await turn_on(store)
    await insert(store, synchronized(2), changes=(like("before"),))
    await settle(store)
    claimed = await in_progress(store, 1)

    async def write_elsewhere() -> None:
        async with asyncio.timeout(20):
            await insert(store, synchronized(3), changes=(like("a"),))
            await store.fold_link_deltas(ALL, 100)
        assert await count(sql) == 2

    await finish_resync(store, claimed, (like("b"),), before_lock=write_elsewhere)
    assert await count(sql) == 3


async def test_without_links_nothing_is_stored_and_the_count_is_null(store: Store, sql: asyncpg.Connection) -> None:
    await maintenance(store, wanted=False).run_once()
    await insert(store, synchronized(1), changes=(like("a"),))
    await sql.execute("select atproto.request_takedown($1, true)", did(1))
    for table in ("link", "link_delta", "link_count", "link_recount", "link_bucket"):
        assert await sql.fetchval(f"select count(*) from indexer.{table}") == 0  # noqa: S608
    assert await count(sql) is None
    assert await sql.fetchval("select state from atproto.link_progress") == "off"


async def test_stored_records_are_backfilled_while_others_are_written(store: Store, sql: asyncpg.Connection) -> None:
    changes = tuple(like(f"r{number:04}", number % 3) for number in range(450))
    await insert(store, *[synchronized(number) for number in range(3)], changes=changes[:40])
    await insert(store, synchronized("large"), synchronized("hidden", takedown=True), changes=changes)
    task = maintenance(store)
    state = await store.turn_links_on(ALL)
    assert (state.kept, state.done) == (True, False)
    assert await count(sql, 0) is None
    assert await sql.fetchval("select state from atproto.link_progress") == "backfill"
    touched = (like("r0000", "new", action="update"), delete(f"{LIKE}/r0001"), like("later"))
    await store.apply(Batch((RepoWrite(1, synchronized("large", version=2), touched),)))
    steps, _ = await store.backfill_links({did("large"): FIRST_PATH})
    assert steps[did("large")].after is not None
    await store.apply(Batch((RepoWrite(2, synchronized("large", version=3), (delete(f"{LIKE}/r0005"),)),)))
    while not (await store.link_state(ALL)).done:
        await task.run_once()
    await assert_links_exact(sql)
    progress = await sql.fetchrow("select state, repos_done, buckets_done, buckets from atproto.link_progress")
    assert tuple(progress or ()) == ("complete", 5, 256, 256)
    assert await count(sql, "new") == 1


async def test_a_backfill_goes_on_after_a_restart_and_adds_nothing_twice(store: Store, sql: asyncpg.Connection) -> None:
    await insert(store, *[synchronized(number) for number in range(8)], changes=(like("a"), like("b", "two")))
    await store.turn_links_on(ALL)
    dids = await store.next_link_repos(ALL, "", 5)
    steps, links = await store.backfill_links(dict.fromkeys(dids, FIRST_PATH))
    assert [step.after for step in steps.values()] == [None] * 5
    assert links == 10
    await store.save_link_backfill(ALL, dids[2], {})
    assert await store.link_backfill_position(ALL) == dids[2]
    await turn_on(store)
    assert (await count(sql), await count(sql, "two")) == (8, 8)
    await assert_links_exact(sql)


async def test_a_repo_in_progress_is_backfilled_after_its_resync(store: Store, sql: asyncpg.Connection) -> None:
    """A resync that began before does not know that links are kept, if it asked before they were."""
    await insert(store, synchronized(1), changes=(like("a"),))
    claimed = await claim_again(store, synchronized(1))
    task = maintenance(store)

    async def begin_backfill() -> None:
        await task.run_once()
        assert not (await store.link_state(ALL)).done

    await finish_resync(store, claimed, (like("b"),), before_lock=begin_backfill)
    while not (await store.link_state(ALL)).done:
        await task.run_once()
    assert await count(sql) == 2
    await assert_links_exact(sql)


async def test_a_repo_without_head_whose_records_were_not_erased_is_backfilled(
    store: Store, sql: asyncpg.Connection
) -> None:
    """A repo that was untracked has no rev. It is tracked again before its records are erased."""
    await insert(store, synchronized(1), changes=(like("a"),))
    await sql.execute("select atproto.untrack(array[$1])", did(1))
    await sql.execute("select atproto.track(array[$1])", did(1))
    await turn_on(store)
    assert await count(sql) == 1
    await assert_links_exact(sql)


async def test_a_batch_asks_the_database_until_the_setting_is_known(store: Store, sql: asyncpg.Connection) -> None:
    await store.turn_links_on(ALL)
    assert store.keeps_links is None
    await insert(store, synchronized(1), changes=(like("a"),))
    assert await sql.fetchval("select count(*) from atproto.links") == 1


async def test_turning_links_off_removes_them_and_on_again_brings_them_back(
    store: Store, sql: asyncpg.Connection
) -> None:
    await turn_on(store)
    await insert(store, synchronized(1), changes=(like("a"),))
    await maintenance(store, wanted=False).run_once()
    assert await count(sql) is None
    assert await sql.fetchval("select count(*) from indexer.link") == 0
    await store.apply(Batch((RepoWrite(1, synchronized(1, version=2), (like("b"), delete(f"{LIKE}/a"))),)))
    await turn_on(store)
    assert await count(sql) == 1
    await assert_links_exact(sql)


async def test_links_that_one_shard_does_not_keep_are_not_counted(store: Store, sql: asyncpg.Connection) -> None:
    """The shard with links on is complete, the other one turned them off; then both."""
    halves = range(128), range(128, 256)
    for half in halves:
        await store.turn_links_on(half)
        await store.finish_link_backfill(half)
    assert await count(sql) == 0
    assert not await store.turn_links_off(halves[1])
    assert await count(sql) is None
    assert (await store.turn_links_on(halves[1])).off
    assert await store.turn_links_off(halves[0])
    assert (await store.turn_links_on(halves[1])).kept


async def test_a_consumer_that_reads_links_does_not_keep_writers_from_turning_them_off_forever(
    store: Store, other: asyncpg.Connection
) -> None:
    """Removing links waits for a moment only, and is tried again."""
    await turn_on(store)
    task = maintenance(store, wanted=False)
    async with other.transaction():
        await other.fetch("select * from atproto.links")
        with pytest.raises(Exception, match="lock timeout"):
            await task.run_once()
    await task.run_once()
    assert not (await store.link_state(ALL)).kept


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
    assert not await store.apply(
        Batch((RepoWrite(repo.version, repo._replace(version=repo.version + 1), tuple(changes)),))
    )


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
        return not await self.store.apply(Batch((RepoWrite(repo.version, after, changes),)))

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
