"""The time up to which events are stored, by the times of the events, of which some may be wrong."""

from collections.abc import Iterable
from itertools import islice
from statistics import median_low

from indexer.sync.events import MAX_AHEAD, event_seconds

EARLIEST = 1_640_995_200.0
"""2022-01-01: no event of the protocol is older."""

ACCOUNTS = 64
"""Accounts whose times count in a batch: those with the latest events."""


class EventClock:
    """Estimates the time of the stream. It only increases, while the clock of this machine does.

    The `time` of an event is what its PDS, or its account, says. So times outside of the possible range do not count,
    an account counts once per batch, and the median of the latest accounts decides.

    Attributes:
        reached: Unix seconds; None before the first possible time.
    """

    reached: float | None = None

    def observe(self, times: Iterable[tuple[str, str]], now: float) -> None:
        """Take the times of the stored events, as pairs of DID and time, in the order of the stream."""
        all_seconds = map(event_seconds, islice(reversed(dict(times).values()), ACCOUNTS))
        possible = [min(one, now) for one in all_seconds if one is not None and EARLIEST <= one <= now + MAX_AHEAD]
        if possible:
            self._advance(median_low(possible), now)

    def catch_up(self, now: float) -> None:
        """Note that everything until now is stored."""
        self._advance(now, now)

    def _advance(self, seconds: float, now: float) -> None:
        """Note that everything until this time is stored. It goes back only if the clock of this machine was set back.

        Otherwise the lag would be 0 until that clock reaches the time that it has shown before.
        """
        set_back = self.reached is not None and self.reached > now + MAX_AHEAD
        self.reached = seconds if self.reached is None or set_back else max(self.reached, seconds)
