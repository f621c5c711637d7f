"""Make the picture of the dashboard in docs/images/: `python -m docs.make_dashboard_picture`, some minutes.

Prometheus scrapes a daemon that indexes a local network with faults. It needs Prometheus
(tests/serve/install_prometheus.sh) and the extra `docs`.
"""

import asyncio
import re
import shutil
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import Any

import asyncpg
import httpx

from docs.dashboard_picture import Span, draw
from indexer.db.migrate import migrate
from indexer.demo.scenario import Scenario
from indexer.embedded import database
from indexer.net.server.address import Address
from indexer.serve.health import Listener
from indexer.telemetry.log import configure_logging
from tests import waiting
from tests.daemon.running_daemon import RunningDaemon, running_daemon
from tests.faulty_network import Fault, FaultyNetwork
from tests.waiting import until

COMMITS_PER_SECOND = 20.0
FAILING_ACCOUNTS = 12
FAILED_LOOKUPS = 6
PICTURE_ROWS = 4
PICTURE = Path(__file__).parent / "images" / "dashboard.png"
LISTENING = re.compile(r'msg="Listening on" address=(\S+)')
CONFIGURATION = """
global: {{scrape_interval: {seconds}s, evaluation_interval: {seconds}s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: indexer
    static_configs: [{{targets: [{targets}]}}]
"""


@dataclass(frozen=True, slots=True)
class PrometheusServer:
    """A running server; `url` is its address."""

    url: str

    async def get(self, path: str, **parameters: str | float) -> Any:
        """Return the data of an answer of the API; fail if it is an error."""
        async with httpx.AsyncClient(base_url=self.url) as client:
            answer = (await client.get(f"/api/v1/{path}", params=parameters)).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    async def is_ready(self) -> bool:
        """Return True if it answers queries: it listens earlier."""
        async with httpx.AsyncClient(base_url=self.url) as client:
            return (await client.get("/-/ready")).is_success

    async def has(self, query: str) -> bool:
        """Return True if the query has a result now."""
        return bool((await self.get("query", query=query))["result"])


@asynccontextmanager
async def prometheus_server(
    directory: Path, targets: Sequence[str], *, rules: Path | None = None, seconds: int = 1
) -> AsyncIterator[PrometheusServer]:
    """Scrape `targets` (host and port) every few `seconds`, as the job `indexer`, while the block runs."""
    program = shutil.which("prometheus")
    assert program is not None
    listed = ", ".join(f'"{target}"' for target in targets)
    (directory / "prometheus.yml").write_text(CONFIGURATION.format(rules=rules or "", targets=listed, seconds=seconds))
    process = await asyncio.create_subprocess_exec(
        program, f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/prometheus",
        "--web.listen-address=127.0.0.1:0", stdout=DEVNULL, stderr=PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    reading = None
    try:
        async with asyncio.timeout(waiting.TIMEOUT):
            address = await _address(process.stderr)
        reading = asyncio.create_task(process.stderr.read())  # a full pipe would stop the server
        server = PrometheusServer(f"http://{address}")
        await waiting.until(server.is_ready)
        yield server
    finally:
        process.terminate()
        await process.wait()
        if reading is not None:
            await reading


async def _address(log: asyncio.StreamReader) -> str:
    lines = []
    async for line in log:
        lines.append(line.decode())
        if found := LISTENING.search(lines[-1]):
            return found[1]
    raise AssertionError("".join(lines))


@asynccontextmanager
async def monitored_network(
    dsn: str, directory: Path, seconds: float, *, rules: Path | None = None, scrape_seconds: int = 1
) -> AsyncIterator[tuple[RunningDaemon, PrometheusServer, asyncio.Event]]:
    """Run a scenario of `seconds` with faults during the block, with a daemon and a Prometheus that scrapes it.

    Besides the account events of the scenario, a host answers with errors, the directory fails for a while, the relay
    sends malformed messages and is away for a moment, and one consumer of the change log reads nothing. The event that
    is yielded is set when all of this has happened.
    """
    async with AsyncExitStack() as stack:
        network = await stack.enter_async_context(FaultyNetwork(pds=3))
        for reader in ("feeds", "search"):  # before the start: the daemon looks at consumers once a minute
            await _execute(dsn, "select atproto.register_reader($1)", reader)
        daemon = await stack.enter_async_context(running_daemon(dsn, directory, network, resync_source="pds"))
        serving = daemon.stages.serve_http(Listener(Address("127.0.0.1", 0)))
        address = await stack.enter_async_context(serving)
        prometheus = await stack.enter_async_context(
            prometheus_server(directory, [str(address)], rules=rules, seconds=scrape_seconds)
        )
        await until(lambda: prometheus.has("up == 1"))  # the first scrape is no increase of a counter
        acted = asyncio.Event()
        acting = asyncio.create_task(_act(daemon, prometheus, seconds, acted))
        try:
            yield daemon, prometheus, acted
        finally:
            acting.cancel()
            with suppress(asyncio.CancelledError):
                await acting


async def _act(daemon: RunningDaemon, prometheus: PrometheusServer, seconds: float, acted: asyncio.Event) -> None:
    """Act, set the event when everything has happened, and go on reading changes."""
    network = daemon.network
    network.pdses[2].faults.append(Fault("", status=500, times=None))
    async with asyncio.TaskGroup() as tasks:
        scenario = tasks.create_task(_run_scenario(network, seconds))
        tasks.create_task(_read_changes(daemon, "feeds"))
        for number in range(FAILING_ACCOUNTS):
            await asyncio.sleep(seconds / 40)
            account = network.create_account(f"failing{number}.test", pds=2)
            daemon.lose_commit(account)
            daemon.inject("#commit", {"repo": account.did})
        await asyncio.sleep(seconds / 10)
        network.plc.faults.append(Fault("", status=500, times=FAILED_LOOKUPS))
        for number in range(FAILED_LOOKUPS):
            network.create_account(f"unknown{number}.test", pds=number % 2)
        await network.relay.stop()
        await until(lambda: prometheus.has('indexer_not_ready{code="relay-disconnected"}'))
        await network.relay.start()
        await scenario
        # The daemon counts with a small share of the time, so seldom if the database is slow.
        await daemon.stages.status_reading.count()
        acted.set()


async def _execute(dsn: str, statement: str, *values: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.fetch(statement, *values)
    finally:
        await connection.close()


async def _run_scenario(network: FaultyNetwork, seconds: float) -> None:
    await Scenario(network, accounts=40).run(seconds, COMMITS_PER_SECOND)


async def _read_changes(daemon: RunningDaemon, reader: str) -> None:
    while True:
        await daemon.execute("select atproto.next_changes($1, 1000)", reader)
        await asyncio.sleep(1)


async def _main(seconds: float) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        configure_logging("console", "error")
        async with database(None, directory) as dsn:
            await migrate(dsn)
            async with monitored_network(dsn, directory, seconds, scrape_seconds=3) as (_, prometheus, _):
                began = time()
                await asyncio.sleep(seconds)
                await asyncio.to_thread(draw, prometheus.url, PICTURE, Span(began, time()), rows=PICTURE_ROWS)


if __name__ == "__main__":
    asyncio.run(_main(float(sys.argv[1]) if len(sys.argv) > 1 else 300.0))
