"""How often something may be done: at a rate, with a burst, and nobody has more than a share of it."""

from dataclasses import dataclass, field

BURST_SECONDS = 10.0
SHARES = 5  # so many users at their full share use all there is
_PRUNED_AT = 16_384


@dataclass(slots=True)
class Budget:
    """At most `rate` times a second, for each user a fifth of that; what was not used lasts ten seconds."""

    rate: float
    _full_at: dict[str, float] = field(default_factory=dict)
    _all_full_at: float = 0.0

    def spend(self, user: str, now: float) -> bool:
        """Whether it may be done once more for `user`, at `now` seconds; it counts if it may."""
        all_full_at = _after_spending(self._all_full_at, self.rate, now)
        full_at = _after_spending(self._full_at.get(user, 0.0), self.rate / SHARES, now)
        if all_full_at is None or full_at is None:
            return False
        self._all_full_at = all_full_at
        self._full_at[user] = full_at
        if len(self._full_at) > _PRUNED_AT:
            self._full_at = {name: at for name, at in self._full_at.items() if at > now}
        return True


def _after_spending(full_at: float, rate: float, now: float) -> float | None:
    """When what may be done is back at its most, after it was done at `now`; None if there is nothing left."""
    after = max(full_at, now) + 1 / rate
    return after if after <= now + max(BURST_SECONDS, 1 / rate) else None
