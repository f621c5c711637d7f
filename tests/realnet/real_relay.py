"""Run Bluesky's own relay on loopback. Its database is one of the test's Postgres."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.database_checks import fetch
from tests.free_ports import free_ports
from tests.realnet.real_network import RealNetwork, RealPds
from tests.waiting import until

RELAY = Path(__file__).parent / "bin" / "relay"
PASSWORD = "relay-pass"
MAX_ACCOUNTS = 10_000
"""Accounts of one host. The relay derives its rate limits from this."""


class RealRelay:
    """A relay process.

    Attributes:
        port: Its port on loopback.
        relay_url: The websocket URL of its stream.
        plc_url: The directory that it asks.
    """

    def __init__(self, plc_url: str, dsn: str, directory: Path, max_accounts: int) -> None:
        self.port = port = free_ports(2)
        self.relay_url = f"ws://localhost:{port}"
        self.plc_url = plc_url
        self._dsn = dsn
        self._directory = directory / "relay"
        self._http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", auth=("admin", PASSWORD), trust_env=False)
        self._log = directory / "relay.log"
        self._command = [
            *(str(RELAY), "--admin-password", PASSWORD, "--plc-host", plc_url, "--log-level", "warn", "serve"),
            *("--bind", f"127.0.0.1:{port}", "--metrics-listen", f"127.0.0.1:{port + 1}", "--db-url", dsn),
            *("--persist-dir", str(self._directory), "--default-account-limit", str(max_accounts)),
            "--lenient-sync-validation",  # as the relay of Bluesky runs: it forwards commits that break the chain
        ]

    async def start(self) -> None:
        """Start the relay and wait until it answers. It continues its subscriptions."""
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(*self._command, stdout=log, stderr=log)
        await until(self._is_up, self.log_tail)

    async def stop(self) -> None:
        """Let the relay save its state and end."""
        if self._process.returncode is None:
            self._process.terminate()
        await self._process.wait()

    async def restart(self) -> None:
        """Stop the relay, and start it again."""
        await self.stop()
        await self.start()

    async def forget_everything(self) -> None:
        """Delete all that a stopped relay has stored. It starts a new sequence, and subscribes to no PDS."""
        shutil.rmtree(self._directory)
        for statement in ("drop schema public cascade", "create schema public"):
            await fetch(self._dsn, statement)

    async def close(self) -> None:
        """Stop the relay for good."""
        await self.stop()
        await self._http.aclose()

    async def subscribe(self, pds: RealPds) -> None:
        """Subscribe to the stream of a PDS."""
        response = await self._http.post("/admin/pds/requestCrawl", json={"hostname": pds.public_url})
        response.raise_for_status()

    async def allow_accounts(self, pds: RealPds, number: int) -> None:
        """Pass on so many accounts of a PDS."""
        host = pds.public_url.partition("://")[2]
        response = await self._http.post("/admin/pds/changeLimits", json={"host": host, "repo_limit": number})
        response.raise_for_status()

    async def counts(self, pds: RealPds, number: int) -> bool:
        """Return True if the relay knows so many accounts of a PDS, those included that it withholds."""
        hosts = (await self._http.get("/xrpc/com.atproto.sync.listHosts")).json()["hosts"]
        name = pds.public_url.partition("://")[2]
        return {"hostname": name, "accountCount": number}.items() <= next(iter(hosts), {}).items()

    def log_tail(self) -> str:
        """Return the end of the relay's log."""
        return self._log.read_text()[-2_000:]

    async def _is_up(self) -> bool:
        assert self._process.returncode is None, self.log_tail()
        try:
            return (await self._http.get("/xrpc/_health")).is_success
        except httpx.TransportError:
            return False


@asynccontextmanager
async def real_relay(
    network: RealNetwork, dsn: str, directory: Path, max_accounts: int = MAX_ACCOUNTS
) -> AsyncIterator[RealRelay]:
    """Run a relay that subscribes to the PDSes of the network, and passes on so many accounts of each."""
    directory.mkdir(exist_ok=True)
    relay = RealRelay(network.plc_url, dsn, directory, max_accounts)
    try:
        await relay.start()
        for pds in network.pds:
            await relay.subscribe(pds)
        yield relay
    finally:
        await relay.close()


def require_relay() -> None:
    """Skip the test if the relay is not built."""
    if not RELAY.exists():
        pytest.skip("BLUESKY'S RELAY IS NOT BUILT (it needs Go); run tests/realnet/build_relay.sh")
