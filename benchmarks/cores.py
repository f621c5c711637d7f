"""`python -m benchmarks.cores`: compare the native core with the Python core on the live path, in turns.

Two daemons, one with each core, receive the same stream, each with a Postgres of its own. They get each part of it one
after the other, and the one that begins changes from part to part. So a machine whose speed varies from minute to
minute affects both. The first part is not measured. At the end, both databases are compared with the expected result.
"""

import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median

import click

from benchmarks import database_rows, harness
from benchmarks.arrival_watch import watch_arrivals
from benchmarks.harness import DatabaseServer
from benchmarks.report import Figures, Report, generation_progress, machine, show
from benchmarks.turns import MIN_COMMITS, RATE, MeasuredDaemons, filled_database, open_floor, overall_rate
from benchmarks.workload import Workload, WorkloadSpec, load_workload
from indexer.telemetry.log import configure_logging

NATIVE, PYTHON = "native", "python"


@click.command()
@click.option("--repos", default=1_000, show_default=True, help="Number of repos with commits.")
@click.option("--records", default=1_200, show_default=True, help="Mean number of records of a repo.")
@click.option(
    "--parts", default=10, type=click.IntRange(1), show_default=True, help="Number of measured parts of the stream."
)
@click.option(
    "--commits",
    default=10_000,
    type=click.IntRange(MIN_COMMITS),
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
        daemons: dict[str, MeasuredDaemons] = {}
        databases: dict[str, DatabaseServer] = {}
        for core in (NATIVE, PYTHON):
            databases[core], daemons[core] = await stack.enter_async_context(_daemon(core, workload, directory))
        floor = await stack.enter_async_context(open_floor(workload, directory / "floor"))
        for part in range(parts + 1):
            numbers = range(part * commits + 1, (part + 1) * commits + 1)
            for core in (NATIVE, PYTHON) if part % 2 else (PYTHON, NATIVE):
                await daemons[core].process(numbers)
            await floor.process(numbers)
            if part == 0:
                daemons[NATIVE].forget()
                daemons[PYTHON].forget()
                floor.forget()
        changes = sum((Counter(account.changes) for account in workload.accounts), Counter[str]())
        differences = [
            f"{core} core: {difference}"
            for core, database in databases.items()
            for difference in await database_rows.find_differences(database.dsn, workload, changes)
        ]
    report: Report = {}
    for core, side in daemons.items():
        report[f"{core} core"] = {RATE: overall_rate(side.rates), **side.cpu_figures}
        report[f"floor and {core} core"] = floor.figures(side)
    return report | {"native core / Python core": _ratios(daemons[NATIVE].rates, daemons[PYTHON].rates)}, differences


@asynccontextmanager
async def _daemon(
    core: str, workload: Workload, directory: Path
) -> AsyncIterator[tuple[DatabaseServer, MeasuredDaemons]]:
    """Run a daemon with this core on a database of its own with the initial rows."""
    async with (
        harness.load_process("load_relay", workload) as load,
        filled_database(workload, directory / core, load.url) as database,
        harness.daemon(
            database.dsn, directory / f"{core} daemon", relays=load.url, start="oldest", roles="live", core=core
        ) as daemon,
    ):
        await load.wait_for_subscribers(1)
        await daemon.wait_until_counted()
        async with watch_arrivals(database.dsn, workload, [daemon]) as watch:
            pids = {"daemon": [daemon.process.pid], **database.servers}
            yield database, MeasuredDaemons(load, watch, pids)
            await daemon.stop()


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
