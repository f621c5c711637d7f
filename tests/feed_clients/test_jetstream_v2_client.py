"""The Jetstream client of the PyPI package `atproto`, unchanged, loses nothing although both sides are killed."""

import asyncio
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest

from indexer.atproto.cid import cid_text
from tests.daemon.running_daemon import POST, post
from tests.daemon_process import daemon_process
from tests.database_checks import fetch, wait_until_equal
from tests.faulty_network import FaultyNetwork
from tests.feed_clients.node_process import HERE, Line, node_process
from tests.free_ports import free_ports
from tests.lost_commits import lose_commit
from tests.readers.jetstream_client import feed
from tests.waiting import until

PYTHON = HERE / ".venv" / "bin" / "python"
pytestmark = [
    pytest.mark.proof("clients"),
    pytest.mark.skipif(
        not (HERE / ".venv" / "installed").exists(), reason="`atproto` is missing: run tests/feed_clients/setup.sh"
    ),
]
LOGGED = """
    select c.seq from atproto.changes c
    where c.rkey is not null and (c.action = 'delete' or exists (
        select from atproto.records r where (r.did, r.collection, r.rkey) = (c.did, c.collection, c.rkey)
    ))
"""
"""Changes of records, but not of those that were deleted since."""


@asynccontextmanager
async def client_process(port: int, compression: str, **parameters: Any) -> AsyncIterator[list[Line]]:
    """Run the client during the block, then kill it with SIGKILL; yield the lines that it prints."""
    arguments = f"ws://127.0.0.1:{port}/xrpc", orjson.dumps(parameters).decode(), compression
    async with node_process("jetstream_v2.py", *arguments, program=PYTHON) as client:
        yield client.lines


async def is_open(port: int) -> bool:
    """Return True if a server listens at this port."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


def folded(lines: Iterable[Line]) -> dict[tuple[str, str], str]:
    """Return the CIDs of the records that a client has, by DID and path."""
    cids = {(line["did"], f"{line['collection']}/{line['rkey']}"): line["cid"] for line in lines if line["operation"]}
    return {key: cid for key, cid in cids.items() if cid is not None}


class App:
    """An app that stores what the client gives it, with the cursor, and writes posts with increasing numbers.

    Attributes:
        received: The events that are stored.
    """

    def __init__(self, network: FaultyNetwork, compression: str) -> None:
        self._accounts = [network.create_account(f"a{number}.test") for number in range(5)]
        self._compression = compression
        self._written = 0
        self.received: list[Line] = []

    def write(self, count: int = 30) -> None:
        for number in range(self._written, self._written + count):
            account = self._accounts[number % len(self._accounts)]
            account.create(POST, post(number), rkey=f"{number:05}")
            if number % 7 == 0:
                account.update(f"{POST}/{number:05}", post(f"changed {number}"))
            if number % 11 == 0:
                account.delete(f"{POST}/{number:05}")
        self._written += count
        self._accounts[0].create(POST, post("the last one"), rkey=f"last-{self._written}")

    def has_last(self, lines: Iterable[Line]) -> bool:
        """Return True if the newest post is among the events."""
        return any(line.get("rkey") == f"last-{self._written}" for line in lines)

    def store(self, lines: list[Line]) -> None:
        """Store what a client has printed."""
        assert {line["compressed"] for line in lines} == {self._compression == "zstd"}
        # The server repeats the event of the cursor, and a new client does not know it.
        repeated = lines[0] in self.received[-1:]
        assert repeated == bool(self.received)
        self.received += lines[repeated:]

    async def receive(self, port: int) -> None:
        """Run a client from the stored cursor until it has the newest post; kill it, and store what it has printed."""
        cursor = self.received[-1]["seq"]
        async with client_process(port, self._compression, cursor=cursor) as lines:
            await until(lambda: self.has_last(lines))
        self.store(lines)


@pytest.mark.parametrize("compression", ["", "zstd"])
async def test_nothing_is_lost_or_reordered_while_both_sides_are_killed(
    database: str, tmp_path: Path, compression: str
) -> None:
    port = free_ports(2)
    async with FaultyNetwork() as network, AsyncExitStack() as daemons:
        app = App(network, compression)

        async def start(number: int, roles: str) -> Process:
            directory = tmp_path / f"{number}"
            directory.mkdir(exist_ok=True)
            bind = f"127.0.0.1:{port + number}"
            running = daemon_process(network, database, directory, roles=roles, http_bind=bind)
            process = await daemons.enter_async_context(running)
            await until(partial(is_open, port + number))  # without its dictionary, the client asks for no compression
            return process

        await start(1, "feed")
        process = await start(0, "live,resync,feed")
        async with client_process(port, compression, cursor=0) as lines:
            for _ in range(2):
                app.write()
                await until(lambda: app.has_last(lines))
                app.write()
                process.kill()
                await process.wait()
                app.write()
                process = await start(0, "live,resync,feed")
            lose_commit(network.create_account("fetched.test"))
            app.write()
            await until(lambda: app.has_last(lines))
        app.store(lines)
        app.write()
        await app.receive(port + 1)  # the other process has the same numbers
        app.write()
        await app.receive(port)
        await wait_until_equal(network, database)
        app.write(1)
        await app.receive(port)
    expected = {
        (did, path): cid_text(cid) for did, of in network.expected_records().items() for path, cid in of.items()
    }
    assert folded(app.received) == expected
    seqs = [line["seq"] for line in app.received]
    assert seqs == sorted(set(seqs))
    assert {seq for (seq,) in await fetch(database, LOGGED)} <= set(seqs)
    assert await fetch(database, "select from atproto.changes where action = 'snapshot'"), "a repo was fetched"


async def test_client_ends_without_an_error_when_the_server_stops(database: str, tmp_path: Path) -> None:
    async with FaultyNetwork() as network, AsyncExitStack() as clients:
        account = network.create_account("ada.test")
        async with feed(database, tmp_path, network) as (daemon, address):
            lines = await clients.enter_async_context(client_process(address.port, "", cursor=0))
            account.create(POST, post("x"), rkey="x")
            await until(lambda: any(line["text"] == "x" for line in lines))
            await daemon.wait_until_equal()
        await until(lambda: lines[-1] == {"ended": None})


async def test_example_in_the_docs_begins_at_the_oldest_event_of_a_trimmed_log(database: str, tmp_path: Path) -> None:
    """It would end at once with the number of an event that was trimmed."""
    text = (HERE.parents[1] / "docs" / "jetstream.md").read_text()
    assert 'JetstreamClient({"cursor": 10**15}' in text
    async with FaultyNetwork() as network, feed(database, tmp_path, network) as (daemon, address):
        account = network.create_account("ada.test")
        account.create(POST, post("trimmed"), rkey="a")
        await daemon.wait_until_equal()
        await daemon.execute("select setval('indexer.trimmed_seq', atproto.latest_seq())")
        account.create(POST, post("x"), rkey="x")
        await daemon.wait_until_equal()
        async with client_process(address.port, "", cursor=0) as lines:
            await until(lambda: any("CursorTooOld" in str(line) for line in lines))
        async with client_process(address.port, "", cursor=10**15) as lines:
            await until(lambda: any(line["text"] == "x" for line in lines))
            assert [line["text"] for line in lines if line["operation"]] == ["x"]
