"""Which streams of hosts are read, and for how long."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from time import monotonic, time
from typing import Any

import pytest

from indexer.concurrency.stage_progress import StageProgress
from indexer.db import Database
from indexer.live.host_streams import HostStreams, HostStreamSettings
from indexer.live.inbox import Inbox
from indexer.live.stream_position import StreamPosition
from indexer.live.streams import Stream
from indexer.net.relay.subscription import Connection
from indexer.sync.identity import StoredIdentity
from indexer.sync.repo import SyncStatus
from indexer.sync.shard import Shard
from indexer.telemetry.metrics import Metrics
from tests.db.repo_rows import did, insert, synchronized
from tests.waiting import until

SETTINGS = HostStreamSettings(hosts=2, per_domain=1, interval=0.02, linger=0.1, patience=0.1, pause=3_600.0)
ALL = Shard()


class FakeStream:
    """A stream that is connected, or not.

    Attributes:
        is_known: True if no message is missed.
        ended: True if it was read, and is no longer.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.is_known = True
        self.ended = False
        self.connection: Connection | None = Connection(url)
        self.disconnected_since = monotonic()
        self.position = StreamPosition(lambda: self.is_known, beside_relays=True)
        self.position.begin(url, 0, self.position.watermark)
        self.subscription = self.continuity = self.consumer = self
        self.stage = StageProgress("stream")

    async def run(self) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.ended = True

    def disconnect(self) -> None:
        self.connection, self.is_known, self.disconnected_since = None, False, monotonic()


@dataclass
class World:
    """The streams of hosts on a database with withheld accounts.

    Attributes:
        opened: The streams that were begun, in order.
        looks: The number of looks.
    """

    db: Database
    inbox: Inbox = field(default_factory=lambda: Inbox(1_000_000))
    opened: list[FakeStream] = field(default_factory=list)
    positions: list[StreamPosition] = field(default_factory=list)
    looks: int = 0

    async def withhold(self, accounts: Mapping[str, int]) -> None:
        """Add so many withheld accounts for each of these hosts."""
        for host, number in accounts.items():
            names = [f"{host} {index}" for index in range(number)]
            await insert(self.db, *[synchronized(name, withheld_since=5.0) for name in names])
            await self.db.identities.save([StoredIdentity(did(name), None, host, None, time()) for name in names])

    async def show(self, host: str) -> None:
        async with self.db.connection() as connection:
            await connection.execute(
                "update indexer.repo set withheld_since = null, version = version + 1 where did in "
                "(select did from indexer.identity where pds = $1)",
                host,
            )

    async def wait_until_synchronized(self, number: int) -> None:
        """Wait until so many repos are synchronized."""

        async def counted() -> bool:
            async with self.db.connection() as connection:
                query = "select count(*) from indexer.repo where sync_status = $1"
                return bool(await connection.fetchval(query, SyncStatus.SYNCHRONIZED) == number)

        await until(counted)

    @asynccontextmanager
    async def running(self, settings: HostStreamSettings = SETTINGS) -> AsyncIterator[HostStreams]:
        def opened(url: str) -> Stream:
            stream: Any = FakeStream(url)
            self.opened.append(stream)
            return stream  # type: ignore[no-any-return]

        streams = HostStreams(self.db, self.inbox, self.positions, opened, settings, Metrics())
        task = asyncio.create_task(streams.run())
        try:
            yield streams
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def wait_for(self, streams: HostStreams, hosts: Sequence[str]) -> None:
        """Wait until the streams of these hosts are read, and stored."""

        async def read() -> bool:
            return sorted(streams.streams) == sorted(await self.db.subscribed_hosts.load(ALL)) == sorted(hosts)

        await until(read, lambda: streams.streams)


@pytest.fixture
def world(db: Database, monkeypatch: pytest.MonkeyPatch) -> World:
    world, unpark = World(db), db.subscribed_hosts.unpark

    async def count(shard: Shard) -> int:
        world.looks += 1
        return await unpark(shard)

    monkeypatch.setattr(db.subscribed_hosts, "unpark", count)
    return world


A, B, C, D = "https://a.example", "https://b.example", "https://sub.b.example", "https://d.test"


async def test_hosts_with_the_most_withheld_accounts_are_first_and_one_of_a_domain(world: World) -> None:
    await world.withhold({A: 1, B: 4, C: 3, D: 2})
    async with world.running() as streams:
        await world.wait_for(streams, [B, D])
        assert [stream.url for stream in world.opened] == [B, D]
        assert (world.inbox.streams, len(world.positions)) == (3, 2)
        assert world.inbox.share == world.inbox.max_bytes, "the relay keeps its share"
    assert all(stream.ended for stream in world.opened)


async def test_host_whose_accounts_are_only_omitted_is_read_too(world: World) -> None:
    async with world.db.connection() as connection:
        await connection.execute(
            "insert into indexer.host_list (host, url, host_bucket, lacking) values ('a.example', $1, 0, 7)", A
        )
    async with world.running() as streams:
        await world.wait_for(streams, [A])


async def test_stream_ends_some_time_after_its_host_has_no_such_account(world: World) -> None:
    await world.withhold({A: 1})
    async with world.running(replace(SETTINGS, linger=0.5)) as streams:
        await world.wait_for(streams, [A])
        began = monotonic()
        await world.show(A)
        await world.wait_for(streams, [])
        assert monotonic() - began > 0.4
        assert (world.inbox.streams, world.inbox.limits, world.positions) == (1, {}, [])
        assert world.opened[0].ended


async def test_host_with_more_accounts_replaces_another_one(world: World) -> None:
    await world.withhold({A: 1, B: 1})
    async with world.running() as streams:
        await world.wait_for(streams, [A, B])
        await world.withhold({D: 2})
        await world.wait_for(streams, [A, D])


async def test_stream_that_is_disconnected_for_long_ends_and_is_not_begun_again_soon(world: World) -> None:
    await world.withhold({A: 2, B: 1})
    async with world.running() as streams:
        await world.wait_for(streams, [A, B])
        world.opened[0].disconnect()
        await world.wait_for(streams, [B])
        looks = world.looks
        await until(lambda: world.looks > looks + 3)
        assert [stream.url for stream in world.opened] == [A, B]


async def test_stream_whose_start_is_not_known_subscribes_to_nothing(world: World) -> None:
    await world.withhold({A: 1})
    async with world.running():
        await until(lambda: len(world.opened) == 1)
        world.opened[0].is_known = False
        await world.db.subscribed_hosts.remove(A, ALL)
        looks = world.looks
        await until(lambda: world.looks > looks + 3)
        assert await world.db.subscribed_hosts.load(ALL) == []


async def test_streams_of_the_last_process_are_read_first_and_too_many_are_left(world: World) -> None:
    """Their repos are synchronized, and may stay so."""
    await world.withhold({A: 1, B: 3, D: 2})
    for host in (A, B, D):
        await world.db.subscribed_hosts.add(host, ALL)
    await world.db.subscribed_hosts.add(D, Shard(1, 2))
    async with world.running(replace(SETTINGS, linger=60.0)) as streams:
        await world.wait_for(streams, [A, B])
        assert [stream.url for stream in world.opened] == [A, B], "in the order of their names"
        await world.wait_until_synchronized(4)
    async with world.running(replace(SETTINGS, hosts=0)) as streams:
        await world.wait_for(streams, [])
        await world.wait_until_synchronized(0)
        assert await world.db.subscribed_hosts.load(Shard(1, 2)) == []
