"""The usual rate of exports, to distinguish a slow host from a slow network of this machine."""

import math

from indexer.concurrency.bounded_dict import BoundedDict
from indexer.net.http import registered_domain

MAX_DOMAINS = 1_000
"""Registered domains whose latest rate is remembered."""
SLOW_SHARE = 0.25
"""An export below this share of the usual rate is slow."""


class UsualRate:
    """The mean of the latest rates of registered domains, so that an owner of many names or exports counts once."""

    def __init__(self) -> None:
        self._latest = BoundedDict[str, float](MAX_DOMAINS)

    def add(self, host: str, rate: float) -> None:
        """Add the rate of a complete export."""
        self._latest[registered_domain(host)] = rate

    @property
    def slow(self) -> float:
        """The rate in bytes per second below which an export is slow; infinite if no export was complete so far."""
        return SLOW_SHARE * sum(self._latest.values()) / len(self._latest) if self._latest else math.inf
