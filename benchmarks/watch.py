"""When commits could be seen: a reader of the database that is told of each batch, and looks at the cursors."""

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from time import monotonic

import asyncpg

from benchmarks.stand import PATIENCE, BenchmarkError, Daemon
from benchmarks.world import AHEAD, World
from indexer.sync.shard import Shard

CHANNEL = "atproto_changes"


class Watch:
    """`seen` holds, of each message's number, the monotonic time from which its rows could be read."""

    def __init__(self, world: World, daemons: Sequence[Daemon]) -> None:
        self.seen: dict[int, float] = {}
        self._daemons = daemons
        shards = [Shard(index, len(daemons)) for index in range(len(daemons))]
        self._owned = {
            str(shard): sorted(seq for account in world.accounts if shard.owns(account.did) for seq in account.seqs)
            for shard in shards
        }
        self._done = dict.fromkeys(self._owned, 0)
        self.told = asyncio.Event()

    async def until(self, seqs: range) -> None:
        """Waits until all of these are seen. Raises `BenchmarkError` if nothing moves, or a daemon ends."""
        moved = monotonic()
        while len(self.seen) < seqs[-1]:
            before = len(self.seen)
            await asyncio.sleep(0.05)
            for daemon in self._daemons:
                daemon.check()
            moved = monotonic() if len(self.seen) > before else moved
            if monotonic() - moved > PATIENCE:
                raise BenchmarkError(f"of {seqs[-1]} commits only {len(self.seen)} are in the database")

    async def look(self, connection: asyncpg.Connection) -> None:
        while True:
            await self.told.wait()
            self.told.clear()
            cursors = {row[0]: row[1] for row in await connection.fetch("select shard, seq from indexer.cursor")}
            now = monotonic()
            for shard, seqs in self._owned.items():
                upto = bisect_right(seqs, cursors.get(shard, 0) - AHEAD)
                self.seen.update(dict.fromkeys(seqs[self._done[shard] : upto], now))
                self._done[shard] = upto


@asynccontextmanager
async def watch(dsn: str, world: World, daemons: Sequence[Daemon]) -> AsyncIterator[Watch]:
    watching = Watch(world, daemons)
    connection = await asyncpg.connect(dsn)
    await connection.add_listener(CHANNEL, lambda *_: watching.told.set())
    looking = asyncio.create_task(watching.look(connection))
    try:
        yield watching
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        await connection.close()
