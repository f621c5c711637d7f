"""Compare the streams of several relays: charge those that lack messages, and close gaps that others cover."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from time import monotonic

from indexer.db.gaps import OpenGaps
from indexer.live.covered_gaps import MARGIN_SECONDS, CoveredGaps
from indexer.live.lacking_messages import MISSING_SECONDS, LackingMessages
from indexer.live.streams import Stream, silent_seconds
from indexer.sync.batch import ReceivedMessage, SettledMessage
from indexer.sync.events import AccountEvent, CommitEvent, SyncEvent
from indexer.sync.repo import hides
from indexer.telemetry.conditions import RELAY_LACKS_MESSAGES, Conditions
from indexer.telemetry.metrics import Metrics

CAUGHT_UP_LAG = 30.0
"""Maximum lag of a stream that is caught up, in seconds."""
SILENT_SECONDS = 10.0
"""A stream that has sent nothing for longer is not behind: what it has not sent, it lacks."""


@dataclass(frozen=True, slots=True)
class ComparisonSettings:
    """Times of the comparison, in seconds."""

    missing: float = MISSING_SECONDS  # in which a stream must bring a message that another one has brought
    margin: float = MARGIN_SECONDS  # by which another stream must have passed a gap to cover it


@dataclass(eq=False)
class RelayComparison:
    """Compares the streams of relays. With a single one, there is nothing to compare."""

    streams: Mapping[str, Stream]  # by the URL of the relay
    gaps: OpenGaps
    metrics: Metrics
    conditions: Conditions
    settings: ComparisonSettings

    def __post_init__(self) -> None:
        self._has_several = len(self.streams) > 1
        for relay in self.streams if self._has_several else ():
            self.metrics.relay_missing_messages.labels(relay)
            self.metrics.relay_uncompared_messages.labels(relay)
        self.lacking = LackingMessages(self.streams, self.settings.missing)
        self.covered = CoveredGaps(
            self.gaps, self._stored_until, self.lacking.newest, self.lacking.omits, self.settings.margin
        )

    def add(self, settled: Iterable[SettledMessage], copies: Iterable[ReceivedMessage]) -> None:
        """Note messages that are settled, and then the copies that other streams have brought of settled messages."""
        if not self._has_several:
            return
        now = monotonic()
        for received, _, _, is_new in settled:
            self._add(received, now, is_new=is_new)
        for copy in copies:
            self._add(copy, now, is_new=False)

    def _add(self, received: ReceivedMessage, now: float, *, is_new: bool) -> None:
        relay, event = received.origin.relay, received.event
        if relay not in self.streams:
            return
        if isinstance(event, CommitEvent | SyncEvent):
            self.lacking.add(relay, event.did, event.rev, now, is_new=is_new)
        elif isinstance(event, AccountEvent):
            withheld = not event.active and not hides(event.status)
            self.lacking.set_status(relay, event.did, active=event.active, withheld=withheld)

    def show(self, relay: str) -> dict[str, object]:
        """Return fields of the status of a stream; they are None if it is the only one."""
        several = self._has_several
        return {
            "compared": self.lacking.is_compared(relay) if several else None,
            "missing_messages": self.lacking.charged(relay) if several else None,
        }

    async def check(self) -> None:
        """Note which streams are caught up, charge those that lack messages, and close gaps. Call it every second.

        Raises:
            DatabaseError: The database is unavailable.
        """
        now = monotonic()
        for relay, stream in self.streams.items():
            self.lacking.set_caught_up(relay, now, caught_up=_is_caught_up(stream, now))
        for relay, messages in self.lacking.charges(now).items():
            self.metrics.relay_missing_messages.labels(relay).inc(len(messages))
            did, rev = messages[-1]
            message = f"it has not sent messages that another relay has sent, such as the commit {rev} of {did}"
            self.conditions.report(RELAY_LACKS_MESSAGES, relay, message=message, count=len(messages))
        for relay, number in self.lacking.not_compared.items():
            self.metrics.relay_uncompared_messages.labels(relay).inc(number)
            self.lacking.not_compared[relay] = 0
        await self.covered.close()

    def _stored_until(self) -> Mapping[str, float | None]:
        several = self.streams.items() if self._has_several else ()
        return {relay: stream.position.clock.reached for relay, stream in several}


def _is_caught_up(stream: Stream, now: float) -> bool:
    """Return True if a stream is connected and not behind the network, as far as its messages tell."""
    connection, lag = stream.subscription.connection, stream.position.lag
    if connection is None or not stream.position.is_known():
        return False
    since_message = silent_seconds([stream])
    silent = min(now - connection.opened_at, inf if since_message is None else since_message)
    return silent > SILENT_SECONDS or (lag is not None and lag <= CAUGHT_UP_LAG)
