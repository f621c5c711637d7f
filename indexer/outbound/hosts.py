"""Manners towards each host: requests a second, requests at once, and pauses that it asked for."""

from asyncio import Semaphore
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiolimiter import AsyncLimiter

from indexer.errors import UnavailableError
from indexer.reasons import FetchFailure

_MOST_HOSTS = 4_096


@dataclass(slots=True)
class _Host:
    rate: AsyncLimiter
    slots: Semaphore
    users: int = 0
    paused_until: float = 0.0


class Hosts:
    """The hosts met lately; the longest unused are forgotten, and their pauses with them.

    `rates` has hosts with a rate of their own, in requests a second. `clock` is monotonic, in seconds.
    """

    def __init__(self, rate: float, concurrency: int, rates: Mapping[str, float], clock: Callable[[], float]) -> None:
        self._rate = rate
        self._concurrency = concurrency
        self._rates = rates
        self._clock = clock
        self._hosts: OrderedDict[str, _Host] = OrderedDict()

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        """Waits for this host's next free place; raises `UnavailableError(THROTTLED)` while it is paused."""
        host = self._host(name)
        host.users += 1
        try:
            self._refuse_paused(name, host)
            async with host.slots:
                await host.rate.acquire()
                self._refuse_paused(name, host)
                yield
        finally:
            host.users -= 1

    def pause(self, name: str, seconds: float) -> None:
        host = self._host(name)
        host.paused_until = max(host.paused_until, self._clock() + seconds)

    def _refuse_paused(self, name: str, host: _Host) -> None:
        left = host.paused_until - self._clock()
        if left > 0:
            raise UnavailableError(FetchFailure.THROTTLED, f"{name} asked for a pause", retry_after=left)

    def _host(self, name: str) -> _Host:
        host = self._hosts.get(name)
        if host is None:
            rate = self._rates.get(name, self._rate)
            burst = max(rate, 1.0)  # below one a second, a bucket still has to hold one
            host = self._hosts[name] = _Host(AsyncLimiter(burst, burst / rate), Semaphore(self._concurrency))
            self._forget()
        self._hosts.move_to_end(name)
        return host

    def _forget(self) -> None:
        if len(self._hosts) > _MOST_HOSTS:
            idle = next((name for name, host in self._hosts.items() if host.users == 0), None)
            if idle is not None:
                del self._hosts[idle]
