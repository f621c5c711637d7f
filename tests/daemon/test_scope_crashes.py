"""The daemon is killed while it follows a changed scope, and goes on after a restart with the same result."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from random import Random
from time import time

import asyncpg
import pytest

from indexer import daemon as composition
from indexer import daemon_scope
from indexer.atproto.syntax import CollectionFilter
from indexer.cli.demo import compare
from indexer.localnet.local_account import LocalAccount
from indexer.service.background.account_erasure import AccountErasure
from indexer.service.crawl.scope_backfill import ScopeBackfill
from indexer.store import Store, erase_records
from indexer.sync.scope import Scope, Track
from tests.daemon.impatient_daemon import wait_less
from tests.daemon.running_daemon import LIKE, POST, FilteredNetwork, running_daemon
from tests.daemon_forks import DaemonFork, Death, start_fork_server
from tests.daemon_process import daemon_environment, daemon_process, log_tail
from tests.database_checks import assert_log_gives_records, stored_seq
from tests.numbered_changes import number_changes
from tests.waiting import until

pytestmark = pytest.mark.slow

FOLLOW = "app.bsky.graph.follow"
COLLECTIONS = (POST, LIKE, FOLLOW)
BUCKETS = range(256)
NOT_LISTED = "app.bsky.feed.*"
IMPATIENT = "tests.daemon.impatient_daemon"


async def narrow_partly(store: Store, scope: Scope, _accounts: list[LocalAccount]) -> None:
    page = await store.delete_unselected(scope, POST, BUCKETS, None, 2)
    assert page is not None
    assert page.deleted == 2


async def mark_partly(store: Store, scope: Scope, _accounts: list[LocalAccount]) -> None:
    [repo, *_] = await store.incomplete_repos(scope, BUCKETS, "", 10)
    assert await store.mark_complete([repo._replace(scope_version=repo.scope_version)], scope) == 1
    await store.request_resyncs([repo.did])  # it has such records, so it is fetched again


async def request_partly(store: Store, scope: Scope, _accounts: list[LocalAccount]) -> None:
    assert await store.request_incomplete(scope, BUCKETS, 1, time()) == 1


async def claim_partly(store: Store, scope: Scope, _accounts: list[LocalAccount]) -> None:
    await store.request_incomplete(scope, BUCKETS, 1, time())
    [claimed] = await store.claim(10, BUCKETS, -1.0, time())
    assert claimed.scope_version < scope.complete_from


async def erase_partly(store: Store, _scope: Scope, accounts: list[LocalAccount]) -> None:
    await store.untrack([accounts[0].did])
    erased = await store.erase_batch(BUCKETS, time() + 1)
    assert erased is not None
    assert (erased.records, erased.finished) == (2, False)
    await store.track([accounts[0].did])


@pytest.mark.parametrize("step", [narrow_partly, mark_partly, request_partly, claim_partly, erase_partly])
async def test_daemon_goes_on_after_each_step(
    database: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: Callable[[Store, Scope, list[LocalAccount]], Awaitable[None]],
) -> None:
    """Each step is one transaction, so the daemon can only be killed between two of them."""
    monkeypatch.setattr(composition, "AccountErasure", partial(AccountErasure, interval=0.1))
    monkeypatch.setattr(daemon_scope, "ScopeBackfill", partial(ScopeBackfill, interval=0.1, settle=0.0))
    async with FilteredNetwork(collections=[POST]) as network:
        async with running_daemon(database, tmp_path / "before", network, collections=POST) as daemon:
            accounts = [daemon.create_account(f"{name}.test") for name in ("ada", "bob")]
            for account in accounts:
                account.create(LIKE, {"$type": LIKE}, rkey="one")
            await daemon.wait_until_equal()
        store = await Store.open(database, connections=2)
        try:
            scope = await store.set_collections([LIKE])
            with monkeypatch.context() as patched:
                patched.setattr(erase_records, "BATCH_SIZE", 2)
                await step(store, scope, accounts)
        finally:
            await store.close()
        network.collections = {LIKE}
        async with running_daemon(database, tmp_path / "after", network) as daemon:
            for account in accounts:
                await daemon.resync_until_equal(account)
            await until(partial(is_complete, daemon.store))
        connection = await asyncpg.connect(database)
        try:
            await assert_log_gives_records(connection)
        finally:
            await connection.close()


async def is_complete(store: Store) -> bool:
    return all(row.complete == row.repos for row in await store.scope_progress())


DEATHS = {
    point: (Death(point), Death(point, committed=True))
    for point in (
        "scope.narrowed",
        "scope.marked",
        "scope.requested",
        "scope.untracked",
        "claim.written",
        "crawl.page",
        "erasure.written",
        "resync.finished",
    )
} | {"scope.recheck-planned": (Death("scope.recheck-planned"),)}
"""The deaths of each test, by crash point."""


@pytest.fixture(scope="module")
def fork_server() -> None:
    start_fork_server()


@pytest.mark.usefixtures("fork_server")
@pytest.mark.parametrize("point", DEATHS)
async def test_daemon_killed_at_each_step_of_a_change_goes_on_after_it(
    database: str, tmp_path: Path, record_property: Callable[[str, object], None], point: str
) -> None:
    """One change narrows and widens the collections, and untracks repos by name and by their lack of a signal."""
    store, connection = await Store.open(database, connections=2), await asyncpg.connect(database)
    try:
        await store.begin_scope(Scope(collections=CollectionFilter([POST, FOLLOW])))
        async with FilteredNetwork(collections=[POST, FOLLOW]) as network:
            accounts = [network.create_account(f"account{number}.test") for number in range(8)]
            for number, account in enumerate(accounts):
                for collection in (POST, FOLLOW, *([LIKE] if number < 5 else [])):
                    for rkey in "abcd":
                        account.create(collection, {"$type": collection}, rkey=rkey)
            fans, removed, chosen = accounts[:4], accounts[4], accounts[5]
            daemon = DaemonFork(daemon_environment(network, database, tmp_path), tmp_path, wait_less)
            async with daemon.supervised():
                await wait_for_truth(store, connection, network, tmp_path)
            await store.track([chosen.did])
            await store.change_scope(Track.SIGNAL, [POST, LIKE], [LIKE])
            await store.untrack([removed.did])
            network.collections, network.dids = {POST, LIKE}, {account.did for account in (*fans, chosen)}
            for death in DEATHS[point]:
                daemon.start(death)
                try:
                    await daemon.wait_for_death(death)
                finally:
                    daemon.close()
                await connection.execute("update indexer.repo set lease_until = now() where lease_until is not null")
                await number_changes(store, connection)
                await assert_log_gives_records(connection)
            async with daemon.supervised():
                await wait_for_truth(store, connection, network, tmp_path)
            await number_changes(store, connection)
            await assert_log_gives_records(connection)
            record_property("deaths", len(DEATHS[point]))
            scope = await store.scope()
            assert scope is not None
            assert await store.count_not_chosen(scope) == len(fans)
    finally:
        await connection.close()
        await store.close()


CHANGES = 20
KILLS = 10
PATTERNS = ([POST], [LIKE, FOLLOW], [POST, FOLLOW], [*COLLECTIONS], ["*"], [NOT_LISTED], ["app.bsky.*"], [FOLLOW])


class Load:
    """Random writes of several accounts."""

    def __init__(self, network: FilteredNetwork, random: Random) -> None:
        self.accounts = [network.create_account(f"account{number}.test") for number in range(8)]
        self._random = random
        self._number = 0
        self.write(60)

    def write(self, count: int = 5) -> None:
        for _ in range(count):
            account, collection = self._random.choice(self.accounts), self._random.choice(COLLECTIONS)
            present = [path for path in account.records if path.startswith(collection)]
            self._number += 1
            if present and self._random.random() < 0.3:
                account.delete(self._random.choice(present))
            elif present and self._random.random() < 0.3:
                account.update(self._random.choice(present), {"$type": collection, "n": self._number})
            else:
                account.create(collection, {"$type": collection, "n": self._number}, rkey=f"r{self._number}")


class Changer:
    """Random changes of the scope, and the truth that follows from them."""

    def __init__(self, store: Store, network: FilteredNetwork, load: Load, random: Random) -> None:
        self._store = store
        self._network = network
        self._load = load
        self._random = random
        self._untracked: set[str] = set()

    async def change(self) -> None:
        did = self._random.choice(self._load.accounts).did
        if self._random.random() < 0.3:
            await self._store.untrack([did])
            self._untracked.add(did)
        elif self._untracked and self._random.random() < 0.5:
            did = self._random.choice(sorted(self._untracked))
            await self._store.track([did])
            self._untracked.discard(did)
        else:
            patterns = self._random.choice(PATTERNS)
            await self._store.set_collections(patterns)
            self._network.collections = {name for name in COLLECTIONS if CollectionFilter(patterns).matches(name)}
        self._network.dids = {account.did for account in self._load.accounts} - self._untracked


@pytest.mark.timeout(600)  # eleven starts of the daemon take most of the time
async def test_random_changes_under_load_and_kills_end_with_the_truth(database: str, tmp_path: Path) -> None:
    random, store = Random(17), await Store.open(database, connections=2)
    connection = await asyncpg.connect(database)
    try:
        await store.begin_scope(Scope())
        async with FilteredNetwork(collections=COLLECTIONS) as network:
            load = Load(network, random)
            changer = Changer(store, network, load, random)
            killed_after = sorted(random.sample(range(1, CHANGES), KILLS))
            changed = 0
            for last in [*killed_after, CHANGES]:
                async with daemon_process(network, database, tmp_path, IMPATIENT) as process:
                    seq = await stored_seq(store, network.relay_url) or 0
                    load.write()
                    await until(partial(cursor_moved, store, network, seq), partial(log_tail, tmp_path))
                    while changed < last:
                        await changer.change()
                        load.write()
                        # Nothing but time says how far the work is: the daemon is killed at another point each time.
                        await asyncio.sleep(0.8 * random.random())
                        changed += 1
                    if last == CHANGES:
                        await wait_for_truth(store, connection, network, tmp_path)
                    process.kill()
                    assert await process.wait() == -signal.SIGKILL
                await connection.execute("update indexer.repo set lease_until = now() where lease_until is not null")
                await number_changes(store, connection)
                await assert_log_gives_records(connection)
    finally:
        await connection.close()
        await store.close()


async def cursor_moved(store: Store, network: FilteredNetwork, seq: int) -> bool:
    return (await stored_seq(store, network.relay_url) or 0) > seq


async def wait_for_truth(
    store: Store, connection: asyncpg.Connection, network: FilteredNetwork, directory: Path
) -> None:
    """Wait until the visible records are those in scope, all stored records are visible, and nothing is incomplete."""
    differences = ["not compared"]

    async def reached() -> bool:
        nonlocal differences
        # A killed worker counts as a failed attempt; do not wait for its back-off.
        await connection.execute(
            "update indexer.repo set next_attempt_at = null where sync_status = 'desynchronized' and active"
        )
        hidden = await connection.fetchval(
            "select (select count(*) from indexer.record) - (select count(*) from atproto.records)"
        )
        stored = await stored_seq(store, network.relay_url)
        differences = [*(await compare(network, store)).differences, *(["hidden records"] if hidden else [])]
        return not differences and stored == network.relay.log[-1].seq and await is_complete(store)

    await until(reached, lambda: (differences[:5], log_tail(directory)))
