"""Run the real daemon against a small signed network on loopback, and compare the two at the end.

The network is `indexer.demo`: its repos are really signed, and its trees are built by code that the indexer does
not use. The daemon runs on its own embedded Postgres and uses real websockets and HTTP. The comparison reads the public
schema `atproto`, as AppViews do.
"""

import asyncio
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from time import monotonic

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from indexer.app.daemon import Daemon, open_daemon
from indexer.app.process_setup import StopRequest, stop_on_signals
from indexer.app.settings import Settings
from indexer.cli.command import ExitCode
from indexer.db import Database
from indexer.db.migrate import migrate
from indexer.db.schema_version import has_repos
from indexer.demo.local_network import LocalNetwork
from indexer.demo.scenario import Scenario, ScenarioReport
from indexer.embedded import database
from indexer.errors import SettingsError

COMMITS_PER_SECOND = 40.0
SETTLE_SECONDS = 30.0
"""Maximum time, after the activity, until the database equals the network."""
REFRESH_SECONDS = 0.25
KEPT_COMMITS_PER_SECOND = 4.0
"""Rate of commits after the comparison, with `--keep`."""
STOP_SECONDS = 25.0
"""Maximum time from a signal to the end of the process, with `--keep`."""
MAX_LISTED_DIFFERENCES = 10


@dataclass(frozen=True, slots=True)
class NetworkComparison:
    """The comparison of a local network with the database.

    Attributes:
        repos: Number of repos in the network.
        records: Number of records in the network.
        differences: One sentence for each difference.
    """

    repos: int
    records: int
    differences: list[str]


async def demo(
    settings: Settings, seconds: float, console: Console | None = None, *, keep: bool = False, url: str | None = None
) -> int:
    """Run the demo with `seconds` of activity. The exit code is 0 only if every repo is synchronized and equal.

    With `keep`, the network and the daemon continue to run afterwards, until SIGINT or SIGTERM. `url` is a database
    without repos; None for an embedded one.

    Raises:
        SettingsError: The database has repos.
    """
    console = console or Console(soft_wrap=True)
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="indexer-demo-")))
        server = "an embedded Postgres, and " if url is None else ""
        console.print(f"Starting {server}a network of a PLC directory, two PDSes and a relay ...")
        dsn = await stack.enter_async_context(database(url, directory))
        await _require_no_repos(dsn)
        await migrate(dsn)
        network = await stack.enter_async_context(LocalNetwork())
        settings = _local_settings(settings, network, directory)
        daemon = await stack.enter_async_context(open_daemon(settings, dsn))
        address = await stack.enter_async_context(daemon.serve_http())
        console.print(f"The daemon verifies with the core {daemon.core.name} and consumes {network.relay_url}.")
        console.print(f"Status page and metrics: http://{address}/")
        console.print(f"The accounts act for {seconds:.0f} s. Then database and network are compared ...")
        serving = await stack.enter_async_context(_running(daemon))
        scenario = Scenario(network)
        comparison = await _run_scenario(network, daemon, serving, scenario, seconds, console)
        code = _print_result(scenario.report, comparison, console)
        _print_status_page(f"http://{address}/" if keep else None, next(iter(network.accounts)), console)
        if keep:
            await _keep_running(scenario, serving)
    return code


async def _require_no_repos(dsn: str) -> None:
    if await has_repos(dsn):
        raise SettingsError("the database has repos: the demo needs one without, in which it can write its own")


@asynccontextmanager
async def _running(daemon: Daemon) -> AsyncIterator[asyncio.Task[int]]:
    """Run the daemon during the block; yield its task."""
    stop = StopRequest()
    serving = asyncio.create_task(daemon.run(stop))
    try:
        yield serving
    finally:
        stop.set()
        await serving


async def compare(network: LocalNetwork, db: Database) -> NetworkComparison:
    """Compare the records of the network with the public views of the database."""
    expected = network.expected_records()
    visible = await db.reports.visible_repos()
    differences = [
        f"{did} is {status} ({reason})" for did, (status, reason) in visible.items() if status != "synchronized"
    ]
    differences += [f"{did} is missing in the database" for did in expected.keys() - visible.keys()]
    differences += [f"{did} is visible, but not in the network" for did in visible.keys() - expected.keys()]
    for did in sorted(expected.keys() & visible.keys()):
        records = await db.reports.visible_records(did)
        differences += [
            f"at://{did}/{path} is {_short_cid(records.get(path))}, "
            f"in the network {_short_cid(expected[did].get(path))}"
            for path in sorted(records.keys() | expected[did].keys())
            if records.get(path) != expected[did].get(path)
        ]
    return NetworkComparison(len(expected), sum(map(len, expected.values())), differences)


def _local_settings(settings: Settings, network: LocalNetwork, directory: Path) -> Settings:
    local = {
        "database_url": None,
        "data_dir": directory,
        "relays": (network.relay_url,),
        "plc_url": (network.plc_url,),
        "start": "oldest",
        "allow_private_hosts": True,
        "plc_rate": 1_000.0,
        "handle_rate": 0.0,
        "host_rate": 1_000.0,
        "outbound_rate": 1_000.0,
        "http_bind": settings.http_bind._replace(port=0),
    }
    return settings.model_copy(update=local)


async def _run_scenario(
    network: LocalNetwork,
    daemon: Daemon,
    serving: asyncio.Task[int],
    scenario: Scenario,
    seconds: float,
    console: Console,
) -> NetworkComparison:
    """Run the scenario, and wait until database and network are equal, at most `SETTLE_SECONDS`."""
    acting = asyncio.create_task(scenario.run(seconds, COMMITS_PER_SECOND))
    ends_at = monotonic() + seconds
    try:
        with Live(console=console, refresh_per_second=4, transient=True) as live:
            while not acting.done():
                _raise_if_ended(serving)
                live.update(await _live_table(network, daemon, scenario.report, ends_at - monotonic()))
                await asyncio.wait([acting, serving], timeout=REFRESH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            acting.result()
            deadline = monotonic() + SETTLE_SECONDS
            comparison = await compare(network, daemon.db)
            while (comparison.differences or not _all_events_stored(network, daemon)) and monotonic() < deadline:
                _raise_if_ended(serving)
                live.update(await _live_table(network, daemon, scenario.report, 0.0))
                await asyncio.wait([serving], timeout=REFRESH_SECONDS)
                comparison = await compare(network, daemon.db)
        return comparison
    finally:
        acting.cancel()


async def _keep_running(scenario: Scenario, serving: asyncio.Task[int]) -> None:
    """Let the accounts continue to act, slowly, until SIGINT or SIGTERM."""
    stop = StopRequest()
    with stop_on_signals(stop, STOP_SECONDS):
        for step in count(1):
            _raise_if_ended(serving)
            scenario.perform(step, 1)  # no account event is due after the last step
            with suppress(TimeoutError):
                async with asyncio.timeout(1 / KEPT_COMMITS_PER_SECOND):
                    await stop.wait()
            if stop.is_set():
                return


def _raise_if_ended(serving: asyncio.Task[int]) -> None:
    if serving.done():
        serving.result()


def _all_events_stored(network: LocalNetwork, daemon: Daemon) -> bool:
    last_seq = max((sent.seq for sent in network.relay.log), default=0)
    return daemon.stream_position.watermark.position == last_seq


def _short_cid(cid: bytes | None) -> str:
    return "absent" if cid is None else cid.hex()[-12:]


async def _live_table(network: LocalNetwork, daemon: Daemon, report: ScenarioReport, seconds_left: float) -> Group:
    counts = await daemon.db.reports.counts()
    phase = f"{seconds_left:.0f} s left" if seconds_left > 0 else "waiting until database and network are equal"
    table = Table(title=f"indexer demo, {phase}")
    table.add_column("")
    table.add_column("", justify="right")
    rows = {
        "events sent by the relay": network.relay.seq,
        "events stored up to": daemon.stream_position.watermark.position or 0,
        "commits created": sum(report.commits.values()),
        **{f"repos {status}": count for status, count in counts.statuses.items()},
        "running resyncs": len(daemon.resync_pool.running),
    }
    for name, value in rows.items():
        table.add_row(name, f"{value:,}")
    return Group(table, *(f"{event.kind}: {event.detail}" for event in report.events))


def _print_result(report: ScenarioReport, comparison: NetworkComparison, console: Console) -> int:
    console.print(f"{report.accounts} accounts, commits {_counts(report.commits)}, operations {_counts(report.ops)}")
    for event in report.events:
        console.print(f"  {event.kind}: {event.detail}", highlight=False)
    if not comparison.differences:
        console.print(
            f"[bold green]EQUAL[/]: {comparison.repos} repos synchronized, {comparison.records:,} records, "
            "each the same in the database and in the network."
        )
        return ExitCode.OK
    console.print(f"[bold red]DIFFERENT[/], differences: {len(comparison.differences)}")
    for difference in comparison.differences[:MAX_LISTED_DIFFERENCES]:
        console.print(f"  {difference}", highlight=False)
    return ExitCode.FAILED


def _print_status_page(address: str | None, did: str, console: Console) -> None:
    """Say where the status page is, if it is still served, and what to look at."""
    if address is None:
        console.print("Status page: run `indexer demo --keep`, which continues to run, and open the address it prints.")
    else:
        console.print(f"Status page: {address} (Ctrl-C ends the demo)", highlight=False)
    console.print("  Look at the first line (ready or not, and why), lag and rates of the last hour, repos by state,")
    console.print("  resyncs in progress, failing hosts, dead letters, and consumers of the change log.")
    console.print(f"  Look up an account: {did}", highlight=False)


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counter.items()))
