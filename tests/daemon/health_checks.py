"""The health checks of a daemon, as an orchestrator sees them."""

from collections.abc import AsyncIterator, Callable
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
        await self._wait_until_ok("/readyz")

    async def wait_until_healthy(self) -> None:
        await self._wait_until_ok("/healthz")

    async def wait_for_stall(self, stage: str) -> dict[str, Any]:
        """Wait until `/healthz` fails because of the stage, by its name; return that reason."""
        return await self._wait_for_reason("/healthz", lambda message: message.startswith(f"{stage} stalled"))

    async def wait_for_reason(self, text: str) -> dict[str, Any]:
        """Wait until the daemon is not ready for a reason whose message contains the text; return that reason."""
        return await self._wait_for_reason("/readyz", lambda message: text in message)

    async def _wait_until_ok(self, path: str) -> None:
        last: Any = None

        async def is_ok() -> bool:
            nonlocal last
            last = await self.get(path)
            return bool(last == (200, {"status": "ok"}))

        await until(is_ok, lambda: last)

    async def _wait_for_reason(self, path: str, matches: Callable[[str], bool]) -> dict[str, Any]:
        last: Any = None
        found: list[dict[str, Any]] = []

        async def has_reason() -> bool:
            nonlocal last, found
            status, last = await self.get(path)
            found = [reason for reason in last.get("reasons", ()) if matches(reason["message"])]
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
