"""The command `demo`: run the real daemon against a small signed network on loopback, and compare the two at the end.

The network is `indexer.demo`: its repos are really signed, and its trees are built by code that the indexer does
not use. The daemon runs on its own embedded Postgres and uses real websockets and HTTP. The comparison reads the public
schema `atproto`, as AppViews do. With `--serve`, the network is served for a daemon in another process or container.
"""

import asyncio
import tempfile
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from time import monotonic

import click
from rich.console import Console, Group
from rich.live import Live

from indexer.app.daemon import Daemon, open_daemon
from indexer.app.process_setup import StopRequest, stop_on_signals
from indexer.app.settings import DEMO_SETTINGS, Settings, load_from_environment
from indexer.cli.arguments import parse_listen_address
from indexer.cli.command import ExitCode, command
from indexer.cli.output import counts_text, fact_table
from indexer.concurrency.event_wait import wait_for_event
from indexer.db import Database
from indexer.db.migrate import migrate
from indexer.demo.local_network import LocalNetwork
from indexer.demo.scenario import Scenario
from indexer.embedded import database
from indexer.telemetry.log import configure_logging

COMMITS_PER_SECOND = 40.0
KEPT_COMMITS_PER_SECOND = 4.0
"""Rate of commits after the comparison, with `--keep`."""
SERVED_COMMITS_PER_SECOND = 5.0
"""With `--serve`: so slow that an hour of activity stays in the memory of the relay, which keeps every message."""
SETTLE_SECONDS = 30.0
"""Maximum time, after the activity, until the database equals the network."""
REFRESH_SECONDS = 0.25
STOP_SECONDS = 25.0
"""Maximum time from a signal to the end of the process, with `--keep` or `--serve`."""
MAX_LISTED_DIFFERENCES = 10


@command("demo", load=lambda _: load_from_environment(*DEMO_SETTINGS))
@click.option(
    "--seconds",
    default=30.0,
    show_default=True,
    type=click.FloatRange(5, 3_600),
    help="Duration of the activity in the network, in seconds.",
)
@click.option("--keep", is_flag=True, help="Continue to run after the comparison, until Ctrl-C.")
@click.option(
    "--serve",
    type=parse_listen_address,
    metavar="HOST:PORT",
    help="Run no daemon: serve the network at this address and the next three ports until SIGTERM or SIGINT. "
    "Its PDSes accept records from everybody.",
)
async def demo_command(settings: Settings, *, seconds: float, keep: bool, serve: tuple[str, int] | None) -> int:
    """Run the daemon against a small local network.

    At the end, database and network are compared. All hosts are on loopback, and all data is temporary. Settings have
    no effect, except INDEXER_LOG_FORMAT, INDEXER_LOG_LEVEL, INDEXER_CORE and INDEXER_VERIFY_THREADS. The exit code is
    0 only if every repo is synchronized and equal.
    """
    if serve is not None:
        return await serve_network(*serve, seconds)
    if "log_level" not in settings.model_fields_set:
        # The network causes warnings on purpose, and they would disturb the live table.
        configure_logging(settings.log_format, "error")
    return await demo(settings, seconds, keep=keep)


async def demo(settings: Settings, seconds: float, *, keep: bool) -> int:
    """Run the demo with `seconds` of activity. The exit code is 0 only if every repo is synchronized and equal.

    With `keep`, the network and the daemon continue to run afterwards, until SIGINT or SIGTERM.
    """
    console = Console(soft_wrap=True)
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="indexer-demo-")))
        console.print("Starting an embedded Postgres, and a network of a PLC directory, two PDSes and a relay ...")
        dsn = await stack.enter_async_context(database(None, directory))
        await migrate(dsn)
        network = await stack.enter_async_context(LocalNetwork())
        daemon = await stack.enter_async_context(open_daemon(_local_settings(settings, network, directory), dsn))
        address = await stack.enter_async_context(daemon.serve_http())
        console.print(f"The daemon verifies with the core {daemon.core.name} and consumes {network.relay_url}.")
        console.print(f"Status page and metrics: http://{address}/")
        console.print(f"The accounts act for {seconds:.0f} s. Then database and network are compared ...")
        scenario, stop = Scenario(network), StopRequest()
        serving = asyncio.create_task(daemon.run(stop))
        try:
            differences = await _until_equal(scenario, daemon, serving, seconds, console)
            _print_result(scenario, differences, console)
            if keep:
                console.print(f"Status page: http://{address}/ (Ctrl-C ends the demo)", highlight=False)
                console.print(f"  Look up an account: {next(iter(network.accounts))}", highlight=False)
                await _keep_acting(scenario, serving)
        finally:
            stop.set()
            await serving
    return ExitCode.FAILED if differences else ExitCode.OK


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


async def compare(network: LocalNetwork, db: Database) -> list[str]:
    """Compare the records of the network with the public views of the database; return a sentence per difference."""
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
    return differences


def _short_cid(cid: bytes | None) -> str:
    return "absent" if cid is None else cid.hex()[-12:]


async def _until_equal(
    scenario: Scenario, daemon: Daemon, serving: asyncio.Task[int], seconds: float, console: Console
) -> list[str]:
    """Let the accounts act, and wait until database and network are equal, at most `SETTLE_SECONDS`.

    Return their differences.
    """
    acting = asyncio.create_task(scenario.run(seconds, COMMITS_PER_SECOND))
    ends_at = monotonic() + seconds
    try:
        with Live(console=console, refresh_per_second=4, transient=True) as live:
            while True:
                position = daemon.streams[0].position.watermark.position or 0
                if acting.done():
                    acting.result()
                    differences = await compare(scenario.network, daemon.db)
                    equal = not differences and position == scenario.network.relay.seq
                    if equal or monotonic() >= ends_at + SETTLE_SECONDS:
                        return differences
                left = ends_at - monotonic()
                phase = f"{left:.0f} s left" if left > 0 else "waiting until database and network are equal"
                facts = {
                    "events sent by the relay": scenario.network.relay.seq,
                    "events stored up to": position,
                    "commits created": sum(scenario.report.commits.values()),
                    **{f"repos {name}": n for name, n in (await daemon.db.reports.counts()).statuses.items()},
                    "running resyncs": len(daemon.resync_pool.shares.running),
                }
                events = [f"{event.kind}: {event.detail}" for event in scenario.report.events]
                live.update(Group(f"indexer demo, {phase}", fact_table(facts), *events))
                await asyncio.wait([serving], timeout=REFRESH_SECONDS)
                if serving.done():
                    serving.result()  # raises the exception that ended the daemon
    finally:
        acting.cancel()


async def _keep_acting(scenario: Scenario, serving: asyncio.Task[int]) -> None:
    """Let the accounts continue to act, slowly, until SIGINT or SIGTERM."""
    stop = StopRequest()
    with stop_on_signals(stop, STOP_SECONDS):
        for step in count(1):
            if serving.done():
                serving.result()
            scenario.perform(step, 1)  # no account event is due after the last step
            if await wait_for_event(stop, 1 / KEPT_COMMITS_PER_SECOND):
                return


def _print_result(scenario: Scenario, differences: list[str], console: Console) -> None:
    report, repos = scenario.report, scenario.network.expected_records().values()
    commits, operations = counts_text(report.commits), counts_text(report.ops)
    console.print(f"{report.accounts} accounts, commits {commits}, operations {operations}")
    for event in report.events:
        console.print(f"  {event.kind}: {event.detail}", highlight=False)
    if not differences:
        records = sum(map(len, repos))
        console.print(
            f"[bold green]EQUAL[/]: {len(repos)} repos synchronized, {records:,} records, "
            "each the same in the database and in the network."
        )
        return
    console.print(f"[bold red]DIFFERENT[/], differences: {len(differences)}")
    for difference in differences[:MAX_LISTED_DIFFERENCES]:
        console.print(f"  {difference}", highlight=False)


async def serve_network(host: str, port: int, seconds: float) -> int:
    """Serve the network until a signal arrives. Accounts are active for `seconds`, and then the network is quiet."""
    stop = StopRequest()
    with stop_on_signals(stop, STOP_SECONDS):
        async with LocalNetwork(host=host, first_port=port) as network:
            for name, value in daemon_variables(network).items():
                click.echo(f"{name}={value}")
            active = asyncio.create_task(Scenario(network).run(seconds, SERVED_COMMITS_PER_SECOND))
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait([active, stopped], return_when=asyncio.FIRST_COMPLETED)
            if not stopped.done():
                commits = sum(active.result().commits.values())
                click.echo(f"The activity has ended after {commits} commits. The network is quiet.")
                await stopped
            active.cancel()
    return ExitCode.OK


def daemon_variables(network: LocalNetwork) -> dict[str, str]:
    """Return the settings that a daemon needs to index this network, as environment variables."""
    return {
        "INDEXER_RELAYS": network.relay_url,
        "INDEXER_PLC_URL": network.plc_url,
        "INDEXER_TRACK": "all",
        "INDEXER_START": "oldest",
        "INDEXER_ALLOW_PRIVATE_HOSTS": "true",
        "INDEXER_HANDLE_RATE": "0",  # its handles are in no DNS
    }
