"""`indexer demo`: the real daemon against a small signed network on loopback, and a comparison at the end.

The network is the project's own (`localnet`), its repositories are really signed, its trees are built apart from
the product's; the daemon runs on an embedded Postgres of its own, over real websockets and HTTP. The comparison
reads what AppViews read, the schema `atproto`, record by record.
"""

import asyncio
import tempfile
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from indexer.config import Settings
from indexer.health import serve_health
from indexer.localnet.load import Report, Scenario
from indexer.localnet.network import LocalNetwork
from indexer.run import Daemon, daemon
from indexer.store import Store
from indexer.store.embedded import database
from indexer.store.migrate import migrate

COMMITS_A_SECOND = 40.0
SETTLE_SECONDS = 30.0
REFRESH_SECONDS = 0.25
SHOWN = 10


@dataclass(frozen=True, slots=True)
class Comparison:
    """Network and database, record by record. `differences` are sentences; empty if the two are equal."""

    repos: int
    records: int
    differences: list[str]


async def demo(settings: Settings, seconds: float, console: Console | None = None) -> int:
    """Runs the demo for about `seconds`; 0 only if every repo is synchronized and equal."""
    console = console or Console(soft_wrap=True)
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="indexer-demo-")))
        console.print("Starting an embedded Postgres and a network of a directory, two hosts and a relay ...")
        dsn = await stack.enter_async_context(database(None, directory))
        await migrate(dsn)
        network = await stack.enter_async_context(LocalNetwork())
        settings = _settings(settings, network, directory)
        running = await stack.enter_async_context(daemon(settings, dsn))
        address = await stack.enter_async_context(serve_health(settings.http_bind, running, running.metrics.registry))
        console.print(f"The daemon reads {network.relay_url}; its metrics and status: http://{address}/")
        report, comparison = await _play(network, running, seconds, console)
    return _conclude(report, comparison, console)


def _settings(settings: Settings, network: LocalNetwork, directory: Path) -> Settings:
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


async def _play(network: LocalNetwork, running: Daemon, seconds: float, console: Console) -> tuple[Report, Comparison]:
    stop = asyncio.Event()
    scenario = Scenario(network)
    serving = asyncio.create_task(running.run(stop))
    playing = asyncio.create_task(scenario.run(seconds, COMMITS_A_SECOND))
    ends = monotonic() + seconds
    try:
        with Live(console=console, refresh_per_second=4, transient=True) as live:
            while not playing.done():
                _raise_if_ended(serving)
                live.update(await _picture(network, running, scenario.report, ends - monotonic()))
                await asyncio.wait([playing, serving], timeout=REFRESH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            deadline = monotonic() + SETTLE_SECONDS
            comparison = await compare(network, running.store)
            while (comparison.differences or not _read(network, running)) and monotonic() < deadline:
                _raise_if_ended(serving)
                live.update(await _picture(network, running, scenario.report, 0.0))
                await asyncio.wait([serving], timeout=REFRESH_SECONDS)
                comparison = await compare(network, running.store)
        return playing.result(), comparison
    finally:
        stop.set()
        playing.cancel()
        await serving


def _raise_if_ended(serving: asyncio.Task[None]) -> None:
    if serving.done():
        serving.result()


def _read(network: LocalNetwork, running: Daemon) -> bool:
    """Whether everything that the relay has sent is in the database."""
    return running.place.watermark.position == max((sent.seq for sent in network.relay.log), default=0)


async def compare(network: LocalNetwork, store: Store) -> Comparison:
    """What the network's accounts hold against what the face of the database shows."""
    truth = network.truth()
    differences = []
    shown = await store.visible_repos()
    differences += [f"{did} is {status} ({why})" for did, (status, why) in shown.items() if status != "synchronized"]
    differences += [f"{did} is missing" for did in truth.keys() - shown.keys()]
    differences += [f"{did} is shown, and the network doesn't" for did in shown.keys() - truth.keys()]
    for did in sorted(truth.keys() & shown.keys()):
        records = await store.visible_records(did)
        differences += [
            f"at://{did}/{path} is {_state(records.get(path))}, in the network {_state(truth[did].get(path))}"
            for path in sorted(records.keys() | truth[did].keys())
            if records.get(path) != truth[did].get(path)
        ]
    return Comparison(len(truth), sum(map(len, truth.values())), differences)


def _state(cid: bytes | None) -> str:
    return "absent" if cid is None else cid.hex()[-12:]


async def _picture(network: LocalNetwork, running: Daemon, report: Report, left: float) -> Group:
    counts = await running.store.counts()
    table = Table(title=f"indexer demo, {max(left, 0):.0f} s left" if left > 0 else "indexer demo, settling")
    table.add_column("")
    table.add_column("", justify="right")
    rows = {
        "sent by the relay": network.relay.seq,
        "saved up to": running.place.watermark.position or 0,
        "commits made": sum(report.commits.values()),
        **{f"repos {status}": count for status, count in counts.statuses.items()},
        "resyncs running": len(running.pool.running),
    }
    for name, value in rows.items():
        table.add_row(name, f"{value:,}")
    return Group(table, *(f"{happening.what}: {happening.evidence}" for happening in report.happenings))


def _conclude(report: Report, comparison: Comparison, console: Console) -> int:
    console.print(f"{report.accounts} accounts, commits {_counted(report.commits)}, operations {_counted(report.ops)}")
    for happening in report.happenings:
        console.print(f"  {happening.what}: {happening.evidence}", highlight=False)
    if not comparison.differences:
        console.print(
            f"[bold green]EQUAL[/]: {comparison.repos} repos synchronized, {comparison.records:,} records, "
            "each the same in the database and in the network."
        )
        return 0
    console.print(f"[bold red]DIFFERENT[/]: {len(comparison.differences)} differences")
    for difference in comparison.differences[:SHOWN]:
        console.print(f"  {difference}", highlight=False)
    return 1


def _counted(counter: Counter[str]) -> str:

    return ", ".join(f"{count:,} {name}" for name, count in sorted(counter.items()))
