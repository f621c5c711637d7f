"""Run a world of constant size for some time, sample what the daemon uses, and check both at the end."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import asyncpg
import httpx

from indexer.atproto.cid import cid_of, cid_text
from tests import waiting
from tests.background import running
from tests.database_checks import apply_strictly
from tests.simulation.drawn_world import EVERYTHING
from tests.simulation.event_counts import wait_until_settled
from tests.simulation.simulated_world import OBSERVER
from tests.simulation.world_checks import Snapshot
from tests.soak.growth_check import Trend, fit_trends
from tests.soak.resource_use import (
    DATABASE_LIMITS,
    PROCESS_LIMITS,
    Sample,
    database_sample,
    limits_of,
    metrics_sample,
    process_sample,
)
from tests.soak.soak_faults import SoakFaults
from tests.soak.soak_world import SoakWorld
from tests.waiting import until

TIME = "seconds"
CONSUMER = "soak"
REPORT_SECONDS = 60.0
ALWAYS_SAMPLED = PROCESS_LIMITS.keys() | DATABASE_LIMITS.keys()
COMPARE_SECONDS = 1.0
SAMPLE_SECONDS = 10.0
READ_SECONDS = 1.0

_NEXT = "select did, collection, rkey, action, cid from atproto.next_changes($1, 10000) order by seq"
_STORED = "select did, collection, rkey, atproto.cid_text(cid) from indexer.record"
_UNSETTLED = """
    select (select count(*) from indexer.buffered_event) + (select count(*) from indexer.unnumbered_batch)
        + (select count(*) from indexer.repo where sync_status = 'in-progress')
"""


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """The settings of a soak; times are seconds.

    Attributes:
        duration: The whole time, without that of the checks at the end.
        warm_up: The time at the beginning whose samples do not count.
        rate: Commits per second.
        seed: Of everything that is drawn.
        links: True to keep links.
    """

    duration: float
    warm_up: float
    rate: float
    seed: int
    links: bool


@dataclass(slots=True)
class SoakResult:
    """The result of a soak.

    Attributes:
        seconds: How long it took, without the checks at the end.
        commits: Commits of the accounts.
        replaced: Accounts that were deleted, and created.
        changes: Changes that the consumer has read.
        fired: How often each kind of fault has happened.
        trends: The growth of each quantity after the warm-up; none if the soak ended before.
        differences: Differences of the database and the change log from the world at the end.
    """

    seconds: float
    commits: int
    replaced: int
    changes: int
    fired: Mapping[str, int]
    trends: list[Trend]
    differences: list[str]

    @property
    def growing(self) -> list[Trend]:
        """The quantities that grow."""
        return [trend for trend in self.trends if not trend.is_flat]


class LogReader:
    """A consumer that applies the entries of the change log, in their order.

    Attributes:
        records: The records after all entries that were read.
        changes: How many entries were read.
    """

    def __init__(self, connection: asyncpg.Connection) -> None:
        self.records: dict[tuple[str, str, str], str] = {}
        self.changes = 0
        self._connection = connection

    async def register(self) -> None:
        """Register the consumer, at the beginning of the log."""
        await self._connection.execute("select atproto.register_reader($1, 0)", CONSUMER)

    async def follow(self, stop: asyncio.Event, interval: float) -> None:
        """Read until `stop` is set."""
        while not stop.is_set():
            await self.read()
            await asyncio.sleep(interval)

    async def read(self) -> None:
        """Read all entries that are new; fail if one does not fit the records."""
        while page := await self._connection.fetch(_NEXT, CONSUMER):
            apply_strictly([row for row in page if row["rkey"] is not None], self.records)
            self.changes += len(page)


class Sampler:
    """Samples the use of resources, and writes the samples to a file, one JSON object per line.

    Attributes:
        samples: The samples.
    """

    def __init__(self, world: SoakWorld, connection: asyncpg.Connection, client: httpx.AsyncClient, file: Path) -> None:
        self.samples: list[Sample] = []
        self._world = world
        self._connection = connection
        self._client = client
        self._health_url = world.steady.health_url()
        self._file = file
        self._began = monotonic()
        self._pid = world.steady.pid

    @property
    def seconds(self) -> float:
        """The time since the beginning."""
        return monotonic() - self._began

    async def follow(self, stop: asyncio.Event, interval: float) -> None:
        """Sample until `stop` is set."""
        while not stop.is_set():
            await self.sample()
            await asyncio.sleep(interval)

    async def sample(self) -> None:
        """Take a sample."""
        assert self._world.steady.pid == self._pid, f"the daemon has ended: {self._world.steady.log_tail()}"
        sample = {TIME: self.seconds, "commits": float(self._world.commits)}
        sample |= process_sample(self._pid, self._world.steady_directory)
        sample |= await metrics_sample(self._client, self._health_url)
        sample |= await database_sample(self._connection, OBSERVER)
        self.samples.append(sample)
        with self._file.open("a") as file:
            file.write(json.dumps(sample) + "\n")


def trends_of(samples: Sequence[Sample], warm_up: float) -> list[Trend]:
    """Return the trends after the warm-up; none if there are fewer than three samples."""
    counted = [sample for sample in samples if sample[TIME] >= warm_up]
    return fit_trends(counted, limits_of(counted[-1]), TIME) if len(counted) > 2 else []


def missing_quantities(samples: Sequence[Sample], warm_up: float) -> list[str]:
    """Return what a sample after the warm-up lacks. It would count as 0, which is flat."""
    missing = {name for sample in samples if sample[TIME] >= warm_up for name in ALWAYS_SAMPLED - sample.keys()}
    return [f"{name} was not always sampled" for name in sorted(missing)]


async def soak(
    plan: SoakPlan, dsn: str, directory: Path, samples: Path, stop: asyncio.Event, report: Callable[[str], None]
) -> SoakResult:
    """Run a soak on an empty database with the latest schema; end early if `stop` is set."""
    world = SoakWorld(dsn, directory, plan.seed, links=plan.links)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(world.running())
        await world.caught_up()
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=waiting.TIMEOUT))
        sampler = Sampler(world, await stack.enter_async_context(_observer(world)), client, samples)
        reader = LogReader(await stack.enter_async_context(_observer(world)))
        faults = SoakFaults(world)
        await reader.register()
        await stack.enter_async_context(running(world.forget(), _report(plan, world, sampler, faults.fired, report)))
        failures = await _act(plan, world, sampler, reader, faults, stop)
        seconds = sampler.seconds
        report(f"{seconds:.0f} s: the accounts have stopped; waiting until the database equals the world")
        differences = faults.failed + missing_quantities(sampler.samples, plan.warm_up)
        differences += failures or await _check_end(world, reader)
    trends = trends_of(sampler.samples, plan.warm_up)
    return SoakResult(seconds, world.commits, world.replaced, reader.changes, faults.fired, trends, differences)


async def _act(
    plan: SoakPlan, world: SoakWorld, sampler: Sampler, reader: LogReader, faults: SoakFaults, stop: asyncio.Event
) -> list[str]:
    """Let accounts act, with faults, until `stop` is set; return what failed meanwhile."""
    failures: list[str] = []
    try:
        async with running(world.act(plan.rate)), asyncio.TaskGroup() as group:
            group.create_task(_stop_after(plan.duration, stop))
            group.create_task(sampler.follow(stop, SAMPLE_SECONDS))
            group.create_task(reader.follow(stop, READ_SECONDS))
            group.create_task(faults.run(stop))
    except* AssertionError as failed:
        failures += [str(error) for error in failed.exceptions]
    return failures


@asynccontextmanager
async def _observer(world: SoakWorld) -> AsyncIterator[asyncpg.Connection]:
    connection = await world.connect()
    try:
        yield connection
    finally:
        connection.terminate()


async def _stop_after(seconds: float, stop: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        stop.set()


async def _report(
    plan: SoakPlan, world: SoakWorld, sampler: Sampler, fired: Counter[str], report: Callable[[str], None]
) -> None:
    """Report the progress for ever."""
    while True:
        await asyncio.sleep(min(REPORT_SECONDS, plan.duration / 10))
        left = max(plan.duration - sampler.seconds, 0.0)
        growing = [trend.name for trend in trends_of(sampler.samples, plan.warm_up) if not trend.is_flat]
        done = f"{world.commits:,} commits, {fired.total()} faults, above the limit now: {growing or 'nothing'}"
        report(f"{sampler.seconds:.0f} s, {left / 60:.1f} min left: {done}")


async def _check_end(world: SoakWorld, reader: LogReader) -> list[str]:
    """Wait until the database equals the world, and the log that was read equals the records; return what does not.

    The daemon that was never killed must also have counted one outcome for each message.
    """
    await world.sql.execute("select atproto.set_collections($1)", list(EVERYTHING))
    for account in [*world.active(), world.large]:
        world.commit(account)
    found = ["not compared"]

    async def equal() -> bool:
        await asyncio.sleep(COMPARE_SECONDS)
        found[:] = await _differences(world, reader)
        return not found

    try:
        await until(equal, lambda: found)
        await wait_until_settled(world.steady)
    except AssertionError as error:
        return [str(error), world.log_tails()]
    return []


async def _differences(world: SoakWorld, reader: LogReader) -> list[str]:
    snapshot = await Snapshot.take(world.sql)
    found = [f"{snapshot.open_gaps} gaps are open"] if snapshot.open_gaps else []
    if unsettled := await world.sql.fetchval(_UNSETTLED):
        found.append(f"{unsettled} repos or events are not settled")
    for did, account in world.accounts.items():
        row = snapshot.repos.get(did)
        if row is None:
            found += [] if account.status == "deleted" else [f"{did} is unknown"]
        elif (row["active"], row["hosting_status"]) != (account.status is None, account.status):
            found.append(f"{did} is {account.status} in the world, and {dict(row)}")
        elif account.status is None:
            expected = {path: cid_text(cid_of(block)) for path, block in account.records.items()}
            if (row["sync_status"], row["rev"]) != ("synchronized", account.rev) or snapshot.records[did] != expected:
                wrong = len(snapshot.records[did].items() ^ expected.items())
                found.append(f"{did} at {account.rev} is {dict(row)}, with {wrong} wrong records")
    found += [
        f"{did} is visible, but not in the world"
        for did, row in snapshot.repos.items()
        if row["active"] and did not in world.accounts
    ]
    await reader.read()
    stored = {(did, name, rkey): cid for did, name, rkey, cid in await world.sql.fetch(_STORED)}
    if reader.records != stored:
        found.append(f"{len(reader.records.items() ^ stored.items())} records differ from the change log")
    return found
