"""HTTP clients that wait until the records of a rev are shown."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from indexer.db import Database, DatabaseError
from indexer.net.server.connection_limit import FORWARDED_FOR, RESERVED_WEBSOCKETS, WEBSOCKETS, Websockets
from indexer.readers.access import Access
from indexer.readers.rev_waits import READ_SECONDS, RevWaits
from indexer.reasons import FetchFailure
from indexer.sync.repo import Repo
from indexer.telemetry.conditions import Conditions
from tests.background import running
from tests.daemon.running_daemon import POST, post
from tests.db.repo_rows import did, head, synchronized
from tests.readers.tap_client import feed_client, tap_daemon
from tests.waiting import until

OLD, NEW = "3laaaaaaaaa22", "3lbbbbbbbbb22"


@pytest.mark.slow
async def test_client_is_answered_when_the_commit_is_stored(database: str, tmp_path: Path) -> None:
    """Each answer about the account says its rev."""
    async with tap_daemon(database, tmp_path) as daemon, feed_client(daemon) as client:
        account = daemon.create_account("ada.test")
        await daemon.wait_until_equal()
        before = account.rev
        await daemon.network.relay.stop()
        account.create(POST, post("new"))
        url = f"/wait-for/{account.did}?rev={account.rev}"
        async with client.get(f"{url}&timeout=0.1") as response:
            assert response.status == 504
            assert response.headers["Atproto-Repo-Rev"] == before
            assert await response.json() == {"did": account.did, "rev": before, "reached": False}
        waiting = [asyncio.create_task(client.get(f"{url}&timeout=30")) for _ in range(20)]
        await daemon.network.relay.start()
        for response in await asyncio.gather(*waiting):
            assert response.status == 200
            assert await response.json() == {"did": account.did, "rev": account.rev, "reached": True}
        for path in (url, f"/info/{account.did}", f"/resolve/{account.did}"):
            async with client.get(path) as response:
                assert (response.status, response.headers["Atproto-Repo-Rev"]) == (200, account.rev)
        await daemon.execute("select atproto.request_takedown($1, true)", account.did)
        for path in (f"{url}&timeout=0", f"/info/{account.did}", f"/resolve/{account.did}"):
            async with client.get(path) as response:
                assert "Atproto-Repo-Rev" not in response.headers, "the account is hidden"
        for bad in (f"/wait-for/x?rev={before}", f"/wait-for/{account.did}", f"{url}a", f"{url}&timeout=31"):
            async with client.get(bad) as response:
                assert (response.status, list(await response.json())) == (400, ["message"])
        for timeout in ("-1", "nan", "inf", "x", ""):
            async with client.get(f"{url}&timeout={timeout}") as response:
                assert response.status == 400
        async with client.get(url, headers={"Origin": "https://evil.test"}) as response:
            assert response.status == 403
        async with client.get(f"/wait-for/{did(9)}?rev={before}&timeout=0") as response:
            assert (response.status, "Atproto-Repo-Rev" in response.headers) == (504, False)


class FakeDatabase:
    """A database with a repo for each DID.

    Attributes:
        loads: The DIDs of each query.
        rev: The rev of all repos; None: the database is unavailable.
    """

    def __init__(self) -> None:
        self.repos = self
        self.loads = list[list[str]]()
        self.rev: str | None = OLD

    async def load(self, dids: Sequence[str]) -> dict[str, Repo]:
        self.loads.append(list(dids))
        if self.rev is None:
            raise DatabaseError(FetchFailure.UNREACHABLE, "gone")
        return {one: synchronized(1, did=one, head=head(self.rev)) for one in dids}


@asynccontextmanager
async def served(db: FakeDatabase, max_websockets: int) -> AsyncIterator[tuple[aiohttp.ClientSession, Websockets]]:
    waits, application = RevWaits(cast(Database, db)), web.Application()
    application[WEBSOCKETS] = websockets = Websockets(max_websockets, Conditions())
    application.router.add_get("/wait-for/{did}", Access(None).guard(waits.respond))
    runner = web.AppRunner(
        application
    )  # unlike a TestServer, it does not cancel the handlers of clients that have gone
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url, connector = f"http://127.0.0.1:{runner.addresses[0][1]}", aiohttp.TCPConnector(limit=0)
        async with running(waits.run()), aiohttp.ClientSession(url, connector=connector) as client:
            yield client, websockets
    finally:
        await runner.cleanup()


async def get(client: aiohttp.ClientSession, number: int, network: str = "8.0.0.1", seconds: float = 30) -> int:
    headers = {FORWARDED_FOR: network}
    async with client.get(f"/wait-for/{did(number)}?rev={NEW}&timeout={seconds}", headers=headers) as response:
        return response.status


async def test_one_query_reads_the_repos_of_all_clients() -> None:
    db = FakeDatabase()
    async with served(db, 100) as (client, _):
        async with asyncio.timeout(30):
            tasks = [asyncio.create_task(get(client, number % 40)) for number in range(80)]
            await until(lambda: len(db.loads[-1:]) > 0 and len(db.loads[-1]) == 40)
            shared, began = len(db.loads), asyncio.get_running_loop().time()
            await until(lambda: len(db.loads) > shared + 5)
            passed = asyncio.get_running_loop().time() - began
            assert len(db.loads) - shared <= passed / READ_SECONDS + 1
            db.rev = None
            await until(lambda: len(db.loads) > shared + 20)
            assert await get(client, 1) == 503
            db.rev = NEW
            assert await asyncio.gather(*tasks) == [200] * 80
        ended = len(db.loads)
        for _ in range(20):
            assert await get(client, 1) == 200
        assert len(db.loads) - ended <= 20 + 1, "nobody waits"


async def test_networks_share_the_number_of_clients_and_one_that_has_gone_frees_its_place() -> None:
    db = FakeDatabase()
    async with served(db, RESERVED_WEBSOCKETS + 4) as (client, websockets):
        first = [asyncio.create_task(get(client, number)) for number in range(4)]
        await until(lambda: len(websockets) == 4)
        assert await get(client, 9) == 503
        other = asyncio.create_task(get(client, 9, "9.0.0.1"))
        [displaced], _ = await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        assert displaced.result() == 503
        [leaving, *staying] = [task for task in first if task is not displaced]
        leaving.cancel()
        await until(lambda: len(websockets) == 3)
        again = asyncio.create_task(get(client, 5))
        await until(lambda: len(websockets) == 4)
        db.rev = NEW
        assert await asyncio.gather(other, again, *staying) == [200] * 4
        assert len(websockets) == 0


async def test_timeout_ends_while_nothing_can_be_read() -> None:
    db: Any = FakeDatabase()
    async with served(db, 100) as (client, _):
        waiting = asyncio.create_task(get(client, 1, seconds=0.3))
        await until(lambda: len(db.loads) > 1)
        db.rev = None
        assert await waiting == 504
