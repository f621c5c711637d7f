"""`python -m benchmarks.cores`: compare the native core with the Python core on the live path, in turns.

Two daemons, one with each core, receive the same stream, each with a Postgres of its own. They get each part of it one
after the other, and the one that begins changes from part to part. So a machine whose speed varies from minute to
minute affects both. The first part is not measured. At the end, both databases are compared with the expected result.
"""

import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import click

from benchmarks import cpu_usage, database_rows, harness
from benchmarks.arrival_watch import ArrivalWatch, watch_arrivals
from benchmarks.harness import Database, LoadProcess
from benchmarks.report import MICRO, Figures, Report, cpu_of, generation_progress, machine, show
from benchmarks.workload import Workload, WorkloadSpec, load_workload
from indexer.monitoring.log import configure_logging
from indexer.service.live.batch_writer import BATCH_SIZE
from indexer.sync.repo_state import SyncStatus

NATIVE, PYTHON = "native", "python"


@dataclass(slots=True)
class Side:
    """A daemon with one of the cores, its database, and what was measured.

    Attributes:
        database: Its own Postgres.
        load: The process that sends the stream to it.
        watch: Sees when its commits become visible.
        pids: The main processes by part: `daemon` and `Postgres`.
        rates: Commits per second, one number for each measured part.
        cpu: CPU seconds of the measured parts, by part of the side.
    """

    database: Database
    load: LoadProcess
    watch: ArrivalWatch
    pids: Mapping[str, Sequence[int]]
    rates: list[float] = field(default_factory=list)
    cpu: Counter[str] = field(default_factory=Counter)

    async def process(self, commits: range, *, measured: bool) -> None:
        """Send these commits at the maximum rate, and wait until all of them are visible."""
        before = self._cpu_seconds()
        await self.load.command(commits[0], commits[-1], 0)
        await self.watch.wait_for(commits)
        if measured:
            self.rates.append(self.watch.rate(commits))
            self.cpu.update(self._cpu_seconds())
            self.cpu.subtract(before)

    def _cpu_seconds(self) -> dict[str, float]:
        return {part: cpu_usage.cpu_seconds(pids) for part, pids in self.pids.items()}

    def figures(self, commits: int) -> Figures:
        """Return the rate of all measured parts together, and CPU time for each of `commits` commits."""
        cpu = {cpu_of(part, "commit"): seconds / commits * MICRO for part, seconds in self.cpu.items()}
        return {"commits/s, verified and durable": overall_rate(self.rates), **cpu}


@click.command()
@click.option("--repos", default=1_000, show_default=True, help="Number of repos with commits.")
@click.option("--records", default=1_200, show_default=True, help="Mean number of records of a repo.")
@click.option(
    "--parts", default=10, type=click.IntRange(1), show_default=True, help="Number of measured parts of the stream."
)
@click.option(
    "--commits",
    default=10_000,
    type=click.IntRange(2 * BATCH_SIZE),
    show_default=True,
    help="Number of commits of a part.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(repos: int, records: int, parts: int, commits: int, as_json: bool) -> None:
    """Compare the native core with the Python core on the live path, in turns.

    Exit code 1: a database differs from the expected result at the end.
    """
    spec = WorkloadSpec(repos, records, sigma=0.4, commits=(parts + 1) * commits)
    workload = load_workload(spec, generation_progress)
    configure_logging(level="warning")
    with tempfile.TemporaryDirectory(prefix="indexer-benchmark-") as directory:
        report, differences = asyncio.run(measure(workload, parts, commits, Path(directory)))
    show(report | {"machine": machine() | {"core": "both, in turns"}}, as_json=as_json)
    for difference in differences:
        click.echo(f"DIFFERENT: {difference}", err=True)
    sys.exit(1 if differences else 0)


async def measure(workload: Workload, parts: int, commits: int, directory: Path) -> tuple[Report, list[str]]:
    """Run the benchmark; return the figures, and the differences between databases and expected result."""
    async with AsyncExitStack() as stack:
        sides = {core: await stack.enter_async_context(_side(core, workload, directory)) for core in (NATIVE, PYTHON)}
        for part in range(parts + 1):
            numbers = range(part * commits + 1, (part + 1) * commits + 1)
            for core in (NATIVE, PYTHON) if part % 2 else (PYTHON, NATIVE):
                await sides[core].process(numbers, measured=part > 0)
        changes = sum((Counter(account.changes) for account in workload.accounts), Counter[str]())
        differences = [
            f"{core} core: {difference}"
            for core, side in sides.items()
            for difference in await database_rows.find_differences(side.database.dsn, workload, changes)
        ]
    report: Report = {f"{core} core": side.figures(parts * commits) for core, side in sides.items()}
    return report | {"native core / Python core": _ratios(sides[NATIVE].rates, sides[PYTHON].rates)}, differences


@asynccontextmanager
async def _side(core: str, workload: Workload, directory: Path) -> AsyncIterator[Side]:
    """Run a daemon with this core on a database of its own with the initial rows."""
    data = directory / core
    async with (
        harness.load_process("load_relay", workload) as load,
        harness.database(data) as database,
    ):
        await database_rows.insert_workload(database.dsn, workload, lambda _: load.url, status=SyncStatus.SYNCHRONIZED)
        await database_rows.vacuum_and_checkpoint(database.nodes)
        daemon = harness.daemon(
            database.dsn, directory / f"{core} daemon", relays=load.url, start="oldest", roles="live", core=core
        )
        async with daemon as running:
            await load.wait_for_subscribers(1)
            await running.wait_until_counted()
            async with watch_arrivals(database.dsn, workload, [running]) as watch:
                yield Side(database, load, watch, {"daemon": [running.process.pid], **database.servers})
                await running.stop()


def overall_rate(rates: Sequence[float]) -> float:
    """Return the rate of parts of equal size together."""
    return len(rates) / sum(1 / rate for rate in rates)


def _ratios(native: Sequence[float], python: Sequence[float]) -> Figures:
    ratios = sorted(one / other for one, other in zip(native, python, strict=True))
    return {
        "rates of all parts": overall_rate(native) / overall_rate(python),
        "rates of one part, smallest": ratios[0],
        "rates of one part, median": median(ratios),
        "rates of one part, largest": ratios[-1],
    }


if __name__ == "__main__":
    main()
