"""`python -m benchmarks.sparse`: what the records of one collection cost, for different shares of all records.

Resync: the wanted records of large repos with their proof, and whole exports of the same repos. Live: one daemon reads
the firehose, another one the hints of a Jetstream, and fetches each wanted record with its proof. An hour in which no
wanted record is written: a shorter time, scaled, and comparisons of many repos with their hosts.

Bytes are those of HTTP and websockets in both directions, with headers, and without TCP, TLS and compression. All
repos are tracked, and nothing else is in the database.
"""

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass, replace
from multiprocessing import get_context
from operator import add
from pathlib import Path
from time import monotonic, process_time
from typing import NamedTuple, Self, cast

import asyncpg
import click
import orjson
from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks import cpu_usage, harness
from benchmarks.harness import TIMEOUT_SECONDS, BenchmarkError, DaemonProcess, DatabaseServer
from benchmarks.report import console_of, machine, number
from benchmarks.signing_accounts import LIKE, SigningAccount, did_of
from benchmarks.sparse_network import Proxy, SparseNetwork, counted, sparse_network
from indexer.atproto.crypto import parse_did_key
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.syntax import CollectionFilter
from indexer.core.core import CoreChoice, load_core
from indexer.db import Database
from indexer.db.write import ROW_LAYOUT
from indexer.net.http.http_client import OutboundClient, OutboundSettings
from indexer.net.pds.pds_client import PdsClient
from indexer.resync.sparse import SparseChoice, SparseFetch
from indexer.sync.policy import Policy
from indexer.sync.scope import Scope
from indexer.telemetry.log import configure_logging

SHARES = {"com.example.rare": 0.001, "com.example.some": 0.01, "com.example.many": 0.1}
"""The shares of the records, and of the commits, by collection."""
RARE, *_ = SHARES
WAYS: dict[SparseChoice, str] = {"never": "export", "auto": "sparse resync", "always": "sparse, always"}
FIREHOSE, HINTS = "firehose", "hints with proof"
TARGETS = {WAYS["auto"]: 0.03, HINTS: 0.01}
"""The greatest ratios of the bytes for the fewest wanted records: 30 of 50,000, and a thousandth of the commits."""
TARGET_RECORDS = 30
RATE, STRANGERS = 400, 8
"""Commits per second; and `#identity` and `#account` events, of accounts that are not tracked: assumed."""
HOSTS = 4
OTHERS = 3_000
"""Accounts that a host lists before those that are compared."""
HOUR, PASSES = "an hour, none", 2
"""The daemon compares twice within its default interval."""
EMPTY = "empty"
POLL_SECONDS = 0.05
TABLE_WIDTH = 110

_UNFINISHED = """
    select count(*) <> $1 or exists (select from indexer.repo where sync_status <> 'synchronized') from indexer.record
"""
_RECORDS = "select did, collection || '/' || rkey, cid from indexer.record"
_COMPARED = b"repo-checks.done"


class Sizes(NamedTuple):
    """The amount of work.

    Attributes:
        likes: Other records of a repo that is resynchronized.
        repos: Repos on the live path.
        records: Other records of each of these.
        seconds: Time in which commits are sent.
        compared: Repos that are compared with their hosts.
    """

    likes: int = 50_000
    repos: int = 60
    records: int = 5_000
    seconds: int = 15
    compared: int = 1_000


@dataclass(frozen=True, slots=True)
class Spent:
    """Bytes, HTTP requests, and CPU seconds of the program and of its Postgres."""

    bytes: float = 0.0
    requests: float = 0.0
    cpu: float = 0.0
    postgres: float = 0.0

    def __add__(self, other: Self) -> "Spent":
        return Spent(*map(add, astuple(self), astuple(other)))

    def __mul__(self, factor: float) -> "Spent":
        return Spent(*[item * factor for item in astuple(self)])


class Row(NamedTuple):
    """The cost of one wanted record at this share of wanted ones, or of an hour, for one way of getting them."""

    wanted: str
    way: str
    spent: Spent


@click.command()
@click.option("--quick", is_flag=True, help="Use small repos and little time.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(quick: bool, as_json: bool) -> None:
    """Measure what wanted records cost.

    Exit code 1: a target is missed.
    """
    configure_logging(level="warning")
    with tempfile.TemporaryDirectory(prefix="indexer-benchmark-") as directory:
        rows = asyncio.run(measure(Sizes(2_000, 20, 500, 2, 100) if quick else Sizes(), Path(directory)))
    if as_json:
        sys.stdout.buffer.write(orjson.dumps({"costs": rows, "machine": machine()}) + b"\n")
    else:
        show_table(rows)
    sys.exit(1 if missed_targets(rows) else 0)


async def measure(sizes: Sizes, directory: Path) -> list[Row]:
    """Return all costs."""
    rows: list[Row] = []
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        for wanted in (TARGET_RECORDS, *(round(sizes.likes * share) for share in SHARES.values())):
            rows += await measure_resyncs(pool, sizes.likes, wanted)
    async with harness.database(directory / EMPTY):  # copies of it cost less than others
        pass
    async with sparse_network(HOSTS) as network:
        for number_ in range(sizes.repos):
            repo = network.host(SigningAccount(number_, sizes.records, 0))
            repo.commit([name for name, share in SHARES.items() for _ in range(round(sizes.records * share))])
        for collection, share in SHARES.items():
            rows += await measure_live(network, sizes.seconds, collection, share, directory)
    rows.append(Row(HOUR, f"{PASSES} comparisons", await measure_comparison(sizes.compared, directory) * PASSES))
    return sorted(rows, key=lambda row: row.wanted == HOUR)


async def measure_resyncs(pool: ProcessPoolExecutor, likes: int, wanted: int) -> list[Row]:
    """Fetch and verify a repo in each way, in another process than its PDS."""
    rows = []
    async with sparse_network(1) as network:
        for records in (likes // 25, likes):  # the first repo is for loading modules
            account = SigningAccount(records, records, 0, {LIKE: 1})
            network.host(account).commit([RARE] * wanted)
            (proxy,) = network.proxies
            for choice, way in WAYS.items():
                before = Spent(-proxy.bytes, -proxy.requests)
                fetching = pool.submit(fetch_repo, account.did, account.key.public.did_key(), proxy.url, choice)
                cpu, count = await asyncio.wrap_future(fetching)
                if count < wanted:
                    raise BenchmarkError(f"only {count} of {wanted} wanted records are proven")
                spent = before + Spent(proxy.bytes, proxy.requests, cpu)
                rows.append(Row(f"{wanted:,} of {likes:,}", way, spent * (1 / wanted)))
    del rows[: len(WAYS)]
    return rows[: 2 if rows[1].spent.requests == rows[2].spent.requests else 3]


def fetch_repo(did: str, key: str, host: str, choice: SparseChoice) -> tuple[float, int]:
    """Fetch and verify a repo; return the CPU seconds, and the number of verified records."""
    return asyncio.run(_fetch_repo(did, key, host, choice))


async def _fetch_repo(did: str, did_key: str, host: str, choice: SparseChoice) -> tuple[float, int]:
    core = load_core(cast("CoreChoice", os.environ.get("INDEXER_CORE", "auto")), 1)  # as the daemon's
    policy, key = Policy(replace(Scope(), collections=CollectionFilter([RARE])), DEFAULT_LIMITS), parse_did_key(did_key)
    with tempfile.TemporaryDirectory() as directory:
        async with OutboundClient(OutboundSettings("benchmark", allow_private_hosts=True)) as outbound:
            reader = lambda folder, limits: core.open_export(folder, limits, ROW_LAYOUT)  # noqa: E731
            pds = PdsClient(outbound, DEFAULT_LIMITS, Path(directory), reader)
            began = process_time()
            if download := await SparseFetch(pds, choice).fetch(did, host, policy):
                count = download.verify(did, key, DEFAULT_LIMITS).count
                return process_time() - began, count
            async with pds.open_export(did, host) as export:
                await export.fetch()
                count = export.reader.verify(did, key, DEFAULT_LIMITS).count
                return process_time() - began, count


@dataclass(frozen=True, slots=True)
class Follower:
    """A daemon, its database, and the proxies that it uses."""

    daemon: DaemonProcess
    database: DatabaseServer
    proxies: Sequence[Proxy]

    def spent(self) -> Spent:
        """Return what it has spent so far."""
        cpu = [cpu_usage.cpu_seconds(pids) for pids in ([self.daemon.process.pid], self.database.pids)]
        return Spent(sum(one.bytes for one in self.proxies), sum(one.requests for one in self.proxies), *cpu)

    async def wait_for(self, records: AbstractSet[tuple[str, str, bytes]]) -> None:
        """Wait until all repos are synchronized, and exactly these records are stored."""
        connection, began = await asyncpg.connect(self.database.dsn), monotonic()
        while await connection.fetchval(_UNFINISHED, len(records)):
            await self._pause(began, f"{len(records)} stored records")
        if {tuple(row) for row in await connection.fetch(_RECORDS)} != records:
            raise BenchmarkError("other records are stored")
        await connection.close()

    async def wait_for_comparison(self) -> None:
        """Wait until the repos have been compared with their hosts once more."""
        before, began = self._comparisons(), monotonic()
        while self._comparisons() == before:
            await self._pause(began, "a comparison")

    def _comparisons(self) -> int:
        return self.daemon.log.read_bytes().count(_COMPARED)

    async def _pause(self, began: float, goal: str) -> None:
        self.daemon.raise_if_ended()
        if monotonic() - began > TIMEOUT_SECONDS:
            raise BenchmarkError(f"the daemon has not reached {goal}")
        await asyncio.sleep(POLL_SECONDS)


@asynccontextmanager
async def follow(
    network: SparseNetwork, collection: str, directory: Path, proxies: Sequence[Proxy], **settings: object
) -> AsyncIterator[Follower]:
    """Run a daemon that stores one collection, and yield it when it has synchronized all repos."""
    directory.mkdir()  # noqa: ASYNC240 - no other task is running
    copying = await asyncio.create_subprocess_exec("cp", "-a", directory.parent / EMPTY, directory / "database")
    await copying.wait()
    settings |= dict.fromkeys(("plc_rate", "host_rate", "host_concurrency", "outbound_rate"), 1_000)
    settings |= dict.fromkeys(("handle_rate", "hosts_interval", "host_streams"), 0)
    settings |= {"track": "listed", "collections": collection, "plc_lookup": "document", "resync_source": "pds"}
    async with (
        harness.database(directory / "database") as database,
        counted(network.plc) as plc,
        counted(network.relay) as lists,
    ):
        db = await Database.open(database.dsn)
        await db.repos.add(network.repos)
        await db.close()
        settings = {"plc_url": plc.url, "relays": lists.url, **settings}
        async with harness.daemon(database.dsn, directory / "daemon", **settings) as daemon:
            follower = Follower(daemon, database, [plc, lists, *proxies])
            await follower.wait_for(network.records(collection))
            await daemon.wait_until_counted()
            yield follower
            await daemon.stop()


async def measure_live(
    network: SparseNetwork, seconds: int, collection: str, share: float, directory: Path
) -> list[Row]:
    """Send the same commits to both daemons; for the first collection, also commits of which none is wanted."""
    wanted = max(1, round(RATE * seconds * share))
    async with (
        counted(network.relay) as relay,
        counted(network.jetstream) as hints,
        follow(network, collection, directory / f"{collection} {FIREHOSE}", [relay], relays=relay.url) as first,
        follow(
            network,
            collection,
            directory / f"{collection} {HINTS}",
            [hints, *network.proxies],
            upstream="jetstream",
            jetstreams=hints.url,
        ) as second,
    ):
        ways = {FIREHOSE: first, HINTS: second}
        spent = await _send(network, seconds, collection, wanted, ways)
        rows = [Row(f"{share * 100:g} % of {RATE}/s", way, spent[way] * (1 / wanted)) for way in ways]
        if collection == RARE:
            spent = await _send(network, seconds, collection, 0, ways)
            rows += [Row(HOUR, way, spent[way] * (3_600 / seconds)) for way in ways]
    return rows


async def _send(
    network: SparseNetwork, seconds: int, collection: str, wanted: int, ways: Mapping[str, Follower]
) -> dict[str, Spent]:
    """Send commits, so many of them wanted; return what each daemon spends until it has stored these."""
    before = {way: follower.spent() * -1 for way, follower in ways.items()}
    await network.send(collection, wanted, RATE * seconds, RATE, STRANGERS)
    for follower in ways.values():
        await follower.wait_for(network.records(collection))
    return {way: before[way] + follower.spent() for way, follower in ways.items()}


async def measure_comparison(repos: int, directory: Path) -> Spent:
    """Return the cost of comparing repos with their hosts, which list other accounts first."""
    async with sparse_network(HOSTS) as network, counted(network.jetstream) as hints:
        for pds in network.pdses:
            repo = network.host(SigningAccount(len(network.repos), 10, 0))
            pds.hosted |= {did_of(-number_): pds.hosted[repo.did] for number_ in range(1, OTHERS)}
        for number_ in range(len(network.repos), repos):
            network.host(SigningAccount(number_, 10, 0))
        settings = {"upstream": "jetstream", "jetstreams": hints.url, "sweep_interval": 24}
        async with follow(network, RARE, directory / "compared", [hints, *network.proxies], **settings) as follower:
            await follower.wait_for_comparison()
            before = follower.spent() * -1
            await follower.wait_for_comparison()
            return before + follower.spent()


def show_table(rows: Sequence[Row]) -> None:
    """Print all costs."""
    table = Table(box=SIMPLE_HEAD)
    for column in ("wanted", "way", "bytes", "ratio", "requests", "CPU, ms", "Postgres, ms"):
        table.add_column(column, justify="left" if column in ("wanted", "way") else "right", no_wrap=True)
    for row in rows:
        size, requests, *cpu = astuple(row.spent)
        times = [number(seconds * 1_000) for seconds in cpu]
        table.add_row(row.wanted, row.way, number(size), f"{ratio_of(row, rows):.5f}", number(requests), *times)
    console_of(TABLE_WIDTH).print(table)


def ratio_of(row: Row, rows: Sequence[Row]) -> float:
    """Return the ratio of the bytes to those of the first way to get the same."""
    return row.spent.bytes / next(other.spent.bytes for other in rows if other.wanted == row.wanted)


def missed_targets(rows: Sequence[Row]) -> int:
    """Print for each target whether it is met; return how many are missed."""
    missed = 0
    for way, target in TARGETS.items():
        row = next(row for row in rows if row.way == way)
        ratio = ratio_of(row, rows)
        missed += ratio > target
        verdict = "MISSED" if ratio > target else "met"
        click.echo(f"{row.wanted}, {way}: {ratio:.3%} of the bytes, target {target:.0%}: {verdict}", err=True)
    return missed


if __name__ == "__main__":
    main()
