"""Frames from the relay into the inbox, in order, each with its place on the watermark."""

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Literal

import structlog

from indexer.atproto.limits import Limits
from indexer.errors import UnavailableError
from indexer.metrics import Metrics
from indexer.outbound import host_of
from indexer.reasons import Rejection
from indexer.relay.subscription import Subscription
from indexer.service.inbox import Inbox
from indexer.store import Store
from indexer.sync.batch import Received
from indexer.sync.events import Event, ForeignEvent, InfoEvent, MalformedEvent, StreamError
from indexer.sync.frames import decode_frame
from indexer.sync.repo import Outcome
from indexer.sync.shard import Shard
from indexer.sync.watermark import Watermark

Start = Literal["live", "oldest"] | int
DATABASE_PAUSE = 1.0  # seconds
MOST_OPEN = 200_000  # sequence numbers behind one that is not settled

log = structlog.get_logger(__name__)


class Place:
    """Where in which relay's stream we are. Replaced as a whole when a connection begins.

    `open` tells whether the stream is open at present. `host` is the stream's own host if what is called a relay is a
    PDS, as `of_pds` says.
    """

    def __init__(self, is_open: Callable[[], bool], *, of_pds: bool = False) -> None:
        self.open = is_open
        self.relay = ""
        self.host: str | None = None
        self.watermark = Watermark()
        self._of_pds = of_pds

    def begin(self, relay: str, cursor: int | None) -> None:
        """From here on, messages are `relay`'s behind `cursor`; nothing of the former stream is open any more."""
        self.relay = relay
        self.host = host_of(relay) if self._of_pds else None
        self.watermark = Watermark(cursor)


class Reader:
    """Reads the stream for one shard. `run` ends only with an error that is ours."""

    def __init__(
        self,
        store: Store,
        subscription: Subscription,
        inbox: Inbox,
        place: Place,
        shard: Shard,
        start: Start,
        limits: Limits,
        metrics: Metrics,
        on_gap: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._on_gap = on_gap
        self._start = start
        self._subscription = subscription
        self._inbox = inbox
        self._place = place
        self._shard = shard
        self._limits = limits
        self._metrics = metrics
        self._newest = 0
        self._skipped = 0
        self.trouble: str | None = None
        self.gaps = 0

    async def run(self) -> None:
        owns = None if self._shard.count == 1 else self._shard.owns
        async for frame in self._subscription.frames(self._begin):
            if self._skipped != self._subscription.skipped:
                await self._report_skipped()
            await self._hear(self._in_order(decode_frame(frame, self._limits, owns)), frame)

    async def _hear(self, event: Event, frame: bytes) -> None:
        self._metrics.received(event.kind)
        if isinstance(event, ForeignEvent) or (isinstance(event, MalformedEvent) and not self._refuses(event)):
            await self._pass(event)
        elif isinstance(event, InfoEvent):
            self._info(event)
        elif isinstance(event, StreamError):
            self._error(event)
        else:
            await self._accept(Received(event.seq, frame, event, monotonic()))

    def _refuses(self, event: MalformedEvent) -> bool:
        """One shard does, though all read the stream: the DID's, or the first if it has none that can be read."""
        return self._shard.index == 0 if event.did is None else self._shard.owns(event.did)

    async def _begin(self, relay: str) -> int | None:
        """Where to begin at `relay`, once everything received before is durable."""
        await self._inbox.empty()
        saved = await self._saved(relay)
        if saved is None:
            saved = {"live": None, "oldest": 0}.get(str(self._start), self._start)  # type: ignore[arg-type]
        self._place.begin(relay, saved)
        self._newest = saved or 0
        return saved

    async def _report_skipped(self) -> None:
        """A message over the limit was never received, but it was sent, and is refused like any other."""
        for _ in range(self._subscription.skipped - self._skipped):
            await self._hear(MalformedEvent(Rejection.FRAME_TOO_LARGE, f"behind {self._newest}", "", None, None), b"")
        self._skipped = self._subscription.skipped

    async def _saved(self, relay: str) -> int | None:
        while True:
            try:
                return await self._store.cursor(relay, str(self._shard))
            except UnavailableError as error:
                log.warning("database.unavailable", error=str(error))
                await asyncio.sleep(DATABASE_PAUSE)

    def _in_order(self, event: Event) -> Event:
        """Refuses what is behind. If it goes on, the relay has lost its sequence, and an operator has to decide."""
        if event.seq is None or event.seq >= self._newest:
            return event
        detail = f"{event.seq} after {self._newest}"
        self.trouble = f"the relay sends sequence numbers behind ours: {detail}"
        return MalformedEvent(Rejection.SEQ_NOT_INCREASING, detail, event.kind, None, getattr(event, "did", None))

    async def _accept(self, received: Received) -> None:
        if received.seq is None or self._advance(received.event.kind, received.seq):
            await self._inbox.put(received)

    async def _pass(self, event: ForeignEvent | MalformedEvent) -> None:
        if len(self._place.watermark) > MOST_OPEN:  # one of ours has been waiting for as many messages of others
            await self._inbox.empty()
        if event.seq is not None:
            if not self._advance(event.kind, event.seq):
                return
            self._place.watermark.done((event.seq,))
        self._metrics.outcome(event.kind, Outcome.IGNORED)

    def _advance(self, kind: str, seq: int) -> bool:
        """Whether the message is a new one: many relays send the cursor's own message again."""
        if seq == self._newest:
            self._metrics.outcome(kind, Outcome.REPLAYED)
            return False
        self._newest = seq
        self.trouble = None
        self._place.watermark.add(seq)
        return True

    def _info(self, event: InfoEvent) -> None:
        self._metrics.outcome(event.kind, Outcome.IGNORED)
        if event.name == "OutdatedCursor":
            self.gaps += 1
            self._on_gap()
            log.error("relay.gap", relay=self._place.relay, cursor=self._newest, message=event.message[:300])
        else:
            log.info("relay.info", relay=self._place.relay, name=event.name[:64])

    def _error(self, event: StreamError) -> None:
        """The relay closes the stream behind it. A cursor from the future is never reset by us (spec ES-11)."""
        self._metrics.outcome(event.kind, Outcome.IGNORED)
        self.trouble = f"{event.error[:64]}: {event.message[:200]}"
        log.error("relay.error", relay=self._place.relay, error=self.trouble)
