"""The time up to which events are stored, by the times of the events, of which some may be wrong."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from statistics import median_low

from indexer.sync.events import MAX_AHEAD, event_seconds

EARLIEST = 1_640_995_200.0
"""2022-01-01: no event of the protocol is older."""
ACCOUNTS_OF_DOMAIN = 16
"""Accounts of one registered domain whose times count in a batch: those with the latest events."""


class EventClock:
    """Estimates the time of the stream. It only increases, while the clock of this machine does.

    The `time` of an event is what its PDS, or its account, says. So times outside of the possible range do not count,
    an account counts once per batch, and so does a registered domain, with the median of its accounts. The median of
    the domains decides.

    Attributes:
        reached: Unix seconds; None before the first possible time.
    """

    def __init__(self, domain_of: Callable[[str], str]) -> None:
        """Use `domain_of` to get the registered domain of the host of a DID, "" if it is unknown."""
        self._domain_of = domain_of
        self.reached: float | None = None

    def observe(self, times: Iterable[tuple[str, str]], now: float) -> None:
        """Take the times of the stored events, as pairs of DID and time, in the order of the stream."""
        by_domain = defaultdict[str, list[float]](list)
        for did, time in reversed(dict(times).items()):
            of_domain = by_domain[self._domain_of(did)]
            if len(of_domain) < ACCOUNTS_OF_DOMAIN:
                seconds = event_seconds(time)
                if seconds is not None and EARLIEST <= seconds <= now + MAX_AHEAD:
                    of_domain.append(min(seconds, now))
        medians = [median_low(of_domain) for of_domain in by_domain.values() if of_domain]
        if medians:
            self._advance(median_low(medians), now)

    def catch_up(self, now: float) -> None:
        """Note that everything until now is stored."""
        self._advance(now, now)

    def _advance(self, seconds: float, now: float) -> None:
        """Note that everything until this time is stored. It goes back only if the clock of this machine was set back.

        Otherwise the lag would be 0 until that clock reaches the time that it has shown before.
        """
        set_back = self.reached is not None and self.reached > now + MAX_AHEAD
        self.reached = seconds if self.reached is None or set_back else max(self.reached, seconds)
