"""Measure daemons and the floor in turns: each gets a part of the stream, then the next one gets the same part.

A machine whose speed varies from minute to minute affects all of them.
"""

from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import cpu_usage, database_rows, floor, harness
from benchmarks.arrival_watch import ArrivalWatch
from benchmarks.floor import BareScript, SignatureCheck
from benchmarks.harness import DatabaseServer, LoadProcess
from benchmarks.report import MICRO, Figures, cpu_of
from benchmarks.workload import Workload
from indexer.atproto.crypto import parse_did_key
from indexer.live.batch_writer import BATCH_SIZE
from indexer.sync.repo import SyncStatus

MIN_COMMITS = 2 * BATCH_SIZE
"""The least number of commits of a part. The rate is measured from the first batch to the last one."""
RATE = "commits/s, verified and durable"
FIRST_HOST, SECOND_HOST = "127.0.0.1", "localhost"
"""The host name in the URL of the relay, and in that of its second stream."""


@dataclass(slots=True)
class MeasuredDaemons:
    """One daemon, or several that share a stream, and what was measured.

    Attributes:
        load: The process that sends the stream to them.
        watch: Sees when their commits become visible.
        pids: The main processes by part: `daemon`, `Postgres`, and others if they are measured.
        rates: Commits per second, one number for each measured part.
        cpu: CPU seconds of the measured parts, by part of `pids`.
        commits: The number of measured commits.
    """

    load: LoadProcess
    watch: ArrivalWatch
    pids: Mapping[str, Sequence[int]]
    rates: list[float] = field(default_factory=list)
    cpu: Counter[str] = field(default_factory=Counter)
    commits: int = 0

    async def process(self, commits: range) -> None:
        """Send these commits at the maximum rate, on the first stream, and wait until all of them are visible."""
        before = self.cpu_seconds()
        await self.load.command(commits[0], commits[-1], 0, FIRST_HOST)
        await self.load.read("began")
        await self.watch.wait_for(commits)
        self.rates.append(self.watch.rate(commits))
        self.cpu.update(self.cpu_seconds())
        self.cpu.subtract(before)
        self.commits += len(commits)

    def forget(self) -> None:
        """Forget what was measured so far, because it was the warm-up."""
        self.rates.clear()
        self.cpu.clear()
        self.commits = 0

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU seconds of each part since the start of its processes."""
        return {part: cpu_usage.cpu_seconds(pids) for part, pids in self.pids.items()}

    @property
    def cpu_figures(self) -> Figures:
        """The CPU time for each measured commit, by part."""
        return {cpu_of(part, "commit"): seconds / self.commits * MICRO for part, seconds in self.cpu.items()}


@dataclass(slots=True)
class Floor:
    """Verifies the commits and writes their rows as cheaply as the libraries allow: see `benchmarks.floor`.

    Attributes:
        workload: The workload.
        checks: The signature check by DID.
        script: Writes to a database of its own.
        verification: CPU seconds of verification.
        commits: The number of measured commits.
    """

    workload: Workload
    checks: Mapping[str, SignatureCheck]
    script: BareScript
    verification: float = 0.0
    commits: int = 0

    async def process(self, commits: range) -> None:
        """Verify and write these commits."""
        messages = [floor.parse_message(frame, self.checks) for frame in self.workload.frames(commits)]
        batches = [
            floor.batch_statements(messages[start : start + BATCH_SIZE])
            for start in range(0, len(messages), BATCH_SIZE)
        ]
        self.verification += floor.verification_seconds([message.verification for message in messages])
        for batch in batches:
            await self.script.write(batch)
        self.commits += len(commits)

    def forget(self) -> None:
        """Forget what was measured so far, because it was the warm-up."""
        self.verification, self.commits = 0.0, 0
        self.script.clock.clear()

    def figures(self, daemons: MeasuredDaemons) -> Figures:
        """Return the floor, and the ratio of these daemons to it."""
        rate, verification = overall_rate(daemons.rates), self.verification / self.commits
        return floor.compare_with_floor(
            "commit", daemons.cpu_figures, rate, verification, self.script.clock, self.commits
        )


@asynccontextmanager
async def open_floor(workload: Workload, directory: Path) -> AsyncIterator[Floor]:
    """Prepare the floor, with a database of its own in this directory."""
    checks = {account.did: floor.signature_check(parse_did_key(account.key)) for account in workload.accounts}
    async with (
        filled_database(workload, directory, "") as database,
        floor.bare_script(database.dsn, lambda: cpu_usage.cpu_seconds(database.pids)) as script,
    ):
        yield Floor(workload, checks, script)


@asynccontextmanager
async def filled_database(workload: Workload, directory: Path, host: str) -> AsyncIterator[DatabaseServer]:
    """Run a database with the initial rows of the workload, all of whose repos are on this host."""
    async with harness.database(directory) as database:
        await database_rows.insert_workload(database.dsn, workload, lambda _: host, status=SyncStatus.SYNCHRONIZED)
        await database_rows.vacuum_and_checkpoint(database.nodes)
        yield database


def overall_rate(rates: Sequence[float]) -> float:
    """Return the rate of parts of equal size together."""
    return len(rates) / sum(1 / rate for rate in rates)
