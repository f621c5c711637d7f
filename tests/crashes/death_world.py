"""A local network, a database, a daemon that kills itself at crash points, and a consumer of the change log."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import asyncpg

from indexer.app.tuning import Tuning
from indexer.db import Database
from indexer.demo.local_plc import did_of
from indexer.demo.scenario import NOTE, Scenario
from tests.background import running
from tests.daemon_forks import DaemonFork, Death, do_not_prepare
from tests.daemon_process import daemon_environment
from tests.database_checks import apply_strictly, fetch, wait_until_equal
from tests.faulty_network import FaultyAccount, FaultyNetwork
from tests.lost_commits import active_account, lose_commit
from tests.numbered_changes import number_changes
from tests.passed_time import EXPIRE_LEASES, expire_waits
from tests.quick_tuning import MORTAL
from tests.waiting import until

CONSUMER = "crashes"
EVENTS_OF_A_NEW_ACCOUNT = 4
STEPS = 400
"""Steps of the scenario. Account events are at each fifth of them."""
FIRST_STEPS = 12

_NEXT = "select did, collection, rkey, action, cid, rev from atproto.next_changes($1, 100000) order by seq"
_STORED = "select did, collection, rkey, atproto.cid_text(cid) from indexer.record"
_UNSETTLED = """
    select (select count(*) from indexer.buffered_event) + (select count(*) from indexer.gap where closed_at is null)
        + (select count(*) from indexer.repo where sync_status = 'in-progress')
        + (select count(*) from indexer.unnumbered_batch)
        + (select coalesce(sum(repos - complete), 0) from atproto.scope_progress)
"""

Act = Callable[["DeathWorld"], Coroutine[None, None, None]]


class DeathWorld:
    """The network, the database and the daemon.

    Attributes:
        db: For commands of the operator.
        deaths: How often the daemon has died, by the moment.
        changes: All entries of the change log that a consumer has read.
    """

    def __init__(
        self,
        network: FaultyNetwork,
        dsn: str,
        directory: Path,
        db: Database,
        sql: asyncpg.Connection,
        seed: int,
        prepare: Callable[[], None],
    ) -> None:
        self.network = network
        self.dsn = dsn
        self.random = Random(seed)
        self.db = db
        self.deaths = Counter[Death | None]()
        self.changes: list[asyncpg.Record] = []
        self._sql = sql
        self._environment = daemon_environment(network, dsn, directory) | {"INDEXER_RESYNC_WORKERS": "2"}
        self._first_environment = dict(self._environment)
        self.daemon = DaemonFork(self._environment, directory, MORTAL, prepare)
        self._scenario = Scenario(network, seed=seed)
        self._steps = 0
        self._names = 0

    def change_settings(self, settings: Mapping[str, str], tuning: Tuning = MORTAL) -> None:
        """Let the next processes have these settings, with the names in docs/settings.md in lower case, and no others.

        They also have this tuning.
        """
        self._environment.clear()
        self._environment.update(self._first_environment)
        self._environment.update({f"INDEXER_{name.upper()}": value for name, value in settings.items()})
        self.daemon.tuning = tuning

    def act(self, steps: int) -> None:
        """Let accounts write."""
        for _ in range(steps):
            self._scenario.perform(self._steps, STEPS)
            self._steps += 1

    def account(self) -> FaultyAccount:
        """Return an account that is active."""
        return active_account(self.network, self.random)

    def lose_commit(self) -> FaultyAccount:
        """Let the relay lose a commit of an account, which then writes another one: so its repo needs a resync."""
        account = self.account()
        lose_commit(account)
        return account

    def create_unseen_account(self) -> FaultyAccount:
        """Create an account with records of which the relay sends only the last commit: so its repo is fetched."""
        account = self.create_omitted_account()
        account.create(NOTE, {"text": "seen"})
        return account

    def create_omitted_account(self) -> FaultyAccount:
        """Create an account that only its host lists until its first commit."""
        handle = f"{self._name()}.test"
        self.network.relay.drop(did_of(handle), EVENTS_OF_A_NEW_ACCOUNT)
        return self.network.create_account(handle)

    def create_account(self) -> FaultyAccount:
        return self.network.create_account(f"{self._name()}.test")

    async def die(self, death: Death, before: Act, meanwhile: Act | None = None) -> None:
        """Let the daemon run until it dies at this moment, after `before` and during `meanwhile`."""
        await before(self)
        self.daemon.start(death)
        async with running(*([meanwhile(self)] if meanwhile else [])):
            await self.daemon.wait_for_death(death)
        await self.count_death(death)

    async def kill_after(self, seconds: float, meanwhile: Act) -> None:
        """Let the daemon run for some time, and kill it."""
        self.daemon.start()
        async with running(meanwhile(self)):
            await asyncio.sleep(seconds)
        self.daemon.kill()
        await self.count_death(None)

    async def count_death(self, death: Death | None) -> None:
        """Compare the change log with the records that the process has left, and let its leases expire."""
        self.deaths[death] += 1
        await number_changes(self.db, self._sql)
        await self.check_change_log()
        await self.execute(EXPIRE_LEASES)

    async def has_stored_all_messages(self) -> bool:
        """Return True if the cursor is at the last message of the relay."""
        return bool(await self._sql.fetchval("select max(seq) from indexer.cursor") == self.network.relay.seq)

    async def settle(self) -> None:
        """Run a daemon without faults until the database is equal to the network; compare the change log with it."""
        for pds in self.network.pdses:
            pds.faults.clear()  # one that has not fired would occupy a worker for ten minutes
        self.network.relay.window = None
        self.daemon.start()
        await self.check()
        self.daemon.kill()

    async def check(self) -> None:
        """Wait until the database is equal to the network, and compare the change log with it. Nothing acts now."""
        try:
            await wait_until_equal(self.network, self.dsn, min_records=8)
            await until(self._is_settled)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.daemon.log_tail()}") from error
        await self.check_change_log()

    async def check_change_log(self) -> None:
        """Assert that the log gives the stored records, in one snapshot, and that no change was logged twice."""
        async with self._sql.transaction(isolation="repeatable_read"):
            read = list[asyncpg.Record]()
            while page := await self._sql.fetch(_NEXT, CONSUMER):
                read += page
            stored = await self._sql.fetch(_STORED)
        self.changes += read
        folded = apply_strictly([row[:5] for row in self.changes if row["rkey"] is not None])
        assert folded == {row[:3]: row[3] for row in stored}
        proven = Counter([tuple(row) for row in self.changes if row["rkey"] is not None and row["rev"] is not None])
        assert [row for row, times in proven.items() if times > 1] == []

    async def feed_is_saved(self) -> bool:
        """Return True if the feed has stored that everything was delivered."""
        rows = await self.execute("select behind from atproto.readers where name = 'tap-feed'")
        return [row["behind"] for row in rows] == [0]

    async def dead_letters(self, count: int) -> bool:
        """Return True if there are this many dead letters."""
        return len(await self.execute("select from indexer.dead_letter")) == count

    async def execute(self, statement: str, *values: object) -> list[asyncpg.Record]:
        return await fetch(self.dsn, statement, *values)

    async def _is_settled(self) -> bool:
        [(unsettled,)] = await self.execute(_UNSETTLED)
        return bool(unsettled == 0)

    def _name(self) -> str:
        self._names += 1
        return f"crash{self._names}"


@asynccontextmanager
async def death_world(
    dsn: str,
    directory: Path,
    settings: Mapping[str, str] | None = None,
    *,
    seed: int = 1,
    steps: int = FIRST_STEPS,
    prepare: Callable[[], None] = do_not_prepare,
    network: FaultyNetwork | None = None,
) -> AsyncIterator[DeathWorld]:
    """Run accounts on a network, a new one or the given one. All are indexed when the block begins, without a daemon.

    `settings` are those of the processes in the block. None of these may end with an error. `prepare` is called in each
    process.
    """
    if network is None:
        async with (
            FaultyNetwork() as new,
            death_world(dsn, directory, settings, seed=seed, steps=steps, prepare=prepare, network=new) as world,
        ):
            yield world
        return
    db, sql = await Database.open(dsn, connections=2), await asyncpg.connect(dsn)
    world = DeathWorld(network, dsn, directory, db, sql, seed, prepare)
    await world.execute("select atproto.register_reader($1, 0)", CONSUMER)
    world.act(steps)
    try:
        async with running(expire_waits(dsn)):
            await world.settle()
            world.change_settings(settings or {})
            yield world
    finally:
        world.daemon.close()
        await sql.close()
        await db.close()
    assert world.daemon.ended == 0, world.daemon.log_tail()
