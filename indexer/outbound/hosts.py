"""Manners towards hosts: requests a second and requests at once, to each and to all together, and pauses.

A host has a pause when it asks for one, and when requests to it fail one after the other: then it is left alone for
longer and longer, and behind each pause a single request tries it for all others.
"""

from asyncio import Semaphore
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from aiolimiter import AsyncLimiter

from indexer.errors import UnavailableError
from indexer.reasons import FetchFailure
from indexer.sync.backoff import backoff_seconds

MOST_HOSTS = 16_384
FAILURES = 5  # one after the other, from which on a host is broken
FIRST_PAUSE = 30.0
LONGEST_PAUSE = 3_600.0
OWN_LONGEST_PAUSE = 60.0  # for hosts that the operator named: everything waits for them
_FORGOTTEN = MOST_HOSTS // 16  # at once, so that sorting them is rare
_SERVER_ERROR, _NOT_IMPLEMENTED = 500, 501

_GIVEN_UP = "given-up"  # by us, before there was an answer
_BY_CLASS = {2: "2xx", 3: "3xx", 4: "4xx", 5: "5xx"}
_OTHER = "other"
_UNANSWERED = frozenset({_GIVEN_UP, FetchFailure.REFUSED_ADDRESS})
_HOSTS_FAULT = frozenset({FetchFailure.UNREACHABLE, FetchFailure.NO_SUCH_HOST, FetchFailure.TIMEOUT})

RESULTS = (
    *_BY_CLASS.values(),
    _OTHER,
    _GIVEN_UP,
    FetchFailure.UNREACHABLE,
    FetchFailure.NO_SUCH_HOST,
    FetchFailure.TIMEOUT,
    FetchFailure.TOO_LARGE,
    FetchFailure.BAD_ANSWER,
    FetchFailure.REFUSED_ADDRESS,
    FetchFailure.THROTTLED,
    FetchFailure.HOST_PAUSED,
)
"""What can come of a request; the last three are those that were never sent."""


@dataclass(frozen=True, slots=True)
class HostState:
    """What is known of a host, to be kept over a restart. Times are Unix seconds.

    `requests` and `failures` are all in the table, and here those since it was last saved; `streak` are the failures
    since it last answered. The pause may be over.
    """

    host: str
    requests: int
    failures: int
    streak: int
    paused_until: float | None
    pause_reason: FetchFailure | None
    last_error: str | None
    last_success: float | None


@dataclass(slots=True)
class Turn:
    """One request, and what came of it: `error` is the failure that is the host's own."""

    result: str = _GIVEN_UP
    error: str | None = None
    pause: float | None = None

    def answered(self, status: int, pause: float | None) -> None:
        """With `pause`, the host asks to be left alone for so many seconds.

        A host that can't (501), doesn't want to (4xx), or knows when it will be able to again is not broken.
        """
        self.result, self.pause = _BY_CLASS.get(status // 100, _OTHER), pause
        if status >= _SERVER_ERROR and status != _NOT_IMPLEMENTED and pause is None:
            self.error = f"{FetchFailure.HTTP_STATUS}: {status}"

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Takes note of the `UnavailableError` that ends the block."""
        try:
            yield
        except UnavailableError as error:
            self.result = error.reason
            if error.reason in _HOSTS_FAULT:
                self.error = str(error)
            raise


@dataclass(slots=True)
class _Host:
    name: str
    rate: AsyncLimiter
    slots: Semaphore
    longest_pause: float
    users: int = 0
    trying: bool = False
    requests: int = 0
    failures: int = 0
    streak: int = 0
    paused_until: float = 0.0
    pause_reason: FetchFailure | None = None
    last_error: str | None = None
    last_success: float | None = None

    @property
    def state(self) -> HostState:
        return HostState(
            self.name,
            self.requests,
            self.failures,
            self.streak,
            self.paused_until or None,
            self.pause_reason,
            self.last_error,
            self.last_success,
        )

    def pause(self, reason: FetchFailure, until: float) -> None:
        if until > self.paused_until:
            self.paused_until, self.pause_reason = until, reason

    def settle(self, turn: Turn, now: float) -> None:
        self.requests += 1
        if turn.error is not None:
            self._fail(turn.error, now)
        elif turn.result not in _UNANSWERED:
            self._answer(turn.pause, now)

    def _fail(self, error: str, now: float) -> None:
        self.failures += 1
        self.last_error = error[:300]
        if self.paused_until > now:  # it was sent before the pause began, and tells nothing new
            return
        self.streak += 1
        if self.streak >= FAILURES:
            pause = backoff_seconds(self.streak - FAILURES + 1, self.name, first=FIRST_PAUSE, most=self.longest_pause)
            self.pause(FetchFailure.HOST_PAUSED, now + pause)

    def _answer(self, pause: float | None, now: float) -> None:
        self.streak = 0
        if self.pause_reason is FetchFailure.HOST_PAUSED:
            self.paused_until = 0.0
        if pause is None:
            self.last_success = now
        else:
            self.pause(FetchFailure.THROTTLED, now + pause)


@dataclass(frozen=True, slots=True)
class Rates:
    """Requests a second, and at once, to any one host and to all together.

    `own` are the rates of hosts that the operator named, by `host_of`.
    """

    host: float = 10.0
    host_concurrency: int = 10
    total: float = 100.0
    concurrency: int = 256
    own: Mapping[str, float] = field(default_factory=dict)


class Hosts:
    """The hosts met lately, at most `MOST_HOSTS`; see `_forget`.

    `clock` gives Unix seconds; `on_request` hears of each request's result, one of `RESULTS`.
    """

    def __init__(self, rates: Rates, clock: Callable[[], float], on_request: Callable[[str], None]) -> None:
        self._rates = rates
        self._clock = clock
        self._on_request = on_request
        self._total_rate = _limiter(rates.total)
        self._total_slots = Semaphore(rates.concurrency)
        self._hosts: OrderedDict[str, _Host] = OrderedDict()

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[Turn]:
        """Waits for the next free place; tell the turn what comes of it.

        Raises `UnavailableError` during a pause, with its end as `retry_after`: THROTTLED if the host asked for it,
        HOST_PAUSED if it is broken.
        """
        host = self._host(name)
        host.users += 1
        try:
            self._refuse_paused(host)
            async with host.slots:
                await host.rate.acquire()
                await self._total_rate.acquire()
                async with self._total_slots:
                    with self._admitted(host) as turn:
                        yield turn
        finally:
            host.users -= 1

    def load(self, states: Iterable[HostState]) -> None:
        """What was known when the program last ended."""
        for state in states:
            host = self._host(state.host)
            host.streak, host.last_error, host.last_success = state.streak, state.last_error, state.last_success
            host.paused_until, host.pause_reason = state.paused_until or 0.0, state.pause_reason

    def unsaved(self) -> list[HostState]:
        """Those that had requests since they were last `saved`."""
        return [host.state for host in self._hosts.values() if host.requests]

    def saved(self, states: Iterable[HostState]) -> None:
        for state in states:
            if (host := self._hosts.get(state.host)) is not None:
                host.requests = max(0, host.requests - state.requests)  # it may have been forgotten and met again
                host.failures = max(0, host.failures - state.failures)

    def paused(self) -> list[HostState]:
        """Those that are left alone just now, the longest first."""
        now = self._clock()
        paused = [host for host in self._hosts.values() if host.paused_until > now]
        return [host.state for host in sorted(paused, key=lambda host: -host.paused_until)]

    @contextmanager
    def _admitted(self, host: _Host) -> Iterator[Turn]:
        self._refuse_paused(host)
        turn, trial = Turn(), host.streak >= FAILURES
        host.trying |= trial
        try:
            yield turn
        finally:
            host.trying &= not trial
            host.settle(turn, self._clock())
            self._on_request(turn.result)

    def _refuse_paused(self, host: _Host) -> None:
        left = host.paused_until - self._clock()
        if left <= 0 and not host.trying:
            return
        if left > 0 and host.pause_reason is FetchFailure.THROTTLED:
            reason, why = FetchFailure.THROTTLED, f"{host.name} asked for a pause"
        else:
            reason, why = FetchFailure.HOST_PAUSED, f"{host.name} failed {host.streak} times, {host.last_error}"
        self._on_request(reason)
        raise UnavailableError(reason, why, retry_after=left if left > 0 else FIRST_PAUSE, host=host.name)

    def _host(self, name: str) -> _Host:
        host = self._hosts.get(name)
        if host is None:
            self._forget()
            own, slots = self._rates.own.get(name), Semaphore(self._rates.host_concurrency)
            longest = LONGEST_PAUSE if own is None else OWN_LONGEST_PAUSE
            host = self._hosts[name] = _Host(name, _limiter(own or self._rates.host), slots, longest)
        self._hosts.move_to_end(name)
        return host

    def _forget(self) -> None:
        """Makes room. Those without a pause go first, the longest unused before others.

        Only when all the others are paused, those go whose pauses end first: more than `MOST_HOSTS` pauses at once are
        somebody's work, and must not keep us from all other hosts.
        """
        if len(self._hosts) < MOST_HOSTS:
            return
        now = self._clock()
        idle = [host for host in self._hosts.values() if not host.users]
        idle.sort(key=lambda host: max(host.paused_until, now))
        for host in idle[:_FORGOTTEN]:
            del self._hosts[host.name]


def _limiter(rate: float) -> AsyncLimiter:
    burst = max(rate, 1.0)  # below one a second, a bucket still has to hold one
    return AsyncLimiter(burst, burst / rate)
