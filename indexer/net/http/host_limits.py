"""Per-host rate limits and circuit breaker (docs/protocol.md#outbound-requests).

Requests per second and concurrent requests are limited, for each host and in total. Names cost nothing, so the limits
of a host also hold for all names of one network address, and for all names of one registered domain that have not
answered yet. Names that have answered from an address have limits of their own there: otherwise other names that lead
to it could use up its requests.

A host is paused when it asks for a pause, and when requests to it fail several times in a row, each time for longer.
After such a pause, one request probes the host; other requests are refused until the probe ends.
"""

import math
from asyncio import Semaphore
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from functools import cache, lru_cache
from http import HTTPStatus

from aiolimiter import AsyncLimiter
from publicsuffixlist import PublicSuffixList

from indexer.concurrency.bounded_dict import BoundedDict
from indexer.errors import UnavailableError
from indexer.reasons import FetchFailure
from indexer.sync.backoff import backoff_seconds
from indexer.sync.identity import MAX_HOSTS, HostState

MAX_SHARED_LIMITS = 4_096
"""Network addresses, and registered domains, whose limits are tracked."""
FAILURE_THRESHOLD = 5
"""Consecutive failures after which a host is paused."""

FIRST_PAUSE = 30.0
MAX_PAUSE = 3_600.0
MAX_PAUSE_CONFIGURED = 60.0
LONGEST_PAUSE = 2 * MAX_PAUSE
"""A longer pause is over: it began before the clock was set back."""

DEFAULT_RETRY_AFTER = 60.0
MAX_RETRY_AFTER = 3_600.0
_MIN_RETRY_AFTER = 1.0
_EPOCH = 1_000_000_000  # larger numbers are Unix times, not durations
_EVICTION_BATCH = MAX_HOSTS // 16  # many at a time, because each eviction sorts the hosts

_GIVEN_UP = "given-up"  # the caller stopped waiting for the response
_SUCCESS = "2xx"
_BY_CLASS = {2: _SUCCESS, 3: "3xx", 4: "4xx", 5: "5xx"}
_OTHER = "other"
_NO_RESPONSE = frozenset({_GIVEN_UP, FetchFailure.REFUSED_ADDRESS})
_HOST_FAILURES = frozenset({FetchFailure.UNREACHABLE, FetchFailure.NO_SUCH_HOST, FetchFailure.TIMEOUT})


@dataclass(slots=True)
class RequestSlot:
    """The permission to send one request, and the result of the request."""

    may_fail: bool = True  # a failure counts as one of the host; not if another host redirected to it
    may_pause: bool = True  # the host may ask for a pause; not if a host that is not configured redirected to it
    result: str = _GIVEN_UP
    error: str | None = None  # the failure, if it is the host's fault
    pause: float | None = None  # seconds for which the host asked to receive no requests
    server: str | None = None

    def record_response(self, status: int, pause: float | None) -> None:
        """Record a response. A 5xx status is a failure, except 501 and a response that asks for a `pause` (seconds)."""
        self.result, self.pause = _BY_CLASS.get(status // 100, _OTHER), pause
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR and status != HTTPStatus.NOT_IMPLEMENTED and pause is None:
            self.error = f"{FetchFailure.HTTP_STATUS}: {status}"

    @contextmanager
    def record_errors(self) -> Iterator[None]:
        """Record an `UnavailableError` that the block raises, and raise it again."""
        try:
            yield
        except UnavailableError as error:
            if error.reason is not FetchFailure.HTTP_STATUS:  # otherwise the response was recorded
                self.result = error.reason
            if error.reason in _HOST_FAILURES:
                self.error = str(error)
            raise


class _Limit:
    """Limits requests per second, and concurrent requests."""

    def __init__(self, rate: float, concurrency: int) -> None:
        burst = max(rate, 1.0)  # the bucket must hold at least one request, also below one per second
        self._rate = AsyncLimiter(burst, burst / rate)
        self._slots = Semaphore(concurrency)

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        async with self._slots:
            await self._rate.acquire()
            yield


@dataclass(slots=True)
class _Host:
    """A host in memory."""

    state: HostState  # its requests and failures are those since the state was last saved
    limit: _Limit
    first_pause: float
    max_pause: float
    users: int = 0  # requests that wait or run
    probing: bool = False
    answers_from: str | None = None  # the network address and port of its last successful answer

    def pause_left(self, now: float) -> float:
        """Return the seconds until the pause ends; zero or less without a pause."""
        if (self.state.paused_until or 0.0) > now + LONGEST_PAUSE:
            self.state.paused_until = None
        return (self.state.paused_until or 0.0) - now

    def record(self, slot: RequestSlot, now: float) -> None:
        state = self.state
        state.requests += 1
        if slot.error is not None and slot.may_fail:
            state.failures += 1
            state.last_error = slot.error[:300]
            if self.pause_left(now) > 0:  # the request was sent before the pause began: it must not make it longer
                return
            state.consecutive_failures += 1
            excess = state.consecutive_failures - FAILURE_THRESHOLD
            if excess >= 0:
                pause = backoff_seconds(excess + 1, state.host, first=self.first_pause, maximum=self.max_pause)
                self._pause(FetchFailure.HOST_PAUSED, now + pause)
        elif slot.error is None and slot.result not in _NO_RESPONSE and (slot.pause is None or slot.may_pause):
            state.consecutive_failures = 0
            if state.pause_reason is FetchFailure.HOST_PAUSED:
                state.paused_until = None
            if slot.pause is None:
                state.last_success = now
            else:
                self._pause(FetchFailure.THROTTLED, now + slot.pause)
            if slot.result == _SUCCESS and slot.server is not None:
                self.answers_from = slot.server

    def _pause(self, reason: FetchFailure, until: float) -> None:
        if until > (self.state.paused_until or 0.0):
            self.state.paused_until, self.state.pause_reason = until, reason


@dataclass(frozen=True, slots=True)
class HostPauses:
    """Pauses of hosts whose requests fail, in seconds."""

    first: float = FIRST_PAUSE  # each failure doubles it
    maximum: float = MAX_PAUSE
    max_configured: float = MAX_PAUSE_CONFIGURED  # of hosts in the settings, because all work depends on them


@dataclass(frozen=True, slots=True)
class RateLimits:
    """Limits of outbound requests: requests per second, and concurrent requests.

    The limits of a host also hold for all names of one network address or registered domain. The hosts in the settings,
    by `host_of`, have rates of their own, and share no limits.
    """

    host: float = 10.0
    host_concurrency: int = 10
    total: float = 100.0
    total_concurrency: int = 256
    configured_hosts: Mapping[str, float] = field(default_factory=dict)
    pauses: HostPauses = field(default_factory=HostPauses)


class HostLimits:
    """Limits requests to hosts. It tracks the most recently used hosts, at most `MAX_HOSTS`."""

    def __init__(self, rates: RateLimits, clock: Callable[[], float], on_request: Callable[[str], None]) -> None:
        """Use Unix seconds from `clock`; call `on_request` with the result of each request (`REQUEST_RESULTS`)."""
        self._rates = rates
        self._clock = clock
        self._on_request = on_request
        self._total = _Limit(rates.total, rates.total_concurrency)
        self._hosts: OrderedDict[str, _Host] = OrderedDict()
        self._shared = BoundedDict[str, _Limit](MAX_SHARED_LIMITS)

    def __len__(self) -> int:
        """Return the number of tracked hosts."""
        return len(self._hosts)

    def __contains__(self, name: str) -> bool:
        return name in self._hosts

    @asynccontextmanager
    async def slot(
        self, name: str, redirected_by: str | None = None, resolve: Callable[[], Awaitable[Sequence[str]]] | None = None
    ) -> AsyncIterator[RequestSlot]:
        """Wait for a free request slot of the host. The caller records the result of its request in the slot.

        If another host redirected to this one, any host could pause any other one, so its failures do not count.
        `resolve` returns the network addresses of the host, see `server_of`. If it fails, the request fails.

        Raises:
            UnavailableError: The host is paused, until `retry_after`: THROTTLED if it asked for the pause,
                HOST_PAUSED if requests to it failed.
        """
        host = self._host(name)
        host.users += 1
        try:
            self._refuse_if_paused(host)
            async with host.limit.hold(), AsyncExitStack() as shared:
                if resolve is not None and name not in self._rates.configured_hosts:
                    await self._acquire_shared(shared, host, redirected_by, resolve)
                async with self._total.hold():
                    with self._admit(host, redirected_by) as slot:
                        yield slot
        finally:
            host.users -= 1

    async def _acquire_shared(
        self,
        shared: AsyncExitStack,
        host: _Host,
        redirected_by: str | None,
        resolve: Callable[[], Awaitable[Sequence[str]]],
    ) -> None:
        """Wait for the limits that the host shares with other names, until `shared` is closed."""
        if host.answers_from is None:
            await shared.enter_async_context(self._shared_limit(f"domain {registered_domain(host.state.host)}"))
        try:
            servers = await resolve()
        except UnavailableError:
            with self._admit(host, redirected_by) as slot, slot.record_errors():
                raise
        if host.answers_from in servers:
            await shared.enter_async_context(self._shared_limit(f"answers from {host.answers_from}"))
            return
        for server in sorted(set(servers)):  # in one order, so that no two requests wait for each other
            await shared.enter_async_context(self._shared_limit(f"leads to {server}"))

    def _shared_limit(self, name: str) -> AbstractAsyncContextManager[None]:
        limit = self._shared.get(name) or _Limit(self._rates.host, self._rates.host_concurrency)
        self._shared[name] = limit  # so that the least recently used one is dropped
        return limit.hold()

    def restore(self, states: Iterable[HostState]) -> None:
        """Restore the states that an earlier process saved."""
        for state in states:
            self._host(state.host).state = replace(state, requests=0, failures=0)

    def unsaved(self) -> list[HostState]:
        """Return the hosts that had requests since the last `mark_saved`."""
        return [replace(host.state) for host in self._hosts.values() if host.state.requests]

    def mark_saved(self, states: Iterable[HostState]) -> None:
        """Subtract the counts that were saved. Requests that ended meanwhile stay unsaved."""
        for state in states:
            if (host := self._hosts.get(state.host)) is not None:  # it may have been evicted and added again
                host.state.requests = max(0, host.state.requests - state.requests)
                host.state.failures = max(0, host.state.failures - state.failures)

    def paused(self) -> list[HostState]:
        """Return the hosts that are paused now, the longest pause first."""
        now = self._clock()
        paused = [replace(host.state) for host in self._hosts.values() if host.pause_left(now) > 0]
        return sorted(paused, key=lambda state: -(state.paused_until or 0.0))

    def failing(self) -> list[HostState]:
        """Return the hosts to which the last `FAILURE_THRESHOLD` requests failed, also between two pauses.

        Those with the most consecutive failures are first.
        """
        states = [replace(host.state) for host in self._hosts.values()]
        failing = [state for state in states if state.consecutive_failures >= FAILURE_THRESHOLD]
        return sorted(failing, key=lambda state: -state.consecutive_failures)

    @contextmanager
    def _admit(self, host: _Host, redirected_by: str | None) -> Iterator[RequestSlot]:
        self._refuse_if_paused(host)
        trusted = redirected_by is None or redirected_by in self._rates.configured_hosts
        slot = RequestSlot(may_fail=redirected_by is None, may_pause=trusted)
        is_probe = trusted and host.state.consecutive_failures >= FAILURE_THRESHOLD
        host.probing |= is_probe
        try:
            yield slot
        finally:
            host.probing &= not is_probe
            host.record(slot, self._clock())
            self._on_request(slot.result)

    def _refuse_if_paused(self, host: _Host) -> None:
        left, state = host.pause_left(self._clock()), host.state
        if left <= 0 and not host.probing:
            return
        if left > 0 and state.pause_reason is FetchFailure.THROTTLED:
            reason, detail = FetchFailure.THROTTLED, f"{state.host} asked for a pause"
        else:
            reason = FetchFailure.HOST_PAUSED
            detail = f"{state.host} failed {state.consecutive_failures} times, {state.last_error}"
        self._on_request(reason)
        raise UnavailableError(reason, detail, retry_after=left if left > 0 else host.first_pause, host=state.host)

    def _host(self, name: str) -> _Host:
        host = self._hosts.get(name)
        if host is None:
            self._evict()
            rate, pauses = self._rates.configured_hosts.get(name), self._rates.pauses
            limit = _Limit(rate or self._rates.host, self._rates.host_concurrency)
            max_pause = pauses.maximum if rate is None else pauses.max_configured
            state = HostState(name, 0, 0, 0, None, None, None, None)
            host = self._hosts[name] = _Host(state, limit, pauses.first, max_pause)
        self._hosts.move_to_end(name)
        return host

    def _evict(self) -> None:
        """Forget some hosts if there are `MAX_HOSTS`: the least recently used ones without a pause first.

        Then follow those whose pauses end first: so many pauses at once are an attack.
        """
        if len(self._hosts) < MAX_HOSTS:
            return
        now = self._clock()
        idle = [host for host in self._hosts.values() if not host.users]
        idle.sort(key=lambda host: max(host.pause_left(now), 0.0))
        for host in idle[:_EVICTION_BATCH]:
            del self._hosts[host.state.host]


def retry_after_seconds(status: int, headers: Mapping[str, str], now: float) -> float | None:
    """Return the seconds to wait after a 429, or a 503 with `Retry-After`; None for every other response.

    `Retry-After` (seconds or a date) takes precedence over `RateLimit-Reset`, which is in seconds, or a Unix time as
    the reference PDS sends it. A 429 with neither means one minute. The result is between one second and one hour.

    The host's `Date` is the present time for its dates and Unix times; `now` is only if it sends none.
    """
    if status not in {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}:
        return None
    now = _unix_time(headers.get("date", "")) or now
    seconds = _seconds(headers.get("retry-after", ""), now)
    if seconds is None and status == HTTPStatus.TOO_MANY_REQUESTS:
        seconds = _seconds(headers.get("ratelimit-reset", ""), now)
        seconds = DEFAULT_RETRY_AFTER if seconds is None else seconds
    return None if seconds is None else min(max(seconds, _MIN_RETRY_AFTER), MAX_RETRY_AFTER)


def _seconds(text: str, now: float) -> float | None:
    try:
        number = float(text)
    except ValueError:
        date = _unix_time(text)
        return None if date is None else date - now
    if not math.isfinite(number):
        return None
    return number - now if number > _EPOCH else number


def _unix_time(date: str) -> float | None:
    try:
        return parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError, TypeError):
        return None


_suffix_list = cache(PublicSuffixList)
"""Returns the list that is part of the library. It is read once."""


@lru_cache(maxsize=16_384)
def registered_domain(host: str) -> str:
    """Return the registered domain of a host name, as of `host_of`; the host itself if it has none.

    The Public Suffix List decides, including its private suffixes: names directly below one have different owners, too.
    An IP address, or a name without a dot, counts as a domain of its own, and so does each of its ports.
    """
    name = host.rpartition(":")[0] or host
    if name.rpartition(".")[2].isdecimal() or ":" in name:
        return host
    return _suffix_list().privatesuffix(name) or host
