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

from benchmarks import cpu_usage, database_rows, floor, harness
from benchmarks.arrival_watch import ArrivalWatch, watch_arrivals
from benchmarks.floor import BareScript, SignatureCheck
from benchmarks.harness import Database, LoadProcess
from benchmarks.report import MICRO, Figures, Report, cpu_of, generation_progress, machine, show
from benchmarks.workload import Workload, WorkloadSpec, load_workload
from indexer.atproto.crypto import parse_did_key
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

    def figures(self, commits: int, floor_cpu: float) -> Figures:
        """Return the rate of all measured parts together, and CPU time for each of `commits` commits.

        Args:
            commits: The number of measured commits.
            floor_cpu: The CPU seconds of the floor for them.
        """
        return {
            "commits/s, verified and durable": overall_rate(self.rates),
            **{cpu_of(part, "commit"): seconds / commits * MICRO for part, seconds in self.cpu.items()},
            "floor CPU / daemon CPU, both with Postgres": floor_cpu / self.cpu.total(),
        }


@dataclass(slots=True)
class Floor:
    """Verifies the commits and writes their rows as cheaply as the libraries allow.

    Attributes:
        workload: The workload.
        checks: The signature check by DID.
        script: Writes to a database of its own.
        verification: CPU seconds of the measured parts.
        writing: CPU seconds of the measured parts: of the script and of Postgres.
    """

    workload: Workload
    checks: Mapping[str, SignatureCheck]
    script: BareScript
    verification: float = 0.0
    writing: float = 0.0

    async def process(self, commits: range, *, measured: bool) -> None:
        """Verify and write these commits."""
        messages = [floor.parse_message(frame, self.checks) for frame in self.workload.frames(commits)]
        batches = [
            floor.batch_statements(messages[start : start + BATCH_SIZE])
            for start in range(0, len(messages), BATCH_SIZE)
        ]
        before = sum(self.script.clock.cpu.values())
        verification = floor.verification_seconds([message.verification for message in messages])
        for batch in batches:
            await self.script.write(batch)
        if measured:
            self.verification += verification
            self.writing += sum(self.script.clock.cpu.values()) - before

    def figures(self, commits: int) -> Figures:
        """Return the CPU time for each of `commits` commits."""
        return {
            "verification, one core, µs per commit": self.verification / commits * MICRO,
            "bare script with Postgres, µs per commit": self.writing / commits * MICRO,
        }


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
        lower_bound = await stack.enter_async_context(_floor(workload, directory / "floor"))
        for part in range(parts + 1):
            numbers = range(part * commits + 1, (part + 1) * commits + 1)
            for core in (NATIVE, PYTHON) if part % 2 else (PYTHON, NATIVE):
                await sides[core].process(numbers, measured=part > 0)
            await lower_bound.process(numbers, measured=part > 0)
        changes = sum((Counter(account.changes) for account in workload.accounts), Counter[str]())
        differences = [
            f"{core} core: {difference}"
            for core, side in sides.items()
            for difference in await database_rows.find_differences(side.database.dsn, workload, changes)
        ]
    floor_cpu = lower_bound.verification + lower_bound.writing
    report: Report = {f"{core} core": side.figures(parts * commits, floor_cpu) for core, side in sides.items()}
    report["floor"] = lower_bound.figures(parts * commits)
    return report | {"native core / Python core": _ratios(sides[NATIVE].rates, sides[PYTHON].rates)}, differences


@asynccontextmanager
async def _side(core: str, workload: Workload, directory: Path) -> AsyncIterator[Side]:
    """Run a daemon with this core on a database of its own with the initial rows."""
    async with (
        harness.load_process("load_relay", workload) as load,
        _filled_database(workload, directory / core, load.url) as database,
        harness.daemon(
            database.dsn, directory / f"{core} daemon", relays=load.url, start="oldest", roles="live", core=core
        ) as daemon,
    ):
        await load.wait_for_subscribers(1)
        await daemon.wait_until_counted()
        async with watch_arrivals(database.dsn, workload, [daemon]) as watch:
            yield Side(database, load, watch, {"daemon": [daemon.process.pid], **database.servers})
            await daemon.stop()


@asynccontextmanager
async def _floor(workload: Workload, directory: Path) -> AsyncIterator[Floor]:
    checks = {account.did: floor.signature_check(parse_did_key(account.key)) for account in workload.accounts}
    async with (
        _filled_database(workload, directory, "") as database,
        floor.bare_script(database.dsn, lambda: cpu_usage.cpu_seconds(database.pids)) as script,
    ):
        yield Floor(workload, checks, script)


@asynccontextmanager
async def _filled_database(workload: Workload, directory: Path, host: str) -> AsyncIterator[Database]:
    """Run a database with the initial rows of the workload, all of whose repos are on this host."""
    async with harness.database(directory) as database:
        await database_rows.insert_workload(database.dsn, workload, lambda _: host, status=SyncStatus.SYNCHRONIZED)
        await database_rows.vacuum_and_checkpoint(database.nodes)
        yield database


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
