"""`python -m benchmarks.resync`: exports of whole repos to rows, through the real daemon.

Either nothing is stored yet, or, with `--stored`, everything but one record in a hundred. Some repos are left out and
then resynchronized one stage after the other in this process, for what each costs. In the end the database must equal
the world.
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

from benchmarks import floor, stand, tables, usage
from benchmarks.host import host_of
from benchmarks.report import MIB, MICRO, Figures, Report, costs, cpu_of, machine, making, show
from benchmarks.resync_stages import STAGES, resyncs
from benchmarks.stand import BenchmarkError, Daemon, Database, Load
from benchmarks.world import Account, Spec, World, load_world
from indexer.atproto.crypto import parse_did_key
from indexer.log import configure_logging
from indexer.store import Store
from indexer.sync.repo import SyncStatus

SIGMA = 1.5  # of the sizes' logarithms: half of the repos have less than a third of the mean
HUGE_PATIENCE = 600.0  # seconds, for the one resync that is left

_WAITING = """
    select count(*) from indexer.repo
    where status = 'desynchronized' and active and coalesce(next_attempt_at, '-infinity'::timestamptz) < 'infinity'
"""
_LEFT = f"select ({_WAITING}) + (select count(*) from indexer.repo where status = 'in-progress')"
_CHUNKS = "select count(*) from indexer.change where collection is not null and not live group by segment, batch"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is stored already and beside, how many resyncs run at once in how many daemons, how many repos are left to
    this process.
    """

    stored: bool
    staged: int
    workers: int
    processes: int
    idle_repos: int
    idle_records: int


@click.command()
@click.option("--repos", default=400, show_default=True, help="Repos to resynchronize.")
@click.option("--records", default=1_200, show_default=True, help="Records of each, on average.")
@click.option("--huge", is_flag=True, help="One more repo, of a million records.")
@click.option("--stored", is_flag=True, help="All records are stored already, but one in a hundred differs.")
@click.option("--staged", default=40, show_default=True, help="Of the repos, those resynchronized stage by stage.")
@click.option("--workers", default=8, show_default=True, help="Resyncs at once.")
@click.option("--processes", default=1, show_default=True, help="Daemons that share the work.")
@tables.idle_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(repos: int, records: int, huge: bool, as_json: bool, **plan: Any) -> None:
    """Records a second from exports to rows; exit code 1 if the database isn't the world's in the end."""
    if plan["staged"] >= repos + huge:
        raise click.UsageError("--staged must leave repos for the daemons")
    world = load_world(Spec(repos, records, SIGMA, huge=1_000_000 * huge, exports=True), making)
    configure_logging(level="warning")
    with tempfile.TemporaryDirectory(prefix="indexer-benchmark-") as directory:
        report, wrong = asyncio.run(measure(world, Plan(**plan), Path(directory)))
    show(report, as_json=as_json)
    for difference in wrong:
        click.echo(f"DIFFERENT: {difference}", err=True)
    sys.exit(1 if wrong else 0)


async def measure(world: World, plan: Plan, directory: Path) -> tuple[Report, list[str]]:
    """The figures, and what the database has otherwise than the world."""
    staged, others = world.accounts[: plan.staged], world.accounts[plan.staged :]
    async with stand.database(directory) as database, stand.load("host", world) as load:
        await _fill(database.dsn, world, plan, await load.told("hosts"))
        report = await _through_daemons(others, plan, database, load, directory)
        report["one after the other"] = await _in_stages(staged, database.dsn, load, directory)
        report["floor"] = await _floor(report["resyncs"], world, plan, database)
        changes = sum((Counter(account.changes) for account in world.accounts), Counter[str]())
        if not plan.stored:
            changes = Counter({"create": _records(world.accounts)})
        wrong = await tables.differences(database.dsn, world, changes)
    return report | {"machine": machine()}, wrong


async def _fill(dsn: str, world: World, plan: Plan, hosts: Sequence[str]) -> None:
    """All repos wait for a resync, and none is due before it is let go."""
    if plan.stored:
        await tables.fill(dsn, world, partial(host_of, hosts=hosts), status=SyncStatus.DESYNCHRONIZED)
    else:
        store = await Store.open(dsn)
        await store.add([account.did for account in world.accounts])
        await store.close()
    await tables.hold_back(dsn)
    await tables.add_idle(dsn, world, plan.idle_repos, plan.idle_records)
    await tables.settle(dsn)


async def _through_daemons(
    accounts: Sequence[Account], plan: Plan, database: Database, load: Load, directory: Path
) -> Report:
    async with AsyncExitStack() as stack:
        daemons = [
            await stack.enter_async_context(
                stand.daemon(
                    database.dsn,
                    directory / f"daemon {index}",
                    roles="resync",
                    shard=f"{index}/{plan.processes}",
                    plc_url=load.url,
                    resync_source="pds",
                    resync_workers=plan.workers,
                    **dict.fromkeys(("plc_rate", "host_rate", "host_concurrency", "outbound_rate"), 100_000),
                )
            )
            for index in range(plan.processes)
        ]
        for daemon in daemons:
            await daemon.counted()
        parts = {"daemon": [daemon.process.pid for daemon in daemons], "Postgres": [database.pid]}
        parts["load"] = [load.process.pid]
        before = {name: usage.cpu_seconds(pids) for name, pids in parts.items()}
        passed = await _synchronized(database.dsn, [account.did for account in accounts], daemons)
        used = {name: usage.cpu_seconds(pids) - before[name] for name, pids in parts.items()}
        peak = max(map(usage.peak_rss, parts["daemon"]))
        metrics = await stand.sum_metrics(daemons)
        for daemon in daemons:
            await daemon.stop()
    speed = _speed(accounts, passed, used) | await _chunks(database.dsn)
    return {
        "resyncs": speed | {"peak RSS of the daemon, MiB": peak / MIB},
        "the daemon's own clocks": costs("record", _clocks(metrics), _records(accounts)),
        "share of a resync's time": _shares(_clocks(metrics)),
    }


async def _synchronized(dsn: str, dids: Sequence[str], daemons: Sequence[Daemon]) -> float:
    """Lets these repos go; seconds from the first claim until all are synchronized, or given up.

    Raises `BenchmarkError` if none becomes so for long, or a daemon ends.
    """
    connection = await asyncpg.connect(dsn)
    await tables.let_go(dsn, dids)
    while await connection.fetchval(_WAITING) == len(dids):  # noqa: ASYNC110 - another process changes it
        await asyncio.sleep(0.005)
    began = moved = monotonic()
    before = -1
    while left := await connection.fetchval(_LEFT):
        for daemon in daemons:
            daemon.check()
        moved, before = (moved if left == before else monotonic()), left
        if monotonic() - moved > HUGE_PATIENCE:
            raise BenchmarkError(f"{left} repos are not synchronized")
        await asyncio.sleep(0.02)
    await connection.close()
    return monotonic() - began


async def _in_stages(accounts: Sequence[Account], dsn: str, load: Load, directory: Path) -> Figures:
    await tables.let_go(dsn, [account.did for account in accounts])
    gc.freeze()
    async with resyncs(dsn, load.url, directory / "spool") as running:
        return costs("record", await running.run(), _records(accounts))


async def _floor(speed: Figures, world: World, plan: Plan, database: Database) -> Figures:
    """The same changes to the same rows."""
    gc.freeze()
    verifiers = {account.did: floor.verifier(parse_did_key(account.key)) for account in world.accounts}
    proofs = [
        floor.prove_export(world.exports[slice(*account.export)], verifiers[account.did]) for account in world.accounts
    ]
    async with floor.script(database.dsn, lambda: usage.cpu_seconds([database.pid])) as script:
        if plan.stored:
            await script.copy(world.directory / "rows")
        heads = {account.did: floor.head_row(account) for account in world.accounts}
        async for changes in floor.written(database.dsn, list(heads)):
            dids = {did for _, (did, *_) in changes} & heads.keys()
            await script.rewrite([heads.pop(did) for did in sorted(dids)], changes)
    records = _records(world.accounts)
    return floor.compared("record", speed, float(speed["records/s"]), sum(proofs) / records, script.clock, records)


def _records(accounts: Sequence[Account]) -> int:
    return sum(account.records for account in accounts)


def _speed(accounts: Sequence[Account], passed: float, used: Mapping[str, float]) -> Figures:
    records = _records(accounts)
    return {
        "repos/s": len(accounts) / passed,
        "records/s": records / passed,
        "MB/s": sum(end - start for start, end in (account.export for account in accounts)) / passed / 1e6,
        "seconds": passed,
        **{cpu_of(name, "record"): seconds / records * MICRO for name, seconds in used.items()},
    }


async def _chunks(dsn: str) -> Figures:
    connection = await asyncpg.connect(dsn)
    sizes = [row[0] for row in await connection.fetch(_CHUNKS)]
    await connection.close()
    return {"records a write, median": median(sizes), "records a write, most": max(sizes)}


def _clocks(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds of all resyncs, which overlap, by stage, waiting for a core or the database included."""
    clocks = {stage: metrics[f"indexer_batch_seconds_sum {name}"] for name, stage in STAGES.items()}
    return clocks | {"the rest": metrics["indexer_resync_seconds_sum"] - sum(clocks.values())}


def _shares(clocks: Mapping[str, float]) -> Figures:
    whole = sum(clocks.values())
    return {f"{stage}, %": seconds / whole * 100 for stage, seconds in clocks.items()}


if __name__ == "__main__":
    main()
