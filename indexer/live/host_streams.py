"""Read the own streams of hosts whose accounts no relay passes on (docs/protocol.md#withheld-accounts).

While the stream of a host is read without a gap, its withheld repos may be synchronized. After a gap, and when the
stream is ended, they are desynchronized: see `indexer.db.subscribed_hosts`.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic, time

import structlog

from indexer.concurrency.stage_progress import StageProgress
from indexer.db import Database
from indexer.db.periodic import run_periodically
from indexer.live.inbox import Inbox
from indexer.live.stream_position import StreamPosition
from indexer.live.streams import Stream
from indexer.net.http.host_limits import registered_domain
from indexer.net.http.http_client import host_of
from indexer.reasons import Desync
from indexer.sync.shard import Shard
from indexer.sync.stream import Gap, OpenGap
from indexer.telemetry.metrics import Metrics

HOST_BYTES_PER_SECOND = 256 << 10
"""Bytes that are read from the stream of one host. All relays together send about six times as many."""

HOST_INBOX_BYTES = 512 << 10
"""Unsettled messages of one host, in approximate bytes of memory. Relays keep their shares of the inbox."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HostStreamSettings:
    """Numbers of hosts, and times in seconds. Each process reads the streams for the accounts of its own shard."""

    shard: Shard = Shard()  # noqa: RUF009 - immutable
    hosts: int = 8  # streams of hosts that are read at the same time
    per_domain: int = 2  # the same for hosts of one registered domain
    interval: float = 30.0  # between two looks
    linger: float = 600.0  # for how long a stream is still read after its host is no longer among the first ones
    patience: float = 300.0  # for how long a stream may be disconnected before it is ended
    pause: float = 3_600.0  # after that, before it is begun again


@dataclass(slots=True)
class _Reading:
    """A stream that is read. Its host was among the first ones at `wanted_at` (monotonic seconds)."""

    stream: Stream
    task: asyncio.Task[None]
    wanted_at: float


class MissedMessages:
    """Takes the place of `OpenGaps` for the streams of hosts: a gap has no row, but desynchronizes withheld repos."""

    def __init__(self, db: Database, shard: Shard, metrics: Metrics) -> None:
        self._db, self._shard, self._metrics = db, shard, metrics

    async def refresh(self) -> None:
        """Do nothing."""

    async def open(self, gap: Gap) -> OpenGap:
        """Desynchronize the withheld repos of the host, before its next message is processed."""
        withheld = await self._db.subscribed_hosts.remove(gap.relay, self._shard)
        self._metrics.desynchronized[Desync.WITHHELD].inc(withheld)
        log.info("host-stream.gap", host=gap.relay, reason=gap.reason, repos=withheld)
        return OpenGap(0, gap, time())


@dataclass(eq=False)
class HostStreams:
    """Reads the streams of the hosts with the most accounts that no relay passes on.

    Attributes:
        stage: Its progress. Each look, and each message of the streams, is work.
    """

    db: Database
    inbox: Inbox
    positions: list[StreamPosition]  # of all streams; those of hosts are added and removed
    open_stream: Callable[[str], Stream]  # returns the stream of the host with this URL
    settings: HostStreamSettings
    metrics: Metrics

    def __post_init__(self) -> None:
        self.stage = StageProgress("host streams", needs_shard=True)
        self._readings: dict[str, _Reading] = {}
        self._paused_until: dict[str, float] = {}

    @property
    def streams(self) -> Mapping[str, Stream]:
        """The streams that are read, by the URL of the host."""
        return {pds: reading.stream for pds, reading in self._readings.items()}

    async def run(self) -> None:
        """Read the streams. Only an exception that is a bug ends it."""
        async with asyncio.TaskGroup() as group:
            await run_periodically(partial(self._look, group), self.settings.interval, self.stage)

    async def _look(self, group: asyncio.TaskGroup) -> None:
        """Begin and end streams, and follow what that means for the withheld repos."""
        settings, shard, table = self.settings, self.settings.shard, self.db.subscribed_hosts
        await table.remove_former(shard)
        self.metrics.desynchronized[Desync.WITHHELD].inc(await table.withhold(shard))
        wanted, now = await self._wanted(), monotonic()
        for pds in await table.load(shard):  # the former process read these, perhaps without a gap
            if pds not in self._readings and not self._begin(pds, group):
                await self._leave(pds)
        for pds, reading in list(self._readings.items()):
            subscription = reading.stream.subscription
            if pds in wanted:
                reading.wanted_at = now
            if reading.stream.position.is_known():
                await table.add(pds, shard)
            elif subscription.connection is None and now - subscription.disconnected_since > settings.patience:
                self._paused_until[pds] = now + settings.pause
                await self._end(pds)
                continue
            if now - reading.wanted_at > settings.linger:
                await self._end(pds)
        for pds in wanted:
            if pds not in self._readings and self._paused_until.get(pds, now) <= now:
                self._begin(pds, group)
        self._paused_until = {pds: until for pds, until in self._paused_until.items() if until > now}
        await table.unpark(shard)

    async def _wanted(self) -> Sequence[str]:
        """Return the hosts whose streams are to be read."""
        accounts = Counter(await self.db.subscribed_hosts.withheld(self.settings.shard))
        accounts.update(await self.db.host_lists.not_withheld())  # it is not known which shards have them
        domains, wanted = Counter[str](), []
        for pds in sorted(accounts, key=lambda pds: (-accounts[pds], pds)):
            domains[domain := registered_domain(host_of(pds))] += 1
            if domains[domain] <= self.settings.per_domain:
                wanted.append(pds)
        return wanted[: self.settings.hosts]

    def _begin(self, pds: str, group: asyncio.TaskGroup) -> bool:
        """Begin to read a stream; return False if there are enough."""
        if len(self._readings) >= self.settings.hosts:
            return False
        stream = self.open_stream(pds)
        self.positions.append(stream.position)
        self.inbox.streams += 1
        self.inbox.limits[pds] = HOST_INBOX_BYTES
        task = group.create_task(self._read(stream), name=f"stream of {pds}")
        self._readings[pds] = _Reading(stream, task, monotonic())
        return True

    async def _read(self, stream: Stream) -> None:
        with self.stage.watching(stream.consumer.stage):
            await stream.consumer.run()

    async def _end(self, pds: str) -> None:
        """End a stream when all its messages are settled."""
        reading = self._readings[pds]
        reading.task.cancel()
        await asyncio.wait([reading.task])
        await self.inbox.wait_until_settled(reading.stream.position.origin)
        self.positions.remove(reading.stream.position)
        self.inbox.streams -= 1
        del self.inbox.limits[pds]
        del self._readings[pds]
        await self._leave(pds)

    async def _leave(self, pds: str) -> None:
        withheld = await self.db.subscribed_hosts.remove(pds, self.settings.shard)
        self.metrics.desynchronized[Desync.WITHHELD].inc(withheld)
        log.info("host-stream.ended", host=pds, repos=withheld)
