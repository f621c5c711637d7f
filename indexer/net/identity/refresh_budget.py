"""A rate limit with a burst. The accounts of one host, or of one registered domain, get only a share of it."""

from dataclasses import dataclass, field

BURST_SECONDS = 10.0
SHARES = 5
"""The number of equal shares of the rate. A host gets at most one of them."""
SHARES_OF_DOMAIN = 4
"""The shares that all hosts of one registered domain get together: its owner can give any account a host of its own."""

MAX_IDLE_USERS = 16_384
"""Above this number of hosts and domains, those whose share is unused are forgotten."""


@dataclass(slots=True)
class RefreshBudget:
    """Allows `rate` actions per second in total, a fifth of that to each host, and four fifths to each domain.

    The unused budget of the last ten seconds can be spent at once.
    """

    rate: float
    _full_at: dict[str, float] = field(default_factory=dict)  # when the unused share is complete again
    _total_full_at: float = 0.0

    def spend(self, host: str, domain: str, now: float) -> bool:
        """Count one action for a host at `now` (seconds) and return True; return False if the budget is spent."""
        share = self.rate / SHARES
        of_host, of_domain = f"host {host}", f"domain {domain}"
        total_full_at = _after_spending(self._total_full_at, self.rate, now)
        host_full_at = _after_spending(self._full_at.get(of_host, 0.0), share, now)
        domain_full_at = _after_spending(self._full_at.get(of_domain, 0.0), share * SHARES_OF_DOMAIN, now)
        if total_full_at is None or host_full_at is None or domain_full_at is None:
            return False
        self._total_full_at = total_full_at
        self._full_at[of_host], self._full_at[of_domain] = host_full_at, domain_full_at
        if len(self._full_at) > MAX_IDLE_USERS:
            self._full_at = {name: at for name, at in self._full_at.items() if at > now}
        return True

    def __len__(self) -> int:
        """Return the number of hosts and domains in memory."""
        return len(self._full_at)


def _after_spending(full_at: float, rate: float, now: float) -> float | None:
    """Return when the budget is complete again after one more action at `now`; None if it is spent."""
    limit = now + max(BURST_SECONDS, 1 / rate)
    # A later time was computed before the clock was set back.
    after = (full_at if now < full_at <= limit else now) + 1 / rate
    return after if after <= limit else None
