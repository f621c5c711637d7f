"""A network on loopback that acts as a schedule says, and the daemon that indexes it."""

import asyncio
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import md5
from pathlib import Path

import asyncpg

from indexer.demo import local_repo
from indexer.demo.http_server import HttpServer
from indexer.demo.local_repo import TidClock
from indexer.net.http.http_client import host_of
from tests.background import running
from tests.daemon_forks import DaemonFork
from tests.database_proxy import DatabaseProxy
from tests.faulty_network import FaultyAccount
from tests.passed_time import EXPIRE_LEASES, expire_waits
from tests.simulation.event_counts import event_counts
from tests.simulation.fault_schedule import (
    Action,
    Commit,
    Fault,
    Forgery,
    Join,
    Migrate,
    RestartedSequence,
    RotateKey,
    Schedule,
    SetStatus,
    UnreachableDatabase,
    Write,
)
from tests.simulation.quick_daemon import SILENT_RELAYS, TUNING
from tests.simulation.recording_servers import CountingPds, HangingPlc, RecordingRelay
from tests.waiting import until

Condition = Callable[[], Awaitable[bool] | bool]

FIRST_SEQ = 10_000
"""The sequence of relay n begins after n + 1 times this number."""

OBSERVER = "simulation"
"""The application name of connections that only look at the database."""
UNSEEN = {"application_name": OBSERVER, "session_replication_role": "replica"}
"""The settings of a session whose writes fire no trigger."""

RECORD_EVENTS = """
    create schema simulation;
    create table simulation.state (
        number bigint generated always as identity, did text, status text, reason text, error text, scope bigint
    );
    create function simulation.record_state() returns trigger language plpgsql as $$
    begin
        insert into simulation.state (did, status, reason, error, scope)
        select new.did, new.sync_status, new.sync_reason, new.last_failure, (select version from indexer.scope);
        return null;
    end $$;
    create trigger record_state after insert or update on indexer.repo
    for each row execute function simulation.record_state();

    create table simulation.rejection (number bigint generated always as identity, frame text);
    create function simulation.record_rejection() returns trigger language plpgsql as $$
    begin
        insert into simulation.rejection (frame) values (md5(new.frame));
        return null;
    end $$;
    create trigger record_rejection after insert on indexer.dead_letter
    for each row execute function simulation.record_rejection();
"""
"""Lets the database record each state of each repo, and the hash of each rejected frame."""
_RECORD_MOMENTS = """
    create table simulation.moment (
        number bigint generated always as identity, xid xid8 primary key, gaps bigint, cursors jsonb, revs jsonb
    );
    create function simulation.record_moment() returns trigger language plpgsql as $$
    begin
        if not exists (select from simulation.moment where xid = pg_current_xact_id()) then
            insert into simulation.moment (xid, gaps, cursors, revs) select
                pg_current_xact_id(),
                (select count(*) from indexer.gap where closed_at is null),
                (select jsonb_object_agg(relay, seq) from indexer.cursor),
                (select jsonb_object_agg(did, rev) from indexer.repo where sync_status = 'synchronized' and active);
        end if;
        return null;
    end $$;
    create constraint trigger record_moment after insert or update on indexer.cursor deferrable initially deferred
    for each row execute function simulation.record_moment();
    create constraint trigger record_moment after insert or update on indexer.gap deferrable initially deferred
    for each row execute function simulation.record_moment();
    create constraint trigger record_moment after insert or update on indexer.repo deferrable initially deferred
    for each row execute function simulation.record_moment();
"""
_QUIET = """
    select did, sync_status = 'synchronized'
        and scope_version >= (select max(version) from unnest(added_in) version)
        and not exists (select from indexer.gap where closed_at is null) as quiet
    from indexer.repo, indexer.scope where active and next_attempt_at is distinct from 'infinity'
"""
_FAILING = "select from indexer.host where host = $1 and consecutive_failures > 0"
_DESYNCHRONIZED = "select count(*) from simulation.state where did = any($1) and status <> 'synchronized'"
_REJECTED = "select from simulation.rejection where frame = any($1::text[])"
_FAILED = "select from simulation.state where did = any($1::text[]) and error = $2"
_BACKENDS = """
    select count(*) from pg_stat_activity
    where datname = current_database() and backend_type = 'client backend' and application_name <> $1
"""


class World:
    """The network, the daemon and its database.

    Attributes:
        plc: The directory.
        hosts: The PDSes.
        relays: The relays; each one receives the events of all hosts.
        accounts: The accounts by DID.
        proxy: Between the daemon and its database, if the schedule needs it.
        daemon: The daemon.
        fired: How often each fault of the schedule happened.
        key_revs: The rev of the first commit with the present key, by DID, of accounts whose key has changed.
        garbage: How many faults of the schedule have sent messages that are no frames, each with messages of its own.
        unfinished: Faults that have ended, whose effect is still to be seen, with the condition that shows it.
    """

    def __init__(self, schedule: Schedule, dsn: str, directory: Path) -> None:
        self.schedule = schedule
        self.dsn = dsn
        self.directory = directory
        self.plc = HangingPlc()
        self.hosts = [CountingPds() for _ in range(schedule.hosts)]
        self.relays = [RecordingRelay(self.plc, first_seq=(n + 1) * FIRST_SEQ) for n in range(schedule.relays)]
        for host in self.hosts:
            for relay in self.relays:
                relay.follow(host)
        self.accounts: dict[str, FaultyAccount] = {}
        self.proxy = DatabaseProxy(dsn)
        self.fired: Counter[Fault] = Counter()
        self.key_revs: dict[str, str] = {}
        self.garbage = 0
        self.unfinished: list[tuple[Fault, Condition]] = []
        self._now = 0
        self._clock = TidClock(lambda: self._now)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the network and the daemon during the block."""
        async with AsyncExitStack() as stack:
            self.sql = await self.connect()
            stack.push_async_callback(self.sql.close)
            await self.sql.execute(RECORD_EVENTS + _RECORD_MOMENTS)
            for server in self.servers():
                await server.start()
                stack.push_async_callback(server.stop)
            dsn = self.dsn
            if any(isinstance(fault, UnreachableDatabase) for fault in self.schedule.faults):
                await stack.enter_async_context(self.proxy.serve())
                dsn = self.proxy.dsn
            silent = any(isinstance(fault, RestartedSequence) and not fault.announced for fault in self.schedule.faults)
            self.daemon = DaemonFork(self.environment(dsn), self.directory, SILENT_RELAYS if silent else TUNING)
            await stack.enter_async_context(running(expire_waits(self.dsn, settings=UNSEEN)))
            await stack.enter_async_context(self.daemon.supervised())
            yield

    async def connect(self) -> asyncpg.Connection:
        """Open a connection to the database that is not one of the daemon."""
        return await asyncpg.connect(self.dsn, server_settings={"application_name": OBSERVER})

    async def perform_all(self, actions: Iterable[Action]) -> None:
        """Let the accounts act."""
        for action in actions:
            self.perform(action)
            await asyncio.sleep(0)

    async def finish_faults(self) -> None:
        """Wait until the effect of each fault has been seen."""
        for fault, has_fired in reversed(self.unfinished):  # one that ended later may be in the way of the others
            await until(has_fired, lambda fault=fault: f"{fault} has no effect: {self.daemon.log_tail()}")  # type: ignore[misc]
            self.fired[fault] += 1
        self.unfinished.clear()

    def forgery_time(self, fault: Forgery) -> int:
        """Return the time of the rev of a forged message that is sent now, in microseconds since 1970."""
        return fault.time

    def fetched(self) -> Counter[str]:
        """Return how often the repo of each account was requested from the hosts."""
        return sum((host.fetched for host in self.hosts), Counter[str]())

    @property
    def relay(self) -> RecordingRelay | None:
        """A relay that the daemon is connected to; the only one, unless the daemon follows all of them."""
        return next((relay for relay in self.relays if relay.subscribers), None)

    async def caught_up(self) -> None:
        """Wait until the daemon has written everything that its relays have sent."""
        await until(self._is_caught_up, self.daemon.log_tail)

    async def received(self) -> int:
        """Return how many messages the present process of the daemon has received."""
        received, _ = await event_counts(self.daemon)
        return received.total()

    async def kill(self) -> None:
        """Kill the daemon, and wait until the database knows."""
        self.daemon.kill()
        await self.forget_daemon()

    async def forget_daemon(self) -> None:
        """Wait until the database knows that the daemon is dead; let its leases expire."""
        await until(self.has_no_backend)
        await self.sql.execute(EXPIRE_LEASES)

    async def has_no_backend(self) -> bool:
        """Return True if the daemon has no connection to the database."""
        return bool(await self.sql.fetchval(_BACKENDS, OBSERVER) == 0)

    async def has_backends(self) -> bool:
        """Return True if the daemon has a connection to the database."""
        return not await self.has_no_backend()

    async def read_host_lists(self) -> Mapping[str, int]:
        """Let a command read the lists of all hosts; return how many accounts of each list no identity proves."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "indexer", "discover", "--hosts", env=os.environ | self.environment(self.dsn)
        )
        assert await process.wait() == 0
        rows = await self.sql.fetch("select host, unproven_accounts from atproto.hosts")
        return {row["host"]: row["unproven_accounts"] for row in rows}

    async def gap_reasons(self, *, after: int = 0) -> set[str]:
        """Return the reasons of all gaps after this number."""
        return {reason for (reason,) in await self.sql.fetch("select reason from indexer.gap where id > $1", after)}

    async def latest_gap(self) -> int:
        """Return the number of the latest gap; 0 if there was none."""
        return int(await self.sql.fetchval("select coalesce(max(id), 0) from indexer.gap"))

    async def scope_version(self) -> int:
        """Return the version of the stored scope."""
        return int(await self.sql.fetchval("select version from indexer.scope"))

    async def is_quiet(self, did: str) -> bool:
        """Return True if the repo is synchronized, and if nothing that has happened so far will fetch it."""
        return (await self._quiet())[did]

    async def all_quiet(self) -> bool:
        """Return True if all active repos are quiet or parked."""
        return all((await self._quiet()).values())

    async def directory_is_asked(self) -> bool:
        """Return True if the daemon sends each request to the directory, or has no other one to send.

        After failures, it sends one request at a time until one succeeds, and refuses the others.
        """
        return not await self.sql.fetch(_FAILING, host_of(self.plc.url)) or await self.all_quiet()

    async def desynchronized(self, dids: Iterable[str]) -> int:
        """Return how often these repos have been written in another state than `synchronized`."""
        return int(await self.sql.fetchval(_DESYNCHRONIZED, list(dids)))

    async def has_failed(self, reason: str, dids: Sequence[str]) -> bool:
        """Return True if a fetch of one of these repos has failed for this reason."""
        return bool(await self.sql.fetch(_FAILED, dids, reason))

    async def has_rejected(self, frames: Sequence[bytes]) -> bool:
        """Return True if there was a dead letter with one of these frames."""
        return bool(
            await self.sql.fetch(_REJECTED, [md5(frame, usedforsecurity=False).hexdigest() for frame in frames])
        )

    async def gaps_are_closed(self) -> bool:
        """Return True if no gap is open."""
        return not await self.sql.fetch("select from atproto.gaps where closed_at is null")

    async def _quiet(self) -> dict[str, bool]:
        return {row["did"]: row["quiet"] for row in await self.sql.fetch(_QUIET)}

    async def _is_caught_up(self) -> bool:
        followed = self.relays if self.schedule.mode == "all" else [self.relay]
        return all([relay is not None and await self._has_all_of(relay) for relay in followed])

    async def _has_all_of(self, relay: RecordingRelay) -> bool:
        seq = await self.sql.fetchval("select seq from indexer.cursor where relay = $1", relay.websocket_url)
        return seq is not None and relay.sequence_of(seq) == len(relay.ended) and seq >= relay.newest

    def perform(self, action: Action) -> None:
        """Let an account act."""
        self._now = action.time
        if isinstance(action, Join):
            self.accounts[action.did] = FaultyAccount(
                action.handle, curve=action.curve, pds=self.hosts[action.host], plc=self.plc, clock=self._clock
            )
            return
        account = self.accounts[action.did]
        match action:
            case Commit():
                account.apply_writes([_write(write) for write in action.writes])
            case RotateKey():
                account.rotate_key()
                self.key_revs[action.did] = account.rev
            case Migrate():
                account.migrate(self.hosts[action.host])
                self.key_revs[action.did] = account.rev
            case SetStatus():
                _set_status(account, action)

    def servers(self) -> list[HttpServer]:
        """Return all servers of the network."""
        return [self.plc, *self.hosts, *self.relays]

    def environment(self, dsn: str) -> dict[str, str]:
        """Return the environment of a daemon with this database."""
        return {
            "INDEXER_DATABASE_URL": dsn,
            "INDEXER_DATA_DIR": str(self.directory),
            "INDEXER_RELAYS": ",".join(relay.websocket_url for relay in self.relays),
            "INDEXER_HOST_STREAMS": "0",
            "INDEXER_RELAY_MODE": self.schedule.mode,
            "INDEXER_PLC_URL": self.plc.url,
            "INDEXER_START": "oldest",
            "INDEXER_COLLECTIONS": ",".join(self.schedule.collections),
            "INDEXER_ALLOW_PRIVATE_HOSTS": "true",
            "INDEXER_PLC_RATE": "1000",
            "INDEXER_HANDLE_RATE": "0",
            "INDEXER_DELETION_GRACE": "1s",
            "INDEXER_HOST_RATE": "1000",
            "INDEXER_OUTBOUND_RATE": "1000",
            "INDEXER_HTTP_BIND": "127.0.0.1:0",
            "INDEXER_LOG_FORMAT": "json",
        }


def _write(write: Write) -> local_repo.Write:
    if write.value is None:
        return local_repo.Write.delete(write.path)
    make = local_repo.Write.create if write.action == "create" else local_repo.Write.update
    return make(write.path, write.value)


def _set_status(account: FaultyAccount, action: SetStatus) -> None:
    match action.status:
        case None:
            account.activate()
        case "deactivated":
            account.deactivate()
        case "takendown":
            account.set_status("takendown")
        case "suspended":
            account.set_status("suspended")
        case "deleted":
            account.delete_account()
