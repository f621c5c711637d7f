"""`python -m benchmarks.resync`: measure exports of whole repos to rows, with the real daemon.

At the beginning no record is stored or, with `--stored`, all records are, of which one in a hundred differs. Some repos
are resynchronized in this process afterwards, to measure each stage. At the end, the database is compared with the
expected result.
"""

import asyncio
import gc
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import asyncpg
import click

from benchmarks import cpu_usage, database_rows, floor, harness, idle_rows
from benchmarks.export_host import host_of
from benchmarks.harness import BenchmarkError, DaemonProcess, DatabaseServer, LoadProcess
from benchmarks.report import MIB, MICRO, Figures, Report, costs, cpu_of, generation_progress, machine, show
from benchmarks.resync_stages import STAGES, timed_resyncs
from benchmarks.workload import Workload, WorkloadAccount, WorkloadSpec, load_workload
from indexer.atproto.crypto import parse_did_key
from indexer.db import Database
from indexer.sync.repo import SyncStatus
from indexer.telemetry.log import configure_logging

SIGMA = 1.5
"""Standard deviation of the logarithm of the sizes: half of the repos have less than a third of the mean."""
TIMEOUT_SECONDS = 600.0
"""Maximum time to wait until the next repo is synchronized."""
HUGE_RECORDS = 1_000_000
POLL_SECONDS = 0.25
"""Interval at which the repos are counted: rarely, because that takes 10 ms of CPU on a cluster."""

_DUE = """
    select bucket from indexer.repo
    where sync_status = 'desynchronized' and active and coalesce(next_attempt_at, '-infinity'::timestamptz) < 'infinity'
"""
_WAITING = f"select count(*) from ({_DUE}) due"
# In one query, because Citus would run two sub-queries one after the other, and a repo may be claimed in between.
_UNFINISHED = f"""
    select count(*) from (
        {_DUE} union all select bucket from indexer.repo where sync_status = 'in-progress'
    ) unfinished
"""
_UNNUMBERED = "select exists (select from indexer.unnumbered_batch)"
_WRITE_SIZES = "select count(*) from indexer.change where collection is not null and not live group by segment, batch"


@dataclass(frozen=True, slots=True)
class ResyncOptions:
    """The options of the benchmark.

    Attributes:
        stored: The records are stored already, and one in a hundred differs.
        staged: Number of repos resynchronized in this process.
        workers: Number of resync workers per daemon.
        processes: Number of daemon processes.
        idle_repos: Number of idle repos in the database.
        idle_records: Number of records of idle repos in the database.
        warm_up: Number of the repos that the daemons resync before the measurement, so that their connections are open.
    """

    stored: bool
    staged: int
    workers: int
    processes: int
    idle_repos: int
    idle_records: int
    warm_up: int = 0


@click.command()
@click.option("--repos", default=400, show_default=True, help="Number of repos to resynchronize.")
@click.option("--records", default=1_200, show_default=True, help="Mean number of records of a repo.")
@click.option("--huge", is_flag=True, help="Add one repo with a million records.")
@click.option("--stored", is_flag=True, help="Store all records before, with one in a hundred different.")
@click.option("--staged", default=40, show_default=True, help="Number of the repos resynchronized stage by stage.")
@click.option("--workers", default=8, show_default=True, help="Number of resync workers per daemon.")
@click.option("--processes", default=1, show_default=True, help="Number of daemon processes that share the work.")
@idle_rows.idle_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(repos: int, records: int, huge: bool, as_json: bool, **options: Any) -> None:
    """Measure records per second from exports to rows.

    Exit code 1: the database differs from the expected result at the end.
    """
    if options["staged"] >= repos + huge:
        raise click.UsageError("--staged must be less than the number of repos")
    spec = WorkloadSpec(repos, records, SIGMA, huge=HUGE_RECORDS * huge, exports=True)
    workload = load_workload(spec, generation_progress)
    configure_logging(level="warning")
    with tempfile.TemporaryDirectory(prefix="indexer-benchmark-") as directory:
        report, differences = asyncio.run(measure(workload, ResyncOptions(**options), Path(directory)))
    show(report, as_json=as_json)
    for difference in differences:
        click.echo(f"DIFFERENT: {difference}", err=True)
    sys.exit(1 if differences else 0)


async def measure(workload: Workload, options: ResyncOptions, directory: Path) -> tuple[Report, list[str]]:
    """Run the benchmark; return the figures, and the differences between database and expected result."""
    staged, others = workload.accounts[: options.staged], workload.accounts[options.staged :]
    async with harness.database(directory) as database, harness.load_process("export_host", workload) as load:
        await fill(workload, options, database, load)
        report = await measure_daemons(others, options, database, load, directory)
        report["stages measured one by one"] = await _measure_stages(staged, database.dsn, load, directory)
        report["floor"] = await _measure_floor(report["resyncs"], workload, options, database)
        differences = await database_rows.find_differences(database.dsn, workload, expected_changes(workload, options))
    return report | {"machine": machine()}, differences


def expected_changes(workload: Workload, options: ResyncOptions) -> Counter[str]:
    """Return the number of changes that the resyncs of all repos log, by action."""
    if options.stored:
        return sum((Counter(account.changes) for account in workload.accounts), Counter[str]())
    return Counter({"create": _records(workload.accounts)})


async def fill(workload: Workload, options: ResyncOptions, database: DatabaseServer, load: LoadProcess) -> None:
    """Insert all repos as desynchronized and postpone their resyncs."""
    dsn = database.dsn
    if options.stored:
        pds_of = partial(host_of, hosts=await load.read("hosts"))
        await database_rows.insert_workload(dsn, workload, pds_of, status=SyncStatus.DESYNCHRONIZED)
    else:
        db = await Database.open(dsn)
        await db.repos.add([account.did for account in workload.accounts])
        await db.close()
    await database_rows.postpone_resyncs(dsn)
    await idle_rows.add_idle(dsn, workload, options.idle_repos, options.idle_records)
    await database_rows.vacuum_and_checkpoint(database.nodes)


async def measure_daemons(
    accounts: Sequence[WorkloadAccount],
    options: ResyncOptions,
    database: DatabaseServer,
    load: LoadProcess,
    directory: Path,
) -> Report:
    """Let the daemons resync these accounts; return rate and CPU time of all but the first `warm_up` ones."""
    warm_up, accounts = accounts[: options.warm_up], accounts[options.warm_up :]
    async with AsyncExitStack() as stack:
        daemons = [
            await stack.enter_async_context(
                harness.daemon(
                    database.dsn,
                    directory / f"daemon {index}",
                    roles="resync",
                    shard=f"{index}/{options.processes}",
                    plc_url=load.url,
                    plc_lookup="document",
                    resync_source="pds",
                    resync_workers=options.workers,
                    **dict.fromkeys(("plc_rate", "host_rate", "host_concurrency", "outbound_rate"), 100_000),
                )
            )
            for index in range(options.processes)
        ]
        for daemon in daemons:
            await daemon.wait_until_counted()
        if warm_up:
            await _resync_all(database.dsn, [account.did for account in warm_up], daemons)
        pids = {"daemon": [daemon.process.pid for daemon in daemons], "load": [load.process.pid], **database.servers}
        metrics_before = await harness.sum_metrics(daemons)
        cpu_before = {part: cpu_usage.cpu_seconds(pids[part]) for part in pids}
        wal_before = await database_rows.wal_bytes(database.dsn)
        elapsed = await _resync_all(database.dsn, [account.did for account in accounts], daemons)
        wal = await database_rows.wal_bytes(database.dsn) - wal_before
        cpu = {part: cpu_usage.cpu_seconds(pids[part]) - cpu_before[part] for part in pids}
        peak = max(map(cpu_usage.peak_rss, pids["daemon"]))
        metrics = await harness.sum_metrics(daemons)
        metrics.subtract(metrics_before)
        for daemon in daemons:
            await daemon.stop()
    speed = _speed(accounts, elapsed, cpu) | await _write_sizes(database.dsn)
    return {
        "resyncs": speed
        | {"WAL, bytes per record": wal / _records(accounts), "peak RSS of the daemon, MiB": peak / MIB},
        "elapsed time by stage in the daemon": costs("record", _stage_seconds(metrics), _records(accounts)),
        "share of the time of a resync": _shares(_stage_seconds(metrics)),
    }


async def _resync_all(dsn: str, dids: Sequence[str], daemons: Sequence[DaemonProcess]) -> float:
    """Make these repos due; return the seconds from the first claim until none is waiting or in progress.

    Raises:
        BenchmarkError: No repo was finished for `TIMEOUT_SECONDS`, or a daemon ended.
    """
    connection = await asyncpg.connect(dsn)
    await database_rows.make_due(dsn, dids)
    while await connection.fetchval(_WAITING) == len(dids):  # noqa: ASYNC110 - another process changes it
        await asyncio.sleep(0.005)
    began = last_progress = monotonic()
    before = -1
    while left := await connection.fetchval(_UNFINISHED):
        for daemon in daemons:
            daemon.raise_if_ended()
        last_progress, before = (last_progress if left == before else monotonic()), left
        if monotonic() - last_progress > TIMEOUT_SECONDS:
            raise BenchmarkError(f"{left} repos are not synchronized")
        await asyncio.sleep(POLL_SECONDS)
    elapsed = monotonic() - began
    async with asyncio.timeout(TIMEOUT_SECONDS):  # else the log would lack what the stopped daemons have not numbered
        while await connection.fetchval(_UNNUMBERED):  # noqa: ASYNC110 - another process changes it
            await asyncio.sleep(POLL_SECONDS)
    await connection.close()
    return elapsed


async def _measure_stages(accounts: Sequence[WorkloadAccount], dsn: str, load: LoadProcess, directory: Path) -> Figures:
    await database_rows.make_due(dsn, [account.did for account in accounts])
    gc.freeze()
    async with timed_resyncs(dsn, load.url, directory / "spool") as resyncs:
        return costs("record", await resyncs.run(), _records(accounts))


async def _measure_floor(
    speed: Figures, workload: Workload, options: ResyncOptions, database: DatabaseServer
) -> Figures:
    """Verify the same exports and write the same changes to the same rows."""
    gc.freeze()
    verification = sum(
        floor.export_verification_seconds(
            workload.exports[slice(*account.export)], floor.signature_check(parse_did_key(account.key))
        )
        for account in workload.accounts
    )
    async with floor.bare_script(database.dsn, lambda: cpu_usage.cpu_seconds(database.pids)) as script:
        if options.stored:
            await script.copy_records(workload.directory / "rows")
        heads = {account.did: floor.head_row(account) for account in workload.accounts}
        async for changes in floor.read_changes(database.dsn, list(heads)):
            dids = {did for _, (did, *_) in changes} & heads.keys()
            await script.write_export([heads.pop(did) for did in sorted(dids)], changes)
    records = _records(workload.accounts)
    return floor.compare_with_floor(
        "record", speed, float(speed["records/s"]), verification / records, script.clock, records
    )


def _records(accounts: Sequence[WorkloadAccount]) -> int:
    return sum(account.records for account in accounts)


def _speed(accounts: Sequence[WorkloadAccount], elapsed: float, cpu: Mapping[str, float]) -> Figures:
    records = _records(accounts)
    return {
        "repos/s": len(accounts) / elapsed,
        "records/s": records / elapsed,
        "MB/s": sum(end - start for start, end in (account.export for account in accounts)) / elapsed / 1e6,
        "seconds": elapsed,
        **{cpu_of(part, "record"): seconds / records * MICRO for part, seconds in cpu.items()},
    }


async def _write_sizes(dsn: str) -> Figures:
    connection = await asyncpg.connect(dsn)
    sizes = [row[0] for row in await connection.fetch(_WRITE_SIZES)]
    await connection.close()
    return {"records per write, median": median(sizes), "records per write, maximum": max(sizes)}


def _stage_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the elapsed time of each stage over all resyncs, which overlap, including waits."""
    seconds = {stage: metrics[f"indexer_batch_seconds_sum {name}"] for name, stage in STAGES.items()}
    return seconds | {"other": metrics["indexer_resync_seconds_sum"] - sum(seconds.values())}


def _shares(seconds: Mapping[str, float]) -> Figures:
    total = sum(seconds.values())
    return {f"{stage}, %": value / total * 100 for stage, value in seconds.items()}


if __name__ == "__main__":
    main()
