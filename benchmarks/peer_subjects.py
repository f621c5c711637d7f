"""The programs that `benchmarks.peers` compares: each runs on the same network, and is asked the same questions."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks import cpu_usage, database_rows, harness, tap
from benchmarks.harness import DaemonProcess, DatabaseServer, LoadProcess
from benchmarks.peer_results import find_differences, truth_of
from benchmarks.tap import Fetch, TapProcess, open_database
from benchmarks.workload import Workload
from indexer.db import Database

_TAP_TABLES = {"record": "repo_records", "repo": "repos"}
_INDEXER_TABLES = {"record": "indexer.record", "repo": "indexer.repo", "change": "indexer.change"}
UNLIMITED = 100_000
"""Requests per second or at the same time. tap has no limits per host, which would be the whole network here."""


@dataclass(frozen=True, slots=True)
class World:
    """The network of one measurement: the same for each program.

    Attributes:
        workload: The workload.
        relay: The relay.
        hosts: The PDSes and the directory.
        directory: A directory of this measurement.
    """

    workload: Workload
    relay: LoadProcess
    hosts: LoadProcess
    directory: Path

    @property
    def dids(self) -> list[str]:
        """The DIDs of all accounts."""
        return [account.did for account in self.workload.accounts]


class Subject(Protocol):
    """A program that synchronizes repos, with its database."""

    @property
    def database(self) -> DatabaseServer | None:
        """Its Postgres; None if it uses SQLite."""

    @property
    def program_pids(self) -> list[int]:
        """Its processes."""

    @property
    def consumer_pids(self) -> list[int]:
        """The processes that consume its events, if it needs any."""

    async def start(self) -> None:
        """Begin to synchronize all repos."""

    async def unclaimed(self) -> int:
        """Return the number of repos whose first synchronization has not begun."""

    async def unfinished(self) -> int:
        """Return the number of repos that are not synchronized."""

    async def revs(self, did: str | None = None) -> dict[str, str]:
        """Return the rev of each repo, or of one of them."""

    async def wait_for_events(self, count: int) -> float | None:
        """Wait until the consumer has that many record events; return when (monotonic), None without a consumer."""

    async def differences(self) -> list[str]:
        """Return the differences between what it stored or sent and the expected result, as sentences."""

    async def sizes(self) -> dict[str, float]:
        """Return the bytes on disk, with indexes, for each `record`, `repo` and `change` that it stores in Postgres."""

    async def stop(self) -> None:
        """Stop it."""

    def raise_if_ended(self) -> None:
        """Raise `BenchmarkError` if one of its processes has ended."""


def exported_records(workload: Workload) -> int:
    """Return the number of records in all exports."""
    records = sum(account.records for account in workload.accounts)
    changes = _changes_by_commits(workload)
    return records - changes["create"] + changes["delete"]


def expected_changes(workload: Workload) -> Counter[str]:
    """Return the number of changes by action, from nothing to the exports, and then by the commits."""
    return Counter(create=exported_records(workload)) + _changes_by_commits(workload)


def _changes_by_commits(workload: Workload) -> Counter[str]:
    accounts = [account for account in workload.accounts if account.commits]
    return sum((Counter(account.changes) for account in accounts), Counter[str]())


@dataclass(frozen=True, slots=True)
class TapSubject:
    """tap with its consumer."""

    world: World
    tap: TapProcess
    fetch: Fetch
    database: DatabaseServer | None

    @property
    def program_pids(self) -> list[int]:  # noqa: D102 - see Subject
        return [self.tap.process.pid]

    @property
    def consumer_pids(self) -> list[int]:  # noqa: D102
        return [self.tap.consumer.process.pid]

    async def start(self) -> None:  # noqa: D102
        await self.tap.add_repos(self.world.dids)

    async def unclaimed(self) -> int:  # noqa: D102
        [(count,)] = await self.fetch("select count(*) from repos where state = 'pending'")
        return int(count)

    async def unfinished(self) -> int:  # noqa: D102
        [(count,)] = await self.fetch("select count(*) from repos where state <> 'active'")
        return int(count)

    async def revs(self, did: str | None = None) -> dict[str, str]:  # noqa: D102
        return dict(await self.fetch("select did, rev from repos" + _where(did)))

    async def wait_for_events(self, count: int) -> float | None:  # noqa: D102
        return await self.tap.wait_for_events(count)

    async def differences(self) -> list[str]:  # noqa: D102
        truth = truth_of(self.world.workload)
        stored = await tap.results_of_tables(self.fetch)
        with self.tap.events.open("rb") as events:
            sent = tap.results_of_events(events)
        return [
            *find_differences(truth, stored, "the tables of tap"),
            *find_differences(truth, sent, "the events of tap"),
        ]

    async def sizes(self) -> dict[str, float]:  # noqa: D102
        if self.database is None:
            return {}
        return {row: await _bytes_per_row(self.fetch, table) for row, table in _TAP_TABLES.items()}

    async def stop(self) -> None:  # noqa: D102
        await self.tap.stop()

    def raise_if_ended(self) -> None:  # noqa: D102
        self.tap.raise_if_ended()


@dataclass(frozen=True, slots=True)
class IndexerSubject:
    """One or more daemons of the indexer. Its readers query the database, so it has no consumer."""

    world: World
    daemons: Sequence[DaemonProcess]
    fetch: Fetch
    database: DatabaseServer

    @property
    def program_pids(self) -> list[int]:  # noqa: D102 - see Subject
        return [daemon.process.pid for daemon in self.daemons]

    @property
    def consumer_pids(self) -> list[int]:  # noqa: D102
        return []

    async def start(self) -> None:  # noqa: D102
        await database_rows.make_due(self.database.dsn, self.world.dids)

    async def unclaimed(self) -> int:  # noqa: D102
        [(count,)] = await self.fetch("select count(*) from indexer.repo where sync_status = 'desynchronized'")
        return int(count)

    async def unfinished(self) -> int:  # noqa: D102
        [(count,)] = await self.fetch("select count(*) from indexer.repo where sync_status <> 'synchronized'")
        return int(count)

    async def revs(self, did: str | None = None) -> dict[str, str]:  # noqa: D102
        return dict(await self.fetch("select did, rev from indexer.repo" + _where(did)))

    async def wait_for_events(self, count: int) -> float | None:  # noqa: ARG002, D102
        return None

    async def differences(self) -> list[str]:  # noqa: D102
        workload = self.world.workload
        found = await database_rows.find_differences(self.database.dsn, workload, expected_changes(workload))
        return [f"the database of the indexer: {difference}" for difference in found]

    async def sizes(self) -> dict[str, float]:  # noqa: D102
        return {row: await _bytes_per_row(self.fetch, table) for row, table in _INDEXER_TABLES.items()}

    async def stop(self) -> None:  # noqa: D102
        for daemon in self.daemons:
            await daemon.stop()

    def raise_if_ended(self) -> None:  # noqa: D102
        for daemon in self.daemons:
            daemon.raise_if_ended()


async def _bytes_per_row(fetch: Fetch, table: str) -> float:
    """Return the size of a table with its partitions, indexes and TOAST table, divided by the number of its rows."""
    parts = f"(select sum(pg_total_relation_size(relid)) from pg_partition_tree('{table}'))"
    sizes = f"select coalesce({parts}, pg_total_relation_size('{table}'))::float, (select count(*) from {table})"
    [(size, count)] = await fetch(sizes)
    return float(size / count)


def _where(did: str | None) -> str:
    return f" where did = '{did}'" if did else ""  # the DIDs of a workload have no quotes


@asynccontextmanager
async def run_tap_subject(program: Path, world: World, *, postgres: bool) -> AsyncIterator[Subject]:
    """Run tap on an empty Postgres, or on SQLite, which is its default."""
    async with AsyncExitStack() as stack:
        database, url = None, f"sqlite://{world.directory / 'tap.db'}"
        if postgres:
            database = await stack.enter_async_context(harness.empty_database(world.directory))
            url = database.dsn
        settings = {"relay_url": world.relay.url.replace("ws://", "http://"), "plc_url": world.hosts.url}
        running = await stack.enter_async_context(tap.run_tap(program, world.directory, url, **settings))
        fetch = await stack.enter_async_context(open_database(url))
        await world.relay.wait_for_subscribers(1)
        yield TapSubject(world, running, fetch, database)


@asynccontextmanager
async def run_indexer_subject(world: World, shards: int) -> AsyncIterator[Subject]:
    """Run this number of daemons on an empty database, in which all repos wait for their first resync."""
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(harness.database(world.directory))
        db = await Database.open(database.dsn)
        await db.repos.add(world.dids)
        await db.close()
        await database_rows.postpone_resyncs(database.dsn)
        daemons = [
            await stack.enter_async_context(
                harness.daemon(
                    database.dsn,
                    world.directory / f"daemon {index}",
                    roles="live,resync",
                    shard=f"{index}/{shards}",
                    start="oldest",
                    relays=world.relay.url,
                    plc_url=world.hosts.url,
                    plc_lookup="document",
                    resync_source="pds",
                    **dict.fromkeys(("plc_rate", "host_rate", "host_concurrency", "outbound_rate"), UNLIMITED),
                )
            )
            for index in range(shards)
        ]
        fetch = await stack.enter_async_context(open_database(database.dsn))
        await world.relay.wait_for_subscribers(shards)
        await asyncio.gather(*(daemon.wait_until_counted() for daemon in daemons))
        yield IndexerSubject(world, daemons, fetch, database)


def cpu_of_parts(subject: Subject, world: World) -> dict[str, float]:
    """Return the CPU seconds of each part until now."""
    parts = {
        "program": subject.program_pids,
        "Postgres": subject.database.pids if subject.database else [],
        "consumer": subject.consumer_pids,
        "load": [world.relay.process.pid, world.hosts.process.pid],
    }
    return {part: cpu_usage.cpu_seconds(pids) for part, pids in parts.items() if pids}
