"""The health checks of a daemon, as an orchestrator sees them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from indexer.net.server.address import Address
from indexer.serve.health import Listener
from tests.daemon.running_daemon import RunningDaemon
from tests.waiting import until


class HealthChecks:
    """The HTTP server of a daemon, as an orchestrator sees it."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def get(self, path: str) -> tuple[int, dict[str, Any]]:
        async with self._session.get(path) as response:
            return response.status, await response.json()

    async def wait_until_ready(self) -> None:
        last: Any = None

        async def ready() -> bool:
            nonlocal last
            last = await self.get("/readyz")
            return bool(last == (200, {"status": "ok"}))

        await until(ready, lambda: last)

    async def wait_for_stall(self, stage: str) -> dict[str, Any]:
        """Wait until `/healthz` fails because of the stage, by its name; return that reason."""
        last: Any = None
        found: list[dict[str, Any]] = []

        async def is_stalled() -> bool:
            nonlocal last, found
            status, last = await self.get("/healthz")
            found = [reason for reason in last.get("reasons", ()) if reason["message"].startswith(f"{stage} stalled")]
            return status == 503 and bool(found)

        await until(is_stalled, lambda: last)
        return found[0]

    async def wait_until_healthy(self) -> None:
        last: Any = None

        async def healthy() -> bool:
            nonlocal last
            last = await self.get("/healthz")
            return bool(last == (200, {"status": "ok"}))

        await until(healthy, lambda: last)

    async def wait_for_reason(self, text: str) -> dict[str, Any]:
        """Wait until the daemon is not ready for a reason whose message contains the text; return that reason."""
        last: Any = None
        found: list[dict[str, Any]] = []

        async def has_reason() -> bool:
            nonlocal last, found
            status, last = await self.get("/readyz")
            found = [reason for reason in last.get("reasons", ()) if text in reason["message"]]
            return status == 503 and bool(found)

        await until(has_reason, lambda: last)
        return found[0]


@asynccontextmanager
async def health_checks(daemon: RunningDaemon) -> AsyncIterator[HealthChecks]:
    async with (
        daemon.stages.serve_http(Listener(Address("127.0.0.1", 0))) as address,
        aiohttp.ClientSession(f"http://{address}") as session,
    ):
        yield HealthChecks(session)
