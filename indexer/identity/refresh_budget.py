"""A rate limit with a burst, of which each user gets only a share."""

from dataclasses import dataclass, field

BURST_SECONDS = 10.0
SHARES = 5
"""The number of equal shares of the rate. A user gets at most one share."""

MAX_IDLE_USERS = 16_384
"""Above this number of users, the users whose share is unused are forgotten."""


@dataclass(slots=True)
class RefreshBudget:
    """Allows `rate` actions per second in total, and a fifth of that to each user.

    The unused budget of the last ten seconds can be spent at once.
    """

    rate: float
    _full_at: dict[str, float] = field(default_factory=dict)  # by user: when the unused share is complete again
    _total_full_at: float = 0.0

    def spend(self, user: str, now: float) -> bool:
        """Count one action of `user` at `now` (seconds) and return True; return False if the budget is spent."""
        total_full_at = _after_spending(self._total_full_at, self.rate, now)
        full_at = _after_spending(self._full_at.get(user, 0.0), self.rate / SHARES, now)
        if total_full_at is None or full_at is None:
            return False
        self._total_full_at = total_full_at
        self._full_at[user] = full_at
        if len(self._full_at) > MAX_IDLE_USERS:
            self._full_at = {name: at for name, at in self._full_at.items() if at > now}
        return True

    def __len__(self) -> int:
        """Return the number of users in memory."""
        return len(self._full_at)


def _after_spending(full_at: float, rate: float, now: float) -> float | None:
    """Return when the budget is complete again after one more action at `now`; None if it is spent."""
    limit = now + max(BURST_SECONDS, 1 / rate)
    # A later time was computed before the clock was set back.
    after = (full_at if now < full_at <= limit else now) + 1 / rate
    return after if after <= limit else None
