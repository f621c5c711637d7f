"""`python -m benchmarks.live`: measure commits from a websocket to committed rows, with the real daemon.

The stream of one workload has three parts. The first is sent at the maximum rate, in turns with the floor: a bare
script verifies the same commits and writes only the rows. The second is sent at a given rate to measure the latency.
The third is applied in this process to measure each stage. With `--known`, the daemon first loads the identities of
that many other repos. With `--copies`, the daemon reads two streams. The second stream sends the first part again when
it is stored, to measure the CPU time of copies alone. Both streams send the second part at the same time. At the end,
the database is compared with the expected result.
"""

import asyncio
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import nan
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import asyncpg
import click

from benchmarks import cpu_usage, database_rows, harness, idle_rows, live_stages
from benchmarks.arrival_watch import ArrivalWatch, watch_arrivals
from benchmarks.harness import TIMEOUT_SECONDS, BenchmarkError, DaemonProcess, DatabaseServer, LoadProcess
from benchmarks.processor_speed import ProcessorSpeed, sample_speed
from benchmarks.report import MIB, MICRO, Figures, Report, costs, cpu_of, generation_progress, machine, show
from benchmarks.turns import (
    FIRST_HOST,
    MIN_COMMITS,
    RATE,
    SECOND_HOST,
    Floor,
    MeasuredDaemons,
    open_floor,
    overall_rate,
)
from benchmarks.workload import Workload, WorkloadSpec, load_workload
from indexer.atproto.crypto import parse_did_key
from indexer.sync.repo import SyncStatus
from indexer.telemetry.log import configure_logging

_CACHED_IDENTITIES = "indexer_identity_cache_total database"
"""The metric of identities that were loaded from the database into memory, where up to 200,000 are cached."""
_DROPPED = "indexer_events_total commit replayed"
"""The metric of commits that were received before, as copies are."""
_COPIES = "copies at the maximum rate"
LINKS_TIMEOUT_SECONDS = 600.0
_LINKS_COMPLETE = "select state = 'complete' and seq >= atproto.latest_seq() from atproto.link_progress"
MAX_TURNS = 5
"""Parts of the commits at the maximum rate. The floor gets each part after the daemons."""


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """The options of the benchmark.

    Attributes:
        fast: Number of commits sent at the maximum rate.
        paced: Number of commits sent at `rate`.
        staged: Number of commits applied stage by stage.
        rate: Commits per second.
        shards: Number of daemon processes.
        known: Number of idle repos whose identities are in memory.
        idle_repos: Number of idle repos in the database.
        idle_records: Number of records of idle repos in the database.
        copies: Receive each commit again, on the stream of a second relay.
        links: Keep links.
        cache: Before the measurement, remove the database from the page cache (`cold`), or read the rows of the
            workload (`warm`).
        keep: The directory of a database that is kept and reused.
    """

    fast: int
    paced: int
    staged: int
    rate: int
    shards: int
    known: int
    idle_repos: int
    idle_records: int
    copies: bool
    links: bool
    cache: str | None = None
    keep: Path | None = None

    def parts(self) -> list[range]:
        """Return the commit numbers of the three parts."""
        ends = accumulate((0, self.fast, self.paced, self.staged))
        return [range(start + 1, end + 1) for start, end in pairwise(ends)]

    def turns(self) -> list[range]:
        """Return the commit numbers of the first part, divided into the turns with the floor."""
        fast, *_ = self.parts()
        count = max(1, min(MAX_TURNS, self.fast // MIN_COMMITS))
        return [fast[index * self.fast // count : (index + 1) * self.fast // count] for index in range(count)]


@click.command()
@click.option("--repos", default=1_000, show_default=True, help="Number of repos with commits.")
@click.option("--records", default=1_200, show_default=True, help="Mean number of records of a repo.")
@click.option("--fast", default=30_000, show_default=True, help="Number of commits sent at the maximum rate.")
@click.option("--paced", default=10_000, show_default=True, help="Number of commits sent at --rate.")
@click.option("--rate", default=1_000, show_default=True, help="Commits per second for the latency.")
@click.option(
    "--staged", default=5_000, show_default=True, help="Number of commits applied stage by stage, without a daemon."
)
@click.option("--shards", default=1, show_default=True, help="Number of daemon processes that share the stream.")
@click.option(
    "--known",
    default=0,
    show_default=True,
    help="Number of idle repos whose identities are in memory, at most 1000000.",
)
@click.option("--copies", is_flag=True, help="Receive each commit again, from a second relay.")
@click.option("--links", is_flag=True, help="Keep links (INDEXER_LINKS).")
@idle_rows.idle_options
@click.option(
    "--cache",
    type=click.Choice(["cold", "warm"]),
    help="Before the measurement, remove the database from the page cache, or read the rows of the workload once.",
)
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory of the database, which is not removed. If it exists, its idle rows are reused.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(repos: int, records: int, as_json: bool, **options: Any) -> None:
    """Measure commits per second from a websocket to committed rows.

    Exit code 1: the database differs from the expected result at the end.
    """
    chosen = LiveOptions(**options)
    commits = chosen.fast + chosen.paced + chosen.staged
    workload = load_workload(WorkloadSpec(repos, records, sigma=0.4, commits=commits), generation_progress)
    configure_logging(level="warning")
    with tempfile.TemporaryDirectory(prefix="indexer-benchmark-") as directory:
        report, differences = asyncio.run(measure(workload, chosen, Path(directory)))
    show(report, as_json=as_json)
    for difference in differences:
        click.echo(f"DIFFERENT: {difference}", err=True)
    sys.exit(1 if differences else 0)


async def measure(workload: Workload, options: LiveOptions, directory: Path) -> tuple[Report, list[str]]:
    """Run the benchmark; return the figures, and the differences between database and expected result."""
    *_, staged = options.parts()
    data = options.keep or directory / "database"
    async with harness.load_process("load_relay", workload) as load, AsyncExitStack() as stack:
        floor = await stack.enter_async_context(open_floor(workload, directory / "floor"))
        async with harness.database(data) as database:
            await fill(workload, options, database, load)
        if options.cache == "cold":
            _forget_files(data)
        database = await stack.enter_async_context(harness.database(data))
        if options.cache == "warm":
            await database_rows.read_workload(database.dsn, workload)
        report = await measure_daemons(workload, options, database, load, directory, floor)

        keys = {account.did: parse_did_key(account.key) for account in workload.accounts}
        received = await _receive_seconds(load, staged)
        stages = await live_stages.apply_in_stages(database.dsn, list(workload.frames(staged)), keys, load.url)
        report["stages measured one by one"] = costs("commit", {"socket": received} | stages, len(staged))
        if options.copies:
            decoding = live_stages.decode_seconds(list(workload.frames(staged)))
            before = (received + decoding) / len(staged) * MICRO
            copy = float(report[_COPIES][cpu_of("daemon", "copy")])
            report[_COPIES]["daemon CPU without receiving and decoding, µs per copy"] = copy - before

        changes = sum((Counter(account.changes) for account in workload.accounts), Counter[str]())
        differences = await database_rows.find_differences(database.dsn, workload, changes)
    return report | {"machine": machine()}, differences


async def fill(workload: Workload, options: LiveOptions, database: DatabaseServer, load: LoadProcess) -> None:
    """Insert the initial rows of the workload and the idle ones."""
    if options.keep:
        await database_rows.remove_workload(database.dsn, workload)
        await database_rows.vacuum_and_checkpoint(database.nodes)
    await database_rows.insert_workload(database.dsn, workload, lambda _: load.url, status=SyncStatus.SYNCHRONIZED)
    await idle_rows.add_idle(database.dsn, workload, max(options.idle_repos, options.known), options.idle_records)
    await idle_rows.add_identities(database.dsn, options.known)
    await database_rows.vacuum_and_checkpoint(database.nodes)


def _forget_files(directory: Path) -> None:
    """Remove all files below the directory from the page cache."""
    os.sync()
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def _receive_seconds(load: LoadProcess, commits: range) -> float:
    receiving = asyncio.create_task(live_stages.receive_seconds(load.url, len(commits)))
    await load.wait_for_subscribers(1)
    await load.command(commits[0], commits[-1], 0)
    return await receiving


async def measure_daemons(
    workload: Workload,
    options: LiveOptions,
    database: DatabaseServer,
    load: LoadProcess,
    directory: Path,
    floor: Floor | None = None,
) -> Report:
    """Send the first two parts of the stream to the daemons; return their rate, latency and CPU time, and the floor."""
    async with AsyncExitStack() as stack:
        processes = [
            await stack.enter_async_context(_daemon(database, load, directory, f"{index}/{options.shards}", options))
            for index in range(options.shards)
        ]
        await load.wait_for_subscribers(options.shards * (1 + options.copies))
        for process in processes:
            await process.wait_until_counted()
        await _load_identities(load, processes, options.known)
        watch = await stack.enter_async_context(watch_arrivals(database.dsn, workload, processes))
        pids = {"daemon": [process.process.pid for process in processes], "load": [load.process.pid]}
        daemons = MeasuredDaemons(load, watch, pids | dict(database.servers))

        if options.links:
            await _wait_for_links(database.dsn)
        report = await _measure_rate(processes, daemons, options, floor)
        if options.links:
            await _wait_for_links(database.dsn)
        report |= await _measure_latency(daemons, options)
        report["maximum rate"]["peak RSS of the daemon, MiB"] = max(map(cpu_usage.peak_rss, pids["daemon"])) / MIB
        for process in processes:
            await process.stop()
        await load.wait_for_subscribers(0)
    return report


async def _measure_rate(
    processes: Sequence[DaemonProcess], daemons: MeasuredDaemons, options: LiveOptions, floor: Floor | None
) -> Report:
    """Send the first part of the stream, in turns with the floor if there is one."""
    metrics_before = await harness.sum_metrics(processes)
    for commits in options.turns():
        await daemons.process(commits)
        if floor is not None:
            await floor.process(commits)
    metrics = await harness.sum_metrics(processes)
    identities = metrics[_CACHED_IDENTITIES]
    metrics.subtract(metrics_before)
    fast, *_ = options.parts()
    copies = await _receive_copies(processes, daemons, fast) if options.copies else {}
    return (
        {
            "maximum rate": _speed(daemons, fast) | {"identities in memory": identities},
            "elapsed time by stage in the daemon": costs("commit", _stage_seconds(metrics), len(fast)),
        }
        | ({_COPIES: _cpu(copies, fast, "copy")} if copies else {})
        | ({} if floor is None else {"floor": floor.figures(daemons)})
    )


async def _receive_copies(
    processes: Sequence[DaemonProcess], daemons: MeasuredDaemons, commits: range
) -> Mapping[str, float]:
    """Send stored commits on the second stream at the maximum rate; return the CPU seconds until all are dropped."""
    goal = (await harness.sum_metrics(processes))[_DROPPED] + len(commits)
    before = daemons.cpu_seconds()
    await daemons.load.command(commits[0], commits[-1], 0, SECOND_HOST)
    began = await daemons.load.read("began")
    while (await harness.sum_metrics(processes))[_DROPPED] < goal:
        if monotonic() - began > TIMEOUT_SECONDS:
            raise BenchmarkError("not all copies are dropped")
    return {part: seconds - before[part] for part, seconds in daemons.cpu_seconds().items()}


async def _measure_latency(daemons: MeasuredDaemons, options: LiveOptions) -> Report:
    """Send the second part of the stream at the given rate."""
    _, paced, *_ = options.parts()
    await asyncio.to_thread(os.sync)  # so that the disk does not write data of the first part during the second one
    await daemons.load.command(paced[0], paced[-1], options.rate)
    began = await daemons.load.read("began")
    before = daemons.cpu_seconds()
    with sample_speed() as samples:
        await daemons.watch.wait_for(paced)
    cpu = {part: seconds - before[part] for part, seconds in daemons.cpu_seconds().items()}
    latency = _latency(daemons.watch, paced, began, options.rate, ProcessorSpeed(samples))
    return {f"latency at {options.rate} commits/s": latency | _cpu(cpu, paced)}


async def _load_identities(load: LoadProcess, daemons: Sequence[DaemonProcess], count: int) -> None:
    """Let the daemons look up the keys of `count` idle repos, so that these identities are in memory."""
    if not count:
        return
    await load.command(count)
    await load.read("began")
    last_progress, loaded = monotonic(), 0.0
    while (now := (await harness.sum_metrics(daemons))[_CACHED_IDENTITIES]) < count:
        last_progress, loaded = (monotonic() if now > loaded else last_progress), now
        if monotonic() - last_progress > TIMEOUT_SECONDS:
            raise BenchmarkError(f"only {loaded:.0f} of {count} identities are in memory")
        await asyncio.sleep(0.1)


async def _wait_for_links(dsn: str) -> None:
    """Wait until links contain all stored records, so that their backfill is not part of a measurement."""
    connection = await asyncpg.connect(dsn)
    began = monotonic()
    while not await connection.fetchval(_LINKS_COMPLETE):
        if monotonic() - began > LINKS_TIMEOUT_SECONDS:
            raise BenchmarkError("links are not complete")
        await asyncio.sleep(0.1)
    await connection.close()


def _daemon(
    database: DatabaseServer, load: LoadProcess, directory: Path, shard: str, options: LiveOptions
) -> AbstractAsyncContextManager[DaemonProcess]:
    data = directory / f"daemon {shard.replace('/', ' of ')}"
    relays = f"{load.url},{load.url.replace(FIRST_HOST, SECOND_HOST)}" if options.copies else load.url
    return harness.daemon(
        database.dsn, data, relays=relays, start="oldest", roles="live", shard=shard, links=options.links
    )


def _speed(daemons: MeasuredDaemons, commits: range) -> Figures:
    """Return the rate of all commits and that of the second half, in which most pages have been read once."""
    rates, batches = daemons.rates, daemons.watch.batches(commits)
    return {
        RATE: overall_rate(rates),
        "commits/s, second half": overall_rate(rates[len(rates) // 2 :]),
        "commits per batch, median": median(batches.values()),
        "commits per batch, maximum": max(batches.values()),
    } | daemons.cpu_figures


def _cpu(seconds: Mapping[str, float], commits: range, unit: str = "commit") -> Figures:
    return {cpu_of(part, unit): spent / len(commits) * MICRO for part, spent in seconds.items()}


def _stage_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the elapsed time of each stage, including waits. The stages of a batch do not overlap."""
    return {stage: metrics[f"indexer_batch_seconds_sum {stage}"] for stage in ("load", "plan", "apply", "verify-ahead")}


def _latency(watch: ArrivalWatch, commits: range, began: float, rate: int, speed: ProcessorSpeed) -> Figures:
    """Return the time from when each commit was due to be sent until its rows were visible.

    It is also shown without the commits during which a processor was slow.
    """
    times = [(began + index / rate, watch.visible_at[number]) for index, number in enumerate(commits, 1)]
    latencies = sorted((visible - due) * 1_000 for due, visible in times)
    undisturbed = sorted((visible - due) * 1_000 for due, visible in times if not speed.was_slow(due, visible))
    batches = watch.batches(commits)
    return {
        "p50, ms": _quantile(latencies, 0.5),
        "p99, ms": _quantile(latencies, 0.99),
        "maximum, ms": latencies[-1],
        "time with a slow processor, %": speed.share * 100,
        "commits at that time, %": (1 - len(undisturbed) / len(latencies)) * 100,
        "p50 of the others, ms": _quantile(undisturbed, 0.5),
        "p99 of the others, ms": _quantile(undisturbed, 0.99),
        "commits per batch, median": median(batches.values()),
    }


def _quantile(ordered: Sequence[float], part: float) -> float:
    return ordered[int(len(ordered) * part)] if ordered else nan


if __name__ == "__main__":
    main()
