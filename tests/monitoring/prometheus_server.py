"""Run Prometheus' own server for a test, on loopback."""

import asyncio
import re
import shutil
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests import waiting

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
