"""The npm package @skyware/jetstream, unchanged, reads the feed through restarts of the daemon and of itself."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.crashes.shifted_clock import Offset
from tests.daemon.running_daemon import LIKE, POST, post
from tests.faulty_network import FaultyNetwork
from tests.feed_clients.node_process import NodeProcess, needs_clients, node_process
from tests.readers.jetstream_client import describe, feed
from tests.waiting import until

pytestmark = [pytest.mark.proof("clients"), needs_clients]


class NpmClient:
    """A process with the client, which connects again by itself, with its cursor.

    Attributes:
        cursor: The cursor of the client after the last event that was taken.
    """

    def __init__(self, process: NodeProcess) -> None:
        self._process = process
        self._taken = 0
        self.cursor: int | None = None

    async def next(self) -> tuple[str, Any]:
        """Return kind and content of the next event of the client."""
        await until(lambda: len(self._process.lines) > self._taken)
        line = self._process.lines[self._taken]
        self._taken += 1
        self.cursor = line.get("cursor")
        return line["kind"], line.get("event")

    async def take(self, count: int) -> list[str]:
        """Return the next events of records as `operation collection/rkey`, and the others as their kind."""
        events = [await self.next() for _ in range(count)]
        return [describe(event) if kind in {"create", "update", "delete"} else kind for kind, event in events]


@asynccontextmanager
async def npm_client(address: object, **options: Any) -> AsyncIterator[NpmClient]:
    """Run the client during the block."""
    arguments = f"ws://{address}/subscribe", orjson.dumps(options).decode()
    async with node_process("jetstream.mjs", *arguments) as process:
        yield NpmClient(process)


async def test_client_gets_every_event_once_in_order_through_restarts(database: str, tmp_path: Path) -> None:
    async with FaultyNetwork() as network, AsyncExitStack() as clients:
        async with feed(database, tmp_path / "1", network) as (daemon, address):
            account = daemon.create_account("ada.test", records=3)
            await daemon.wait_until_equal()
            async with npm_client(address, cursor=1) as client:
                assert await client.take(4) == ["open", *(f"create {POST}/{number:03}" for number in range(3))]
                account.update(f"{POST}/001", post("changed"))
                account.delete(f"{POST}/002")
                assert await client.take(2) == [f"update {POST}/001", f"delete {POST}/002"]
                cursor = client.cursor
            account.create(LIKE, post("no client is connected"), rkey="a")
            await daemon.wait_until_equal()
            client = await clients.enter_async_context(npm_client(address, cursor=cursor))
            # A cursor names the time of the last event, which is repeated, as Jetstream does.
            assert await client.take(3) == ["open", f"delete {POST}/002", f"create {LIKE}/a"]
        account.create(LIKE, post("the daemon is stopped"), rkey="b")
        async with feed(database, tmp_path / "2", network, http_bind=str(address)) as (daemon, _):
            account.create(LIKE, post("the daemon runs again"), rkey="c")
            await daemon.wait_until_equal()
            events = list[str]()
            while f"create {LIKE}/c" not in events:
                events += await client.take(1)
            # It may fail to connect several times while the daemon is stopped.
            assert [event for event in events if event != "close"] == [
                "open",
                f"create {LIKE}/a",
                f"create {LIKE}/b",
                f"create {LIKE}/c",
            ]
            assert "close" in events


@pytest.mark.one_server("the test changes one clock")
async def test_client_that_connects_again_loses_nothing_while_the_clock_of_the_database_is_ahead(
    database: str, tmp_path: Path
) -> None:
    clock = Offset(tmp_path / "offset")
    await clock.include_database(database)
    await clock.set(86_400)
    async with feed(database, tmp_path) as (daemon, address):
        account = daemon.create_account("ada.test", records=1)
        await daemon.wait_until_equal()
        async with npm_client(address, cursor=1) as client:
            assert await client.take(2) == ["open", f"create {POST}/000"]
        account.create(LIKE, post("no client is connected"), rkey="a")
        await daemon.wait_until_equal()
        async with npm_client(address, cursor=client.cursor) as client:
            assert await client.take(3) == ["open", f"create {POST}/000", f"create {LIKE}/a"]
        await clock.set(0)
        account.create(LIKE, post("the clock was set back"), rkey="b")
        await daemon.wait_until_equal()
        async with npm_client(address, cursor=client.cursor) as client:
            assert await client.take(3) == ["open", f"create {LIKE}/a", f"create {LIKE}/b"]
