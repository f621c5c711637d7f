"""`python -m benchmarks.feed`: measure events from committed rows to Jetstream subscribers, beside the live path.

One workload has two parts. While the first is sent at the maximum rate, nobody subscribes. While the second is sent,
one process with the role `feed` sends every event to all subscribers. The events of each subscriber are counted.
"""

import asyncio
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import click

from benchmarks import cpu_usage, database_rows, harness
from benchmarks.arrival_watch import ArrivalWatch, watch_arrivals
from benchmarks.harness import DaemonProcess, DatabaseServer, LoadProcess
from benchmarks.report import MIB, MICRO, Figures, Report, cpu_of, generation_progress, machine, show
from benchmarks.workload import Workload, WorkloadSpec, load_workload
from indexer.sync.repo import SyncStatus
from indexer.telemetry.log import configure_logging

_LOGGED = "select count(*) from indexer.change where collection is not null"
_LAST_TIME = """
    select (extract(epoch from time) * 1000000)::bigint + size - 1 from indexer.change_batch
    where first_seq is not null order by first_seq desc limit 1
"""


@click.command()
@click.option("--repos", default=1_000, show_default=True, help="Number of repos with commits.")
@click.option("--records", default=300, show_default=True, help="Mean number of records of a repo.")
@click.option("--commits", default=30_000, show_default=True, help="Number of commits in each of the two parts.")
@click.option("--subscribers", default=10, show_default=True, help="Number of subscribers.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(repos: int, records: int, commits: int, subscribers: int, as_json: bool) -> None:
    """Measure events per second from one process to all subscribers, and the rate of the live path in the same run.

    Exit code 1: a subscriber received its events in a wrong order.
    """
    workload = load_workload(WorkloadSpec(repos, records, sigma=0.4, commits=2 * commits), generation_progress)
    configure_logging(level="warning")
    with tempfile.TemporaryDirectory(prefix="indexer-benchmark-") as directory:
        report, ordered = asyncio.run(measure(workload, commits, subscribers, Path(directory)))
    show(report, as_json=as_json)
    sys.exit(0 if ordered else 1)


async def measure(workload: Workload, commits: int, subscribers: int, directory: Path) -> tuple[Report, bool]:
    """Run the benchmark; return the figures, and whether all events came in order."""
    async with harness.database(directory) as database, harness.load_process("load_relay", workload) as load:
        await database_rows.insert_workload(database.dsn, workload, lambda _: load.url, status=SyncStatus.SYNCHRONIZED)
        await database_rows.vacuum_and_checkpoint(database.nodes)
        settings = {"relays": load.url, "start": "oldest"}
        async with (
            harness.daemon(database.dsn, directory / "live", **settings, roles="live") as live,
            harness.daemon(database.dsn, directory / "feed", **settings, roles="feed") as feed,
            watch_arrivals(database.dsn, workload, [live]) as watch,
        ):
            await load.wait_for_subscribers(1)
            await live.wait_until_counted()
            alone = await _send(load, watch, range(1, commits + 1), [live, feed])
            logged = await _fetch(database, _LOGGED)
            async with _clients(feed, subscribers) as clients:
                fed = await _send(load, watch, range(commits + 1, 2 * commits + 1), [live, feed])
                await clients.command(await _fetch(database, _LAST_TIME))
                results = [await clients.read("result") for _ in range(subscribers)]
            fed_cpu = fed | {"feed": cpu_usage.cpu_seconds([feed.process.pid]) - fed["feed began"]}
            logged = await _fetch(database, _LOGGED) - logged
            memory = cpu_usage.peak_rss(feed.process.pid)
    report: Report = {
        "live path, nobody subscribes": _live(alone, commits),
        "live path, with subscribers": _live(fed, commits),
        f"one process with {subscribers} subscribers": _feed(fed_cpu, results, logged)
        | {"peak RSS, MiB": memory / MIB},
        "machine": machine(),
    }
    return report, all(result["ordered"] for result in results)


async def _fetch(database: DatabaseServer, statement: str) -> int:
    connection = await asyncpg.connect(database.dsn)
    value: int = await connection.fetchval(statement)
    await connection.close()
    return value


async def _send(
    load: LoadProcess, watch: ArrivalWatch, commits: range, daemons: Sequence[DaemonProcess]
) -> dict[str, float]:
    """Send commits at the maximum rate, wait until they are stored, and return the times and the CPU time."""
    live_began, feed_began = [cpu_usage.cpu_seconds([daemon.process.pid]) for daemon in daemons]
    await load.command(commits[0], commits[-1], 0)
    await watch.wait_for(commits)
    batches = Counter(watch.visible_at[number] for number in commits)
    first, last = min(batches), max(batches)
    return {
        "first": first,
        "last": last,
        "rate": (len(commits) - batches[first]) / (last - first) if last > first else 0.0,
        "live": cpu_usage.cpu_seconds([daemons[0].process.pid]) - live_began,
        "feed began": feed_began,
    }


def _live(run: Mapping[str, float], commits: int) -> Figures:
    return {"commits/s, verified and durable": run["rate"], cpu_of("daemon", "commit"): run["live"] / commits * MICRO}


def _feed(run: Mapping[str, float], results: Sequence[Mapping[str, float]], logged: int) -> Figures:
    """Return the figures of the subscriber that was the last to receive everything."""
    last = max(result["at"] for result in results)
    events = min(result["events"] for result in results)
    cpu = run["feed"] / logged
    return {
        "record changes logged": logged,
        "events received by each subscriber, at least": events,
        "events/s to each subscriber": events / (last - run["first"]),
        "events/s to all subscribers": sum(result["events"] for result in results) / (last - run["first"]),
        "behind the live path at the end, ms": (last - run["last"]) * 1_000,
        cpu_of("process", "logged change"): cpu * MICRO,
        "changes/s that one core could send to all": 1 / cpu,
    }


@asynccontextmanager
async def _clients(feed: DaemonProcess, count: int) -> AsyncIterator[LoadProcess]:
    """Run the subscribers in a separate process until the end of the block."""
    port = urlsplit(feed.url).port
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.feed_clients", str(port), str(count), stdin=PIPE, stdout=PIPE
    )
    clients = LoadProcess(process)
    try:
        await clients.read("subscribers")
        yield clients
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


if __name__ == "__main__":
    main()
