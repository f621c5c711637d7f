import asyncio
from dataclasses import replace
from time import monotonic

import pytest

from indexer.errors import UnavailableError
from indexer.net.http.host_limits import (
    FAILURE_THRESHOLD,
    FIRST_PAUSE,
    MAX_PAUSE,
    MAX_PAUSE_CONFIGURED,
    HostLimits,
    RateLimits,
)
from indexer.reasons import FetchFailure
from indexer.sync.identity import MAX_HOSTS

FAST = RateLimits(host=100_000, total=100_000)
PDS = "pds.example"


class Clock:
    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def results() -> list[str]:
    return []


@pytest.fixture
def hosts(clock: Clock, results: list[str]) -> HostLimits:
    return HostLimits(FAST, clock, results.append)


async def request(hosts: HostLimits, name: str = PDS, status: int = 200, pause: float | None = None) -> None:
    async with hosts.slot(name) as slot:
        slot.record_response(status, pause)


async def fail(hosts: HostLimits, name: str = PDS, reason: FetchFailure = FetchFailure.UNREACHABLE) -> None:
    """Send a request that fails."""
    error = UnavailableError(reason, "reset")
    async with hosts.slot(name) as slot:
        with pytest.raises(UnavailableError), slot.record_errors():
            raise error


async def expect_refused(hosts: HostLimits, name: str = PDS) -> UnavailableError:
    with pytest.raises(UnavailableError) as failure:
        async with hosts.slot(name):
            pytest.fail("the host is not paused")
    return failure.value


async def fail_until_paused(hosts: HostLimits, name: str = PDS) -> None:
    for _ in range(FAILURE_THRESHOLD):
        await fail(hosts, name)


async def max_concurrency(hosts: HostLimits, names: list[str], expected: int) -> int:
    """Send one request to each name; return the maximum of concurrent requests. They end when `expected` are open."""
    running, full, maximum = 0, asyncio.Event(), 0

    async def run(name: str) -> None:
        nonlocal running, maximum
        async with hosts.slot(name):
            running += 1
            maximum = max(maximum, running)
            if running == expected:
                full.set()
            await full.wait()
            running -= 1

    await asyncio.gather(*map(run, names))
    return maximum


# Rates


async def test_concurrency_per_host_and_in_total_is_limited(clock: Clock) -> None:
    hosts = HostLimits(replace(FAST, host_concurrency=3), clock, print)
    assert await max_concurrency(hosts, [PDS] * 20, 3) == 3
    hosts = HostLimits(replace(FAST, total_concurrency=40), clock, print)
    assert await max_concurrency(hosts, [f"{number}.example" for number in range(1_000)], 40) == 40


async def test_waiting_for_one_host_occupies_no_total_slot(clock: Clock) -> None:
    hosts = HostLimits(replace(FAST, host_concurrency=1, total_concurrency=2), clock, print)
    async with hosts.slot("slow.example"):
        waiting = [asyncio.create_task(request(hosts, "slow.example")) for _ in range(10)]
        await asyncio.sleep(0)
        await request(hosts)
    await asyncio.gather(*waiting)


async def seconds_of(hosts: HostLimits, names: list[str]) -> float:
    """Send one request to each name at the same time; return how long that takes."""
    started = monotonic()
    async with asyncio.timeout(10):
        await asyncio.gather(*[request(hosts, name) for name in names])
    return monotonic() - started


async def test_rate_per_host_and_in_total_is_limited(clock: Clock) -> None:
    fast = {"fast.example": 10_000.0}
    hosts = HostLimits(RateLimits(host=40, host_concurrency=500, total=100_000, configured_hosts=fast), clock, print)
    assert await seconds_of(hosts, [PDS] * 46) >= 0.125  # 40 are the burst
    await seconds_of(hosts, ["fast.example"] * 800)  # 19 seconds at the general rate
    hosts = HostLimits(replace(FAST, total=40), clock, print)
    assert await seconds_of(hosts, [f"{number}.example" for number in range(46)]) >= 0.125
    await request(HostLimits(RateLimits(host=0.01, total=0.01), clock, print))


# Pauses that hosts ask for


async def test_host_gets_no_requests_during_its_pause(hosts: HostLimits, clock: Clock, results: list[str]) -> None:
    async with hosts.slot(PDS):  # another request is open at the same time
        await request(hosts, status=429, pause=30)
    clock.now += 20
    failure = await expect_refused(hosts)
    assert failure.reason is FetchFailure.THROTTLED
    assert failure.retry_after == pytest.approx(10)
    await request(hosts, "other.example")
    clock.now += 10
    await request(hosts)
    assert results == ["4xx", "given-up", "throttled", "2xx", "2xx"]


async def test_pause_does_not_last_when_the_clock_is_set_back(hosts: HostLimits, clock: Clock) -> None:
    clock.now += 86_400
    await request(hosts, status=429, pause=30)
    await fail_until_paused(hosts, "other.example")
    clock.now -= 86_400
    assert hosts.paused() == []
    await request(hosts)
    await request(hosts, "other.example")


async def test_shorter_pause_does_not_end_a_longer_one(hosts: HostLimits) -> None:
    async with hosts.slot(PDS) as slot:
        await request(hosts, status=429, pause=30)
        slot.record_response(503, 5)
    assert (await expect_refused(hosts)).retry_after == pytest.approx(30)


async def test_waiting_requests_are_refused_when_a_pause_begins(clock: Clock) -> None:
    hosts = HostLimits(replace(FAST, host_concurrency=1), clock, print)
    async with hosts.slot(PDS) as slot:
        waiting = asyncio.create_task(request(hosts))
        await asyncio.sleep(0)
        slot.record_response(429, 30)
    with pytest.raises(UnavailableError):
        await waiting


async def test_asking_for_pauses_is_no_failure(hosts: HostLimits, clock: Clock) -> None:
    for _ in range(FAILURE_THRESHOLD):
        for status in (429, 503):
            await request(hosts, status=status, pause=1)
            clock.now += 1
    await request(hosts)
    assert [state.failures for state in hosts.unsaved()] == [0]


# Pauses after failures


@pytest.mark.parametrize("reason", [FetchFailure.UNREACHABLE, FetchFailure.TIMEOUT])
async def test_host_is_paused_after_consecutive_failures(
    hosts: HostLimits, results: list[str], reason: FetchFailure
) -> None:
    for _ in range(FAILURE_THRESHOLD):
        await fail(hosts, reason=reason)
    failure = await expect_refused(hosts)
    assert failure.reason is FetchFailure.HOST_PAUSED
    assert not failure.reason.counts_as_attempt
    assert failure.retry_after == pytest.approx(FIRST_PAUSE, rel=0.26)
    assert "reset" in failure.detail
    assert results == [reason] * FAILURE_THRESHOLD + ["host-paused"]
    await request(hosts, "other.example")


async def test_statuses_that_are_failures_and_those_that_end_a_series_of_them(hosts: HostLimits) -> None:
    for status in (500, 502, 503, 504, 522, 999):
        for _ in range(FAILURE_THRESHOLD):
            await request(hosts, f"{status}.example", status=status)
        assert f"http-status: {status}" in (await expect_refused(hosts, f"{status}.example")).detail
    for status in (200, 302, 400, 401, 403, 404, 410, 501):
        for _ in range(FAILURE_THRESHOLD - 1):
            await fail(hosts)
        await request(hosts, status=status)


async def test_failures_that_do_not_count_for_the_host(hosts: HostLimits) -> None:
    for reason in (FetchFailure.TOO_LARGE, FetchFailure.BAD_ANSWER, FetchFailure.REFUSED_ADDRESS):
        for _ in range(FAILURE_THRESHOLD):
            await fail(hosts, reason=reason)
    for error in (UnavailableError(FetchFailure.UNREACHABLE), TimeoutError(), asyncio.CancelledError()):
        for _ in range(FAILURE_THRESHOLD):  # exceptions of the caller
            with pytest.raises(type(error)):
                async with hosts.slot(PDS):
                    raise error
    await request(hosts)


async def test_pauses_grow_to_one_hour_and_end_with_the_first_response(hosts: HostLimits, clock: Clock) -> None:
    await fail_until_paused(hosts)
    pauses = []
    for _ in range(12):
        pauses.append((await expect_refused(hosts)).retry_after or 0)
        clock.now += pauses[-1]
        await fail(hosts)  # one more failure is enough
    for number, pause in enumerate(pauses):
        assert pause == pytest.approx(min(FIRST_PAUSE * 2**number, MAX_PAUSE), rel=0.26)
    assert len({round(pause / FIRST_PAUSE / 2**number, 3) for number, pause in enumerate(pauses[:6])}) > 1  # jitter
    clock.now += 2 * MAX_PAUSE
    await request(hosts)
    for _ in range(FAILURE_THRESHOLD - 1):
        await fail(hosts)
    await request(hosts)


async def test_pauses_of_configured_hosts_are_at_most_one_minute(clock: Clock) -> None:
    hosts = HostLimits(replace(FAST, configured_hosts={"plc.example": 100.0}), clock, print)
    await fail_until_paused(hosts, "plc.example")
    for _ in range(5):
        pause = (await expect_refused(hosts, "plc.example")).retry_after or 0
        clock.now += pause
        await fail(hosts, "plc.example")
    assert pause == pytest.approx(MAX_PAUSE_CONFIGURED, rel=0.26)


async def test_one_request_probes_the_host_after_a_pause(hosts: HostLimits, clock: Clock) -> None:
    await fail_until_paused(hosts)
    clock.now += 2 * FIRST_PAUSE
    with pytest.raises(asyncio.CancelledError):
        async with hosts.slot(PDS):
            raise asyncio.CancelledError  # the probe proves nothing
    async with hosts.slot(PDS) as probe:
        failure = await expect_refused(hosts)
        assert failure.reason is FetchFailure.HOST_PAUSED
        assert failure.retry_after is not None
        assert failure.retry_after > 0
        probe.record_response(200, None)
    assert await max_concurrency(hosts, [PDS] * 3, 3) == 3


async def test_requests_that_were_sent_before_a_pause_end_it_or_leave_it(hosts: HostLimits) -> None:
    async with hosts.slot(PDS) as early:
        await fail_until_paused(hosts)
        pause = (await expect_refused(hosts)).retry_after
        early.error = "reset"
    assert (await expect_refused(hosts)).retry_after == pause
    other = "other.example"
    async with hosts.slot(other) as late:
        await fail_until_paused(hosts, other)
        await expect_refused(hosts, other)
        late.record_response(200, None)
    await request(hosts, other)


# States of hosts


@pytest.mark.slow
async def test_hosts_in_use_or_paused_are_not_evicted(hosts: HostLimits) -> None:
    await request(hosts, "paused.example", status=429, pause=600)
    await fail_until_paused(hosts, "broken.example")
    async with hosts.slot("busy.example"):
        for number in range(MAX_HOSTS + 2_000):
            await request(hosts, f"{number}.example")
            assert len(hosts) <= MAX_HOSTS
        assert "0.example" not in hosts
        assert "busy.example" in hosts
    assert (await expect_refused(hosts, "paused.example")).reason is FetchFailure.THROTTLED
    assert (await expect_refused(hosts, "broken.example")).reason is FetchFailure.HOST_PAUSED


@pytest.mark.slow
async def test_too_many_paused_hosts_do_not_prevent_requests_to_others(hosts: HostLimits) -> None:
    await request(hosts, "longest.example", status=429, pause=3_600)
    for number in range(MAX_HOSTS + 2_000):
        await request(hosts, f"{number}.example", status=429, pause=600)
        assert len(hosts) <= MAX_HOSTS
    await request(hosts)
    await expect_refused(hosts, "longest.example")


async def test_unsaved_states_contain_what_happened_since_the_last_save(hosts: HostLimits, clock: Clock) -> None:
    assert hosts.unsaved() == []
    await request(hosts)
    await fail(hosts)
    await request(hosts, "other.example", status=429, pause=30)
    first, other = hosts.unsaved()
    assert (first.host, first.requests, first.failures, first.consecutive_failures) == (PDS, 2, 1, 1)
    assert (first.last_error, first.last_success) == ("unreachable: reset", clock.now)
    assert (other.paused_until, other.pause_reason) == (clock.now + 30, FetchFailure.THROTTLED)
    await fail(hosts)  # while the states are being saved
    hosts.mark_saved([first, other])
    assert [(state.host, state.requests, state.failures) for state in hosts.unsaved()] == [(PDS, 1, 1)]
    assert hosts.paused() == [replace(other, requests=0)]


async def test_pauses_survive_a_restart(hosts: HostLimits, clock: Clock) -> None:
    await request(hosts, "asked.example", status=429, pause=300)
    await fail_until_paused(hosts)
    restarted = HostLimits(FAST, clock, print)
    restarted.restore(hosts.unsaved())
    assert restarted.unsaved() == []
    assert (await expect_refused(restarted, "asked.example")).reason is FetchFailure.THROTTLED
    assert (await expect_refused(restarted)).reason is FetchFailure.HOST_PAUSED
    clock.now += 300
    await request(restarted, "asked.example")
    await fail(restarted)  # the failures before the restart count, so one more is enough
    await expect_refused(restarted)
