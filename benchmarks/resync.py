"""`python -m benchmarks.resync`: exports of whole repos to rows, through the real daemon.

Either nothing is stored yet, or, with `--stored`, everything but one record in a hundred. In the end the database must
equal the world.
"""

import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from time import monotonic

import asyncpg
import click

from benchmarks import floor, stand, tables, usage
from benchmarks.host import host_of
from benchmarks.report import MIB, MICRO, Figures, Report, machine, making, show
from benchmarks.stand import BenchmarkError, Daemon, Database, Load
from benchmarks.world import Spec, World, load_world
from indexer.log import configure_logging
from indexer.store import Store
from indexer.sync.repo import SyncStatus

SIGMA = 1.5  # of the sizes' logarithms: half of the repos have less than a third of the mean
STAGES = ("fetch", "verify-export", "diff", "apply-export")
HUGE_PATIENCE = 600.0  # seconds, for the one resync that is left
_LEFT = "select count(*) from indexer.repo where status <> 'synchronized'"


@click.command()
@click.option("--repos", default=400, show_default=True, help="Repos to resynchronize.")
@click.option("--records", default=1_200, show_default=True, help="Records of each, on average.")
@click.option("--huge", is_flag=True, help="One more repo, of a million records.")
@click.option("--stored", is_flag=True, help="All records are stored already, but one in a hundred differs.")
@click.option("--workers", default=8, show_default=True, help="Resyncs at once.")
@click.option("--processes", default=1, show_default=True, help="Daemons that share the work.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(repos: int, records: int, huge: bool, stored: bool, workers: int, processes: int, as_json: bool) -> None:
    """Records a second from exports to rows; exit code 1 if the database isn't the world's in the end."""
    world = load_world(Spec(repos, records, SIGMA, huge=1_000_000 * huge, exports=True), making)
    configure_logging(level="warning")
    with tempfile.TemporaryDirectory(prefix="indexer-benchmark-") as directory:
        report, wrong = asyncio.run(measure(world, Path(directory), stored=stored, workers=workers, count=processes))
    show(report, as_json=as_json)
    for difference in wrong:
        click.echo(f"DIFFERENT: {difference}", err=True)
    sys.exit(1 if wrong else 0)


async def measure(world: World, directory: Path, *, stored: bool, workers: int, count: int) -> tuple[Report, list[str]]:
    """The figures, and what the database has otherwise than the world."""
    async with stand.database(directory) as database, stand.load("host", world) as load:
        hosts = await load.told("hosts")
        if stored:
            pds_of = partial(host_of, hosts=hosts)
            await tables.fill(database.dsn, world, pds_of, status=SyncStatus.DESYNCHRONIZED)
        else:
            store = await Store.open(database.dsn)
            await store.add([account.did for account in world.accounts])
            await store.close()
        await tables.settle(database.dsn)
        report = await _through_daemons(world, database, load, directory, workers, count)

        proof = floor.read_exports(world.exports[slice(*account.export)] for account in world.accounts)
        used = usage.cpu_seconds([database.pid])
        passed, rows = await floor.copy(database.dsn, world.directory / "rows")
        used = usage.cpu_seconds([database.pid]) - used
        report["floor"] = _floor(report["resyncs"], proof / _records(world), passed / rows, used / rows)

        changes = sum((Counter(account.changes) for account in world.accounts), Counter[str]())
        if not stored:
            changes = Counter({"create": _records(world)})
        wrong = await tables.differences(database.dsn, world, changes)
    return report | {"machine": machine()}, wrong


async def _through_daemons(
    world: World, database: Database, load: Load, directory: Path, workers: int, count: int
) -> Report:
    async with AsyncExitStack() as stack:
        daemons = [
            await stack.enter_async_context(
                stand.daemon(
                    database.dsn,
                    directory / f"daemon {index}",
                    roles="resync",
                    shard=f"{index}/{count}",
                    plc_url=load.url,
                    resync_source="pds",
                    resync_workers=workers,
                    **dict.fromkeys(("plc_rate", "host_rate", "host_concurrency", "outbound_rate"), 100_000),
                )
            )
            for index in range(count)
        ]
        parts = {"daemon": [daemon.process.pid for daemon in daemons], "Postgres": [database.pid]}
        parts["load"] = [load.process.pid]
        began, before = monotonic(), {name: usage.cpu_seconds(pids) for name, pids in parts.items()}
        await _synchronized(database.dsn, daemons)
        passed = monotonic() - began
        used = {name: usage.cpu_seconds(pids) - before[name] for name, pids in parts.items()}
        peak = max(map(usage.peak_rss, parts["daemon"]))
        metrics = await stand.sum_metrics(daemons)
        for daemon in daemons:
            await daemon.stop()
    return {
        "resyncs": _speed(world, passed, used) | {"peak RSS of the daemon, MiB": peak / MIB},
        "share of a resync's time": _shares(metrics),
    }


async def _synchronized(dsn: str, daemons: Sequence[Daemon]) -> None:
    """Waits until every repo is. Raises `BenchmarkError` if none becomes so for long, or a daemon ends."""
    connection = await asyncpg.connect(dsn)
    moved, before = monotonic(), -1
    while left := await connection.fetchval(_LEFT):
        for daemon in daemons:
            daemon.check()
        moved, before = (moved if left == before else monotonic()), left
        if monotonic() - moved > HUGE_PATIENCE:
            raise BenchmarkError(f"{left} repos are not synchronized")
        await asyncio.sleep(0.02)
    await connection.close()


def _records(world: World) -> int:
    return sum(account.records for account in world.accounts)


def _speed(world: World, passed: float, used: Mapping[str, float]) -> Figures:
    records = _records(world)
    return {
        "repos/s": len(world.accounts) / passed,
        "records/s": records / passed,
        "MB/s": len(world.exports) / passed / 1e6,
        "seconds": passed,
        **{f"CPU of the {name}, µs per record": seconds / records * MICRO for name, seconds in used.items()},
    }


def _shares(metrics: Mapping[str, float]) -> Figures:
    """Of the time of all resyncs, which overlap: what each stage took, waiting for a core included."""
    whole = metrics["indexer_resync_seconds_sum"]
    stages = {stage: metrics.get(f"indexer_batch_seconds_sum {stage}") for stage in STAGES}
    shares = {stage: seconds / whole * 100 for stage, seconds in stages.items() if seconds is not None}
    shares["the rest"] = 100 - sum(shares.values())
    return {f"{stage}, %": share for stage, share in shares.items()}


def _floor(speed: Figures, proof: float, passed: float, used: float) -> Figures:
    """Seconds a record: of one core for the proof; of the clock, and of Postgres, for the rows."""
    rate = float(speed["records/s"])
    ours = sum(float(speed[f"CPU of the {name}, µs per record"]) for name in ("daemon", "Postgres"))
    return {
        "hash and decode alone, one core, µs per record": proof * MICRO,
        "rows alone, by the clock, µs per record": passed * MICRO,
        "our rate to that of hash and decode on one core": rate * proof,
        "our rate to that of COPY": rate * passed,
        "CPU of the floor to ours, Postgres included": (proof + used) * MICRO / ours,
    }


if __name__ == "__main__":
    main()
