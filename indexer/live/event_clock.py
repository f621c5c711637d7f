"""The time up to which events are stored, by the times of the events, of which some may be wrong."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from itertools import chain, islice

from indexer.sync.events import event_seconds

EARLIEST = 1_640_995_200.0
"""2022-01-01: no event of the protocol is older."""
MAX_AHEAD = 300.0
"""Seconds that an event may be ahead of the clock of this machine."""
DOMAIN_SHARE = 1 / 4
"""Share of the votes that the accounts of one registered domain have at most, if there are more than four domains."""
RECENT_ACCOUNTS = 64
"""Accounts whose latest times decide until when everything is certainly stored."""
CERTAIN_SHARE = 0.35
"""Share of the votes up to the time until which everything is certainly stored. One of three domains does not have it,
so it cannot move this time back. It is less than a half, because too early a time only repeats messages.
"""
MAX_VOTES_PER_DOMAIN = 16
"""Accounts of one registered domain that have a vote in a batch: those with the latest events."""

_ROUNDING = 1e-9
_Vote = tuple[float, str]
"""The time of an account's latest event, in Unix seconds, and the registered domain of its host."""


class EventClock:
    """Estimates the time of the stream. It only increases, while the clock of this machine does.

    The `time` of an event is what its PDS, or its account, says. So an account has one vote per batch, times outside of
    the possible range do not count, one registered domain has at most a share of the votes, and the median decides.

    Attributes:
        reached: Unix seconds; None before the first possible time.
    """

    def __init__(self, domain_of: Callable[[str], str]) -> None:
        """Use `domain_of` to get the registered domain of the host of a DID, "" if it is unknown."""
        self._domain_of = domain_of
        self._recent: dict[str, _Vote] = {}
        self.reached: float | None = None

    @property
    def stored_until(self) -> float | None:
        """Unix seconds until which everything is certainly stored, by the times of the latest accounts; None: unknown.

        One account with a fast clock at the end of the stream does not decide, and no time is after its arrival.
        """
        return _quantile(self._recent.values(), CERTAIN_SHARE)

    def observe(self, times: Iterable[tuple[str, str]], now: float) -> None:
        """Take the times of the stored events, as pairs of DID and time, in the order of the stream."""
        domain_of, votes, counts = self._domain_of, dict[str, _Vote](), dict[str, int]()
        for did, time in reversed(dict(times).items()):
            domain = domain_of(did)
            count = counts.get(domain, 0)
            if count == MAX_VOTES_PER_DOMAIN:
                continue
            seconds = event_seconds(time)
            if seconds is not None and EARLIEST <= seconds <= now + MAX_AHEAD:
                counts[domain] = count + 1
                votes[did] = (min(seconds, now), domain)
        median = _quantile(votes.values(), 1 / 2)
        if median is not None:
            self._advance(median, now)
            self._remember(votes)

    def catch_up(self, now: float) -> None:
        """Note that everything until now is stored."""
        self._advance(now, now)

    def _advance(self, seconds: float, now: float) -> None:
        """Note that everything until this time is stored. It goes back only if the clock of this machine was set back.

        Otherwise the lag would be 0 until that clock reaches the time that it has shown before.
        """
        set_back = self.reached is not None and self.reached > now + MAX_AHEAD
        self.reached = seconds if self.reached is None or set_back else max(self.reached, seconds)

    def _remember(self, votes: dict[str, _Vote]) -> None:
        """Keep the votes of the latest accounts, which come first."""
        older = ((did, vote) for did, vote in self._recent.items() if did not in votes)
        self._recent = dict(islice(chain(votes.items(), older), RECENT_ACCOUNTS))


def _quantile(votes: Collection[_Vote], share: float) -> float | None:
    """Return the lowest time with at least `share` of the votes at or before it; None if there are no votes."""
    counts = Counter([domain for _, domain in votes])
    most = _most_votes(sorted(counts.values(), reverse=True))
    weights = {domain: min(1.0, most / count) for domain, count in counts.items()}
    rest = share * sum([weights[domain] * count for domain, count in counts.items()]) - _ROUNDING
    for seconds, domain in sorted(votes):
        rest -= weights[domain]
        if rest <= 0:
            return seconds
    return None


def _most_votes(counts: list[int]) -> float:
    """Return the number of votes to which larger domains are limited, given the accounts of each, in falling order.

    With it, each domain has at most `DOMAIN_SHARE` of all votes. If there are too few domains for that, all have the
    same number.
    """
    rest = sum(counts)
    for limited, count in enumerate(counts):
        if limited * DOMAIN_SHARE >= 1:
            break
        most = DOMAIN_SHARE * rest / (1 - limited * DOMAIN_SHARE)
        if count <= most:
            return most
        rest -= count
    return counts[-1] if counts else 0.0
