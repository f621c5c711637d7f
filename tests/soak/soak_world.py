"""A world of constant size that acts at a constant rate, and its two daemons."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from time import monotonic, time_ns

import asyncpg

from indexer.app.tuning import Tuning
from indexer.demo.local_plc import did_of
from indexer.net.http.host_limits import HostPauses
from indexer.net.http.http_client import Timeouts
from indexer.resync.queue import MaintenanceSettings
from tests.background import running
from tests.daemon_forks import DaemonFork
from tests.faulty_network import FaultyAccount
from tests.passed_time import expire_waits
from tests.simulation.drawn_world import DRAFT, EVERYTHING, LIKE, NOTE
from tests.simulation.fault_schedule import (
    Commit,
    Forgery,
    HostingStatus,
    Join,
    Migrate,
    RotateKey,
    Schedule,
    SetStatus,
    Value,
    Write,
)
from tests.simulation.simulated_world import RECORD_EVENTS, UNSEEN, World
from tests.soak.resource_use import report_interpreter
from tests.waiting import until

ACCOUNTS, RECORDS = 40, 40
"""The accounts that are not deleted, and the records of each of them."""
LARGE = 3_000
"""The records of one more account, whose export needs a file."""
HOSTS = 3
RELAYS = 2
DAEMONS = 2
RELAY_MESSAGES = 20_000
"""Messages that a relay still has."""
REPLACE, ROTATE, MIGRATE, CHANGE_STATUS = 0.01, 0.002, 0.002, 0.004
"""Probabilities of account events. All other steps are commits."""
UPDATE = 0.5
"""Probability of an update in a commit."""
LARGE_REPLACED = 10
"""Records that a commit of the large account replaces, so that none of them becomes old.

Postgres removes a page of an index only when it is empty. The index of records by collection and time is as large as
the pages that were written in the lifetime of the oldest record. With one record in each commit, that is 102 minutes.
"""
HIDDEN: tuple[HostingStatus, ...] = ("deactivated", "takendown", "suspended")
MAX_HIDDEN = 4
AHEAD = 60_000_000
"""Microseconds by which a forged rev is ahead, so that no commit of the account is newer. The daemon accepts 300 s."""
WAIT_SECONDS = 5.0
"""Interval at which waits of repos and identities end."""
FORGOTTEN_BY_NETWORK_SECONDS = 300.0
"""Time after which a deleted account may vanish from the network, as soon as it has vanished from the database."""
_FORGET_EVENTS = """
    delete from simulation.state
    where status = 'synchronized' and number < (select max(number) from simulation.state) - 1000;
    delete from simulation.rejection where number < (select max(number) from simulation.rejection) - 1000;
    delete from indexer.dead_letter where id < (select max(id) from indexer.dead_letter) - 20;
    delete from indexer.gap where closed_at is not null and id < (select max(id) from indexer.gap) - 20;
"""
"""Forgets events that no fault asks for. The daemon keeps a thousand dead letters of a reason, and gaps."""
SETTINGS = {
    "INDEXER_CHANGE_BYTES": "4000000",
    "INDEXER_DELETION_GRACE": "10s",
}
TUNING = replace(
    Tuning(),
    timeouts=Timeouts(rate_grace=2.0),  # with the usual 30 s, an export is complete before it is ended as a slow one
    host_pauses=HostPauses(maximum=30.0, max_configured=30.0),
    max_identities=50,
    maintenance=MaintenanceSettings(forget_after=30.0, search_interval=30.0),
    garbage_interval=60.0,
)
"""A daemon forgets after minutes what it stores for a day or longer, so that sizes reach their limits."""


def prepare_process() -> None:
    os.setpgrp()  # Ctrl-C in a terminal is for the soak only
    report_interpreter()


class SoakWorld(World):
    """The world. It has two daemons, each with half of the accounts. `daemon` is the one that faults may kill.

    Attributes:
        steady: The daemon that is never killed.
        steady_directory: The data directory of `steady`.
        reserved: Accounts to which a fault happens, and therefore nothing else but commits.
        commits: How many commits the accounts have made.
        replaced: How many accounts were deleted and created.
    """

    def __init__(self, dsn: str, directory: Path, seed: int, *, links: bool) -> None:
        """Create it. With `links`, the daemons keep links."""
        super().__init__(Schedule(seed, HOSTS, RELAYS, "all", EVERYTHING, (), ()), dsn, directory)
        self.steady_directory = directory / "steady"
        self._links = links
        self.reserved: set[str] = set()
        self.commits = self.replaced = 0
        self.random = Random(seed)
        self._numbers = count()
        self._deleted: dict[str, float] = {}
        self._killed_directory = directory / "killed"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the network and the daemons during the block."""
        async with AsyncExitStack() as stack:
            self.sql = await self.connect()
            stack.push_async_callback(self.sql.close)
            await self.sql.execute(RECORD_EVENTS)
            for server in self.servers():
                await server.start()
                stack.push_async_callback(server.stop)
            await stack.enter_async_context(self.proxy.serve())
            await stack.enter_async_context(running(expire_waits(self.dsn, WAIT_SECONDS, UNSEEN)))
            for records in (LARGE, *(RECORDS for _ in range(ACCOUNTS))):
                self._join(records)
            self.steady = self._make_daemon(0, self.steady_directory)
            self.daemon = self._make_daemon(1, self._killed_directory)
            for daemon in (self.steady, self.daemon):
                await stack.enter_async_context(daemon.supervised())
            yield

    @property
    def large(self) -> FaultyAccount:
        """An account whose export needs a file. Nothing but commits happens to it."""
        return next(iter(self.accounts.values()))

    async def act(self, rate: float) -> None:
        """Let the accounts act for ever, `rate` times per second. Time in which this process cannot run is lost."""
        due = monotonic()
        while True:
            self._step()
            due = max(due + 1 / rate, monotonic())
            await asyncio.sleep(due - monotonic())

    async def forget(self) -> None:
        """Let the network forget old messages, and deleted accounts that the database has forgotten, for ever."""
        connection = await self.connect()
        try:
            while True:
                await asyncio.sleep(10.0)
                for relay in self.relays:
                    relay.forget_messages(RELAY_MESSAGES)
                await self._forget_accounts(connection)
                await connection.execute(_FORGET_EVENTS)
        finally:
            connection.terminate()

    def commit(self, account: FaultyAccount) -> None:
        """Let an account make a commit that does not change its number of records."""
        self._write(account.did, self._writes(account))

    def rotate_key(self, account: FaultyAccount) -> None:
        """Let an account get a new signing key."""
        self.perform(RotateKey(_now(), account.did))

    def active(self) -> list[FaultyAccount]:
        """Return the accounts that are active, without the large one."""
        return [account for account in self.accounts.values() if account.status is None][1:]

    def free(self) -> list[FaultyAccount]:
        """Return the accounts that are active and to which no fault happens, without the large one."""
        return [account for account in self.active() if account.did not in self.reserved]

    def forgery_time(self, _fault: Forgery) -> int:
        """Return a time after that of each commit, however long the account was not quiet."""
        return _now() + AHEAD

    async def kill(self) -> None:
        """Kill the daemon. Its leases expire, and its connections end, when they do so by themselves."""
        self.daemon.kill()

    async def caught_up(self) -> None:
        """Wait until both daemons have written what the relay has sent before this call."""
        sent = {relay.websocket_url: relay.newest for relay in self.relays}

        async def written() -> bool:
            cursors = await self.sql.fetch("select relay, shard, seq from indexer.cursor")
            return len({shard for relay, shard, seq in cursors if seq >= sent[relay]}) == DAEMONS

        await until(written, self.log_tails)

    def log_tails(self) -> str:
        """Return the ends of the logs of both daemons."""
        return f"{self.steady.log_tail()}\n{self.daemon.log_tail()}"

    def _make_daemon(self, number: int, directory: Path) -> DaemonFork:
        directory.mkdir()
        environment = self.environment(self.proxy.dsn) | SETTINGS
        environment |= {"INDEXER_DATA_DIR": str(directory), "INDEXER_SHARD": f"{number}/{DAEMONS}"}
        environment |= {"INDEXER_LINKS": "true"} if self._links else {}
        return DaemonFork(environment, directory, TUNING, prepare_process)

    def _step(self) -> None:
        """Let one account act."""
        chance, free = self.random.random(), self.free()
        if chance < REPLACE and free:
            account = self.random.choice(free)
            self.perform(SetStatus(_now(), account.did, "deleted"))
            self._deleted[account.did] = monotonic()
            self._join(RECORDS)
            self.replaced += 1
        elif chance < REPLACE + ROTATE and free:
            self.rotate_key(self.random.choice(free))
        elif chance < REPLACE + ROTATE + MIGRATE and free:
            account = self.random.choice(free)
            others = [number for number, host in enumerate(self.hosts) if host is not account.pds]
            self.perform(Migrate(_now(), account.did, self.random.choice(others)))
        elif chance < REPLACE + ROTATE + MIGRATE + CHANGE_STATUS and free:
            self._change_status(free)
        else:
            self.commit(self.random.choice([*self.active(), self.large]))

    def _change_status(self, free: Sequence[FaultyAccount]) -> None:
        """Hide an account, or show one if several are hidden."""
        hidden = [account for account in self.accounts.values() if account.status not in (None, "deleted")]
        if len(hidden) < MAX_HIDDEN:
            status = self.random.choice(HIDDEN)
            self.perform(SetStatus(_now(), self.random.choice(free).did, status))
        else:
            self.perform(SetStatus(_now(), self.random.choice(hidden).did, None))

    def _join(self, records: int) -> FaultyAccount:
        """Create an account with this number of records."""
        handle = f"{self.random.randbytes(15).hex()}.test"
        did = did_of(handle)
        self.perform(Join(_now(), did, handle, self.random.randrange(HOSTS), self.random.choice(("k256", "p256"))))
        account = self.accounts[did]
        for start in range(0, records, 100):
            self._write(did, [self._create(account) for _ in range(min(records - start, 100))])
        return account

    def _write(self, did: str, writes: Sequence[Write]) -> None:
        self.perform(Commit(_now(), did, tuple(writes)))
        self.commits += 1

    def _writes(self, account: FaultyAccount) -> list[Write]:
        """Return creates, the deletions of as many of the oldest records, and perhaps an update.

        If any record were deleted, a few old ones would keep the pages of an index in use for hours.
        """
        replaced = LARGE_REPLACED if account is self.large else 1
        paths = list(account.records)
        writes = [self._create(account) for _ in range(replaced)]
        writes += [Write("delete", path) for path in paths[:replaced]]
        if self.random.random() < UPDATE:
            path = self.random.choice(paths[replaced:])
            writes.append(Write("update", path, self._value(account, path.partition("/")[0])))
        return writes

    def _create(self, account: FaultyAccount) -> Write:
        collection = self.random.choice((NOTE, LIKE, DRAFT))
        return Write("create", f"{collection}/r{next(self._numbers)}", self._value(account, collection))

    def _value(self, account: FaultyAccount, collection: str) -> Value:
        """Return a record with a link. Records of the large account stay long, so they do not link to others."""
        subject = account.did if account is self.large else self.random.choice(list(self.accounts))
        text = self.random.randbytes(self.random.randrange(200)).hex()
        return {"$type": collection, "text": text, "subject": f"at://{subject}/{NOTE}/r0"}

    async def _forget_accounts(self, connection: asyncpg.Connection) -> None:
        before = monotonic() - FORGOTTEN_BY_NETWORK_SECONDS
        old = [did for did, since in self._deleted.items() if since < before]
        stored = await connection.fetch("select did from indexer.repo where did = any($1)", old)
        for did in set(old) - {did for (did,) in stored}:
            del self._deleted[did], self.accounts[did]
            self.plc.forget(did)
            for host in self.hosts:
                host.hosted.pop(did, None)
            for relay in self.relays:
                relay.forget_account(did)


def _now() -> int:
    """Return the time in microseconds since 1970."""
    return time_ns() // 1_000
