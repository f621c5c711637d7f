"""Record when each commit of a workload became visible in the database."""

import asyncio
from bisect import bisect_right
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from time import monotonic

import asyncpg

from benchmarks.harness import TIMEOUT_SECONDS, BenchmarkError, DaemonProcess
from benchmarks.workload import SEQ_OFFSET, Workload
from indexer.db.layout import load_layout
from indexer.sync.shard import Layout, Shard

CHANNEL = "atproto_changes"
POLL_SECONDS = 0.05


class ArrivalWatch:
    """Reads the cursors after every notification of a batch.

    Attributes:
        visible_at: The monotonic time at which the commit of this number was seen in the database.
        notified: Set by each notification.
    """

    def __init__(self, workload: Workload, daemons: Sequence[DaemonProcess], layout: Layout) -> None:
        self.visible_at: dict[int, float] = {}
        self.notified = asyncio.Event()
        self._daemons = daemons
        shards = [Shard(index, len(daemons), layout) for index in range(len(daemons))]
        self._commits_of = {
            str(shard): sorted(
                number for account in workload.accounts if shard.owns(account.did) for number in account.commits
            )
            for shard in shards
        }
        self._visible_count = dict.fromkeys(self._commits_of, 0)

    async def wait_for(self, commits: range) -> None:
        """Wait until all commits up to the last of these are visible.

        Raises:
            BenchmarkError: No commit became visible for `TIMEOUT_SECONDS`, or a daemon ended.
        """
        last_progress = monotonic()
        while len(self.visible_at) < commits[-1]:
            before = len(self.visible_at)
            await asyncio.sleep(POLL_SECONDS)
            for daemon in self._daemons:
                daemon.raise_if_ended()
            last_progress = monotonic() if len(self.visible_at) > before else last_progress
            if monotonic() - last_progress > TIMEOUT_SECONDS:
                raise BenchmarkError(f"only {len(self.visible_at)} of {commits[-1]} commits are in the database")

    def rate(self, commits: range) -> float:
        """Return the commits per second from the first to the last batch. The first batch itself is not counted."""
        batches = self.batches(commits)
        first, last = min(batches), max(batches)
        return (batches.total() - batches[first]) / (last - first) if last > first else 0.0

    def batches(self, commits: range) -> Counter[float]:
        """Return the number of these commits by the time at which they became visible."""
        return Counter(self.visible_at[number] for number in commits)

    async def read_cursors(self, connection: asyncpg.Connection) -> None:
        """Read the cursors after every notification, until cancelled."""
        while True:
            await self.notified.wait()
            self.notified.clear()
            cursors = {
                row[0]: row[1]
                for row in await connection.fetch("select shard, max(seq) from indexer.cursor group by shard")
            }
            now = monotonic()
            for shard, numbers in self._commits_of.items():
                end = bisect_right(numbers, cursors.get(shard, 0) - SEQ_OFFSET)
                self.visible_at.update(dict.fromkeys(numbers[self._visible_count[shard] : end], now))
                self._visible_count[shard] = end


@asynccontextmanager
async def watch_arrivals(dsn: str, workload: Workload, daemons: Sequence[DaemonProcess]) -> AsyncIterator[ArrivalWatch]:
    """Watch the database until the end of the block."""
    connection = await asyncpg.connect(dsn)
    watch = ArrivalWatch(workload, daemons, await load_layout(connection))
    await connection.add_listener(CHANNEL, lambda *_: watch.notified.set())
    reading = asyncio.create_task(watch.read_cursors(connection))
    try:
        yield watch
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await connection.close()
