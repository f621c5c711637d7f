"""Limit how many accounts the stream may add for the hosts of one registered domain in an hour.

Anyone with a wildcard name in the DNS can sign as many valid accounts as they like. Repos that a repo list or a command
added do not count, so a backfill of the network is as fast as before.
"""

from indexer.concurrency.bounded_dict import BoundedDict
from indexer.net.http.host_limits import registered_domain

PERIOD_SECONDS = 3_600.0
MAX_DOMAINS = 20_000
"""Domains that are remembered. Those that added no account for the longest time are forgotten first."""


class NewAccounts:
    """Counts new accounts by registered domain. Times are Unix seconds.

    A domain may add an hour's worth of accounts at once. After that, each account gets a time of its own, in the order
    of the calls, at the rate of the limit. The counts are those of one process, and are lost when it ends.
    """

    def __init__(self, per_hour: float) -> None:
        """Allow `per_hour` accounts an hour; 0: no limit."""
        self._interval = PERIOD_SECONDS / per_hour if per_hour else 0.0
        self._filled_until = BoundedDict[str, float](MAX_DOMAINS)
        self._counted_at = 0.0

    def is_limited(self, host: str, now: float) -> bool:
        """Return True if the registered domain of the host has used up its allowance."""
        if not self._filled_until:
            return False
        self._forget_if_set_back(now)
        filled_until = self._filled_until.get(registered_domain(host))
        return filled_until is not None and self._exceeds(filled_until, now)

    def add(self, host: str, now: float) -> float | None:
        """Count one account; return the time from which it may be fetched, or None if that is now."""
        if not self._interval:
            return None
        self._forget_if_set_back(now)
        self._counted_at = now
        domain = registered_domain(host)
        filled_until = max(self._filled_until.get(domain, 0.0), now)
        self._filled_until[domain] = filled_until + self._interval
        return filled_until + self._interval - PERIOD_SECONDS if self._exceeds(filled_until, now) else None

    def _forget_if_set_back(self, now: float) -> None:
        """Forget the counts if the clock was set back since the last one: they would limit all domains until then."""
        if now < self._counted_at - PERIOD_SECONDS:
            self._filled_until.clear()

    def _exceeds(self, filled_until: float, now: float) -> bool:
        return filled_until + self._interval / 2 > now + PERIOD_SECONDS
