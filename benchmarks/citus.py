"""`python -m benchmarks.citus`: compare one Postgres with Citus, a coordinator and workers, on the same cores.

Both sides have the same version and settings of Postgres, fsync included, and run one after the other. On each, a
daemon follows a stream, another one resyncs repos, and single accounts are read. At the end of each part, the database
is compared with the expected result. Citus must be installed on the machine (CONTRIBUTING.md).
"""

import asyncio
import os
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any
from urllib.parse import quote

import click
import orjson
from rich.table import Table

from benchmarks import database_rows, harness, live, resync
from benchmarks.harness import DatabaseServer
from benchmarks.live import LiveOptions
from benchmarks.report import Figures, Report, console_of, generation_progress, machine, number, show
from benchmarks.resync import ResyncOptions
from benchmarks.workload import Workload, WorkloadSpec, load_workload
from indexer.cluster.distribute import distribute
from indexer.db import Database
from indexer.db.migrate import migrate
from indexer.telemetry.log import configure_logging
from tests.citus_cluster import NOTICE, find_citus, new_cluster

SETTINGS = {
    "checkpoint_timeout": "15min",
    "fsync": "on",
    "max_connections": "200",
    "max_prepared_transactions": "400",
    "max_wal_size": "4GB",
    "shared_buffers": "256MB",
    "wal_compression": "off",
    "wal_level": "logical",
}
"""Settings of Postgres, the same on every server of both sides."""
READS = 200
COMPARISON_WIDTH = 100
"""Columns of a table with the figures of both sides."""

Server = Callable[[Path], AbstractAsyncContextManager[DatabaseServer]]
"""Runs a database in a directory."""
Measurement = Callable[[Server, Path], Coroutine[Any, Any, tuple[Report, list[str]]]]
"""Returns the figures, and the differences from the expected result."""


@click.command()
@click.option("--repos", default=1_000, show_default=True, help="Number of repos with commits.")
@click.option("--records", default=200, show_default=True, help="Mean number of records of a repo.")
@click.option("--fast", default=60_000, show_default=True, help="Number of commits sent at the maximum rate.")
@click.option("--paced", default=3_000, show_default=True, help="Number of commits sent at --rate.")
@click.option("--rate", default=1_000, show_default=True, help="Commits per second for the latency.")
@click.option("--exports", default=1_000, show_default=True, help="Number of repos to resynchronize.")
@click.option("--warm-up", default=100, show_default=True, help="Number of these that are not measured.")
@click.option("--export-records", default=600, show_default=True, help="Mean number of records of those.")
@click.option("--stored", is_flag=True, help="Store the records of those before, with one in a hundred different.")
@click.option("--workers", default=2, show_default=True, help="Number of workers of Citus.")
@click.option(
    "--shards", type=int, show_default="as indexer distribute", help="Number of shards of each distributed table."
)
@click.option("--only", type=click.Choice(["live", "resync"]), help="Measure only this part.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    repos: int,
    records: int,
    fast: int,
    paced: int,
    rate: int,
    exports: int,
    warm_up: int,
    export_records: int,
    stored: bool,
    workers: int,
    shards: int | None,
    only: str | None,
    as_json: bool,
) -> None:
    """Compare the rates on one Postgres with those on Citus.

    Exit code 1: a database differs from the expected result at the end.
    """
    binaries = find_citus()
    if binaries is None:
        click.echo(f"Skipped: {NOTICE}", err=True)
        return
    stream = WorkloadSpec(repos, records, sigma=0.4, commits=fast + paced)
    if warm_up >= exports:
        raise click.UsageError("--warm-up must be less than --exports")
    backfill = WorkloadSpec(exports, export_records, resync.SIGMA, exports=True)
    live_options = LiveOptions(fast, paced, 0, rate, 1, 0, 0, 0, copies=False, links=False)
    resync_options = ResyncOptions(stored, 0, workers=8, processes=1, idle_repos=0, idle_records=0, warm_up=warm_up)
    parts: dict[str, Measurement] = {}
    if only != "resync":
        parts["live"] = partial(measure_live, load_workload(stream, generation_progress), live_options)
    if only != "live":
        parts["resync"] = partial(measure_resync, load_workload(backfill, generation_progress), resync_options)
    servers: dict[str, Server] = {"Postgres": one_server, "Citus": partial(citus, binaries, workers, shards)}
    configure_logging(level="warning")
    os.environ["INDEXER_PG_BINDIR"] = str(binaries)  # for the embedded server
    report, differences = _measure(parts, servers)
    if as_json:
        click.echo(orjson.dumps(report | {"machine": machine()}))
    else:
        print_tables(report)
        show({"machine": machine()}, as_json=False)
    for difference in differences:
        click.echo(f"DIFFERENT: {difference}", err=True)
    sys.exit(1 if differences else 0)


def _measure(
    parts: Mapping[str, Measurement], servers: Mapping[str, Server]
) -> tuple[dict[str, dict[str, Report]], list[str]]:
    """Return the figures by part and server, and all differences from the expected results."""
    report: dict[str, dict[str, Report]] = {part: {} for part in parts}
    differences: list[str] = []
    for part, measure in parts.items():
        for name, server in servers.items():
            with tempfile.TemporaryDirectory(prefix="indexer-benchmark-") as directory:
                report[part][name], different = asyncio.run(measure(server, Path(directory)))
            differences += [f"{part} on {name}: {difference}" for difference in different]
    return report, differences


async def measure_live(
    workload: Workload, options: LiveOptions, server: Server, directory: Path
) -> tuple[Report, list[str]]:
    """Run the live path and read single accounts; return the figures, and the differences from the expected result."""
    async with server(directory) as database, harness.load_process("load_relay", workload) as load:
        await live.fill(workload, options, database, load)
        report = await live.measure_daemons(workload, options, database, load, directory)
        report["reads of one account"] = await measure_reads(workload, database.dsn)
        changes = sum((Counter(account.changes) for account in workload.accounts), Counter[str]())
        return report, await database_rows.find_differences(database.dsn, workload, changes)


async def measure_resync(
    workload: Workload, options: ResyncOptions, server: Server, directory: Path
) -> tuple[Report, list[str]]:
    """Run resyncs; return the figures, and the differences from the expected result."""
    async with server(directory) as database, harness.load_process("export_host", workload) as load:
        await resync.fill(workload, options, database, load)
        report = await resync.measure_daemons(workload.accounts, options, database, load, directory)
        changes = resync.expected_changes(workload, options)
        return report, await database_rows.find_differences(database.dsn, workload, changes)


async def measure_reads(workload: Workload, dsn: str) -> Figures:
    """Return how long the store needs to read single accounts, in milliseconds."""
    dids = [account.did for account in Random(0).choices(workload.accounts, k=READS)]
    db = await Database.open(dsn)
    try:
        paths = {did: min(await db.reports.visible_records(did)).split("/") for did in set(dids)}
        reads: dict[str, Callable[[str], Awaitable[object]]] = {
            "its state": db.reports.repo,
            "one record": lambda did: db.reports.record(did, *paths[did]),
            "all its records": db.reports.visible_records,
        }
        return {
            f"{name}, {figure}, ms": milliseconds
            for name, read in reads.items()
            for figure, milliseconds in (await _percentiles(read, dids)).items()
        }
    finally:
        await db.close()


async def _percentiles(read: Callable[[str], Awaitable[object]], dids: Sequence[str]) -> dict[str, float]:
    await read(dids[0])  # prepares the statement
    milliseconds = []
    for did in dids:
        began = perf_counter()
        await read(did)
        milliseconds.append((perf_counter() - began) * 1_000)
    milliseconds.sort()
    return {"p50": milliseconds[len(dids) // 2], "p99": milliseconds[len(dids) * 99 // 100]}


def _ratio(before: float | str, after: float | str) -> float | None:
    if isinstance(before, str) or isinstance(after, str) or not before:
        return None
    return after / before


def print_tables(report: Mapping[str, Mapping[str, Report]]) -> None:
    """Print the figures of both sides, with their ratio, as a table for each section."""
    console = console_of(COMPARISON_WIDTH)
    for part, sides in report.items():
        (first, before), (second, after) = sides.items()
        for section, figures in after.items():
            table = Table(title=f"{part}: {section}", title_justify="left", width=COMPARISON_WIDTH)
            table.add_column(no_wrap=True)
            for side in (first, second):
                table.add_column(side, justify="right", overflow="fold", ratio=1)
            table.add_column("ratio", justify="right")
            for name, figure in figures.items():
                other = before[section].get(name, "")
                ratio = _ratio(other, figure)
                table.add_row(name, number(other), number(figure), "" if ratio is None else f"{ratio:.2f}")
            console.print(table)


@asynccontextmanager
async def one_server(directory: Path) -> AsyncIterator[DatabaseServer]:
    """Run one Postgres, with an empty migrated database."""
    async with harness.empty_database(directory, SETTINGS) as database:
        await migrate(database.dsn)
        yield database


@asynccontextmanager
async def citus(binaries: Path, workers: int, shards: int | None, _: Path) -> AsyncIterator[DatabaseServer]:
    """Run a cluster, with an empty migrated database that is distributed."""
    with tempfile.TemporaryDirectory(prefix="indexer-benchmark-") as directory:
        settings = SETTINGS | {"unix_socket_directories": directory}
        with new_cluster(Path(directory), binaries, workers, settings) as cluster:
            await cluster.introduce(workers=cluster.names[1:])
            dsns = [
                f"postgresql://postgres@/postgres?host={quote(directory)}&port={cluster.ports[n]}"
                for n in cluster.names
            ]
            pids = [pid for name in cluster.names if (pid := cluster.pid_of(name)) is not None]
            await migrate(dsns[0])
            await distribute(dsns[0], shards, lambda *_: None)
            yield DatabaseServer(dsns[0], tuple(pids), tuple(dsns))


if __name__ == "__main__":
    main()
