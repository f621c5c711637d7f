import asyncio
from dataclasses import replace
from time import monotonic

import pytest

from indexer.errors import UnavailableError
from indexer.outbound.hosts import (
    FAILURES,
    FIRST_PAUSE,
    LONGEST_PAUSE,
    MOST_HOSTS,
    OWN_LONGEST_PAUSE,
    RESULTS,
    Hosts,
    Rates,
    Turn,
)
from indexer.reasons import FetchFailure

FAST = Rates(host=100_000, total=100_000)
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
def hosts(clock: Clock, results: list[str]) -> Hosts:
    return Hosts(FAST, clock, results.append)


async def take(hosts: Hosts, name: str = PDS, status: int = 200, pause: float | None = None) -> None:
    async with hosts.turn(name) as turn:
        turn.answered(status, pause)


async def fail(hosts: Hosts, name: str = PDS, reason: FetchFailure = FetchFailure.UNREACHABLE) -> None:
    """A request that is sent, and fails."""
    error = UnavailableError(reason, "reset")
    async with hosts.turn(name) as turn:
        with pytest.raises(UnavailableError), turn.watch():
            raise error


async def refused(hosts: Hosts, name: str = PDS) -> UnavailableError:
    with pytest.raises(UnavailableError) as failure:
        async with hosts.turn(name):
            pytest.fail("it should be left alone")
    return failure.value


async def break_down(hosts: Hosts, name: str = PDS) -> None:
    for _ in range(FAILURES):
        await fail(hosts, name)


async def most_at_once(hosts: Hosts, names: list[str], enough: int) -> int:
    inside, leave, most = 0, asyncio.Event(), 0

    async def visit(name: str) -> None:
        nonlocal inside, most
        async with hosts.turn(name):
            inside += 1
            most = max(most, inside)
            if inside == enough:
                leave.set()
            await leave.wait()
            inside -= 1

    await asyncio.gather(*map(visit, names))
    return most


# Rates


async def test_so_many_at_once_and_no_more(clock: Clock) -> None:
    hosts = Hosts(replace(FAST, host_concurrency=3), clock, print)
    assert await most_at_once(hosts, [PDS] * 20, 3) == 3


async def test_a_thousand_hosts_are_not_asked_at_once(clock: Clock) -> None:
    hosts = Hosts(replace(FAST, concurrency=40), clock, print)
    assert await most_at_once(hosts, [f"{number}.example" for number in range(1_000)], 40) == 40


async def test_one_host_does_not_wait_for_another(clock: Clock) -> None:
    hosts = Hosts(replace(FAST, host_concurrency=1), clock, print)
    async with hosts.turn("slow.example"):
        await take(hosts)


async def test_those_who_wait_for_one_host_take_no_place_of_others(clock: Clock) -> None:
    hosts = Hosts(replace(FAST, host_concurrency=1, concurrency=2), clock, print)
    async with hosts.turn("slow.example"):
        waiting = [asyncio.create_task(take(hosts, "slow.example")) for _ in range(10)]
        await asyncio.sleep(0)
        await take(hosts)
    await asyncio.gather(*waiting)


async def test_so_many_a_second(clock: Clock) -> None:
    hosts = Hosts(Rates(host=20, host_concurrency=100, total=100_000, own={"fast.example": 10_000}), clock, print)
    started = monotonic()
    await asyncio.gather(*[take(hosts, "fast.example") for _ in range(100)])
    await asyncio.gather(*[take(hosts) for _ in range(20)])  # as many as may come in a burst
    between = monotonic()
    await asyncio.gather(*[take(hosts) for _ in range(6)])
    assert between - started < 0.25
    assert monotonic() - between >= 0.2


async def test_so_many_a_second_to_all_together(clock: Clock) -> None:
    hosts = Hosts(replace(FAST, total=20), clock, print)
    await asyncio.gather(*[take(hosts, f"{number}.example") for number in range(20)])
    started = monotonic()
    await asyncio.gather(*[take(hosts, f"{number}.example") for number in range(100, 106)])
    assert monotonic() - started >= 0.2


async def test_less_than_one_a_second(clock: Clock) -> None:
    await take(Hosts(Rates(host=0.01, total=0.01), clock, print))


# Pauses that a host asks for


async def test_a_paused_host_is_left_alone_until_then(hosts: Hosts, clock: Clock, results: list[str]) -> None:
    async with hosts.turn(PDS):  # a request under way at the same time, which hears of a shorter one
        await take(hosts, status=429, pause=30)
    clock.now += 20
    failure = await refused(hosts)
    assert failure.reason is FetchFailure.THROTTLED
    assert failure.retry_after == pytest.approx(10)
    await take(hosts, "other.example")
    clock.now += 10
    await take(hosts)
    assert results == ["4xx", "given-up", "throttled", "2xx", "2xx"]


async def test_a_shorter_pause_does_not_end_a_longer_one(hosts: Hosts, clock: Clock) -> None:
    async with hosts.turn(PDS) as turn:
        await take(hosts, status=429, pause=30)
        turn.answered(503, 5)
    assert (await refused(hosts)).retry_after == pytest.approx(30)


async def test_those_in_the_queue_hear_of_a_pause(clock: Clock) -> None:
    hosts = Hosts(replace(FAST, host_concurrency=1), clock, print)
    async with hosts.turn(PDS) as turn:
        waiting = asyncio.create_task(take(hosts))
        await asyncio.sleep(0)
        turn.answered(429, 30)
    with pytest.raises(UnavailableError):
        await waiting


async def test_a_host_that_keeps_asking_for_pauses_is_not_broken(hosts: Hosts, clock: Clock) -> None:
    for _ in range(FAILURES):
        for status in (429, 503):
            await take(hosts, status=status, pause=1)
            clock.now += 1
    await take(hosts)
    assert [state.failures for state in hosts.unsaved()] == [0]


# Hosts that are broken


@pytest.mark.parametrize("reason", [FetchFailure.UNREACHABLE, FetchFailure.TIMEOUT])
async def test_a_host_that_fails_again_and_again_is_left_alone(
    hosts: Hosts, clock: Clock, results: list[str], reason: FetchFailure
) -> None:
    for _ in range(FAILURES):
        await fail(hosts, reason=reason)
    failure = await refused(hosts)
    assert failure.reason is FetchFailure.HOST_PAUSED
    assert failure.reason.spares
    assert failure.retry_after == pytest.approx(FIRST_PAUSE, rel=0.26)
    assert "reset" in failure.detail
    assert results == [reason] * FAILURES + ["host-paused"]
    await take(hosts, "other.example")


@pytest.mark.parametrize("status", [500, 502, 503, 504, 522, 999])
async def test_statuses_of_a_broken_host(hosts: Hosts, status: int) -> None:
    for _ in range(FAILURES):
        await take(hosts, status=status)
    assert f"http-status: {status}" in (await refused(hosts)).detail


@pytest.mark.parametrize("status", [200, 302, 400, 401, 403, 404, 410, 501])
async def test_statuses_of_a_host_that_works(hosts: Hosts, status: int) -> None:
    for _ in range(3):
        for _ in range(FAILURES - 1):
            await fail(hosts)
        await take(hosts, status=status)


@pytest.mark.parametrize("reason", [FetchFailure.TOO_LARGE, FetchFailure.BAD_ANSWER, FetchFailure.REFUSED_ADDRESS])
async def test_failures_that_are_not_the_hosts(hosts: Hosts, reason: FetchFailure) -> None:
    for _ in range(3 * FAILURES):
        await fail(hosts, reason=reason)


async def test_what_the_caller_raises_is_no_failure_of_the_host(hosts: Hosts) -> None:
    for error in (UnavailableError(FetchFailure.UNREACHABLE), TimeoutError(), asyncio.CancelledError()):
        for _ in range(FAILURES):
            with pytest.raises(type(error)):
                async with hosts.turn(PDS):
                    raise error
    await take(hosts)


async def test_pauses_grow_to_an_hour_and_end_with_the_first_answer(hosts: Hosts, clock: Clock) -> None:
    await break_down(hosts)
    pauses = []
    for _ in range(12):
        pauses.append((await refused(hosts)).retry_after or 0)
        clock.now += pauses[-1]
        await fail(hosts)  # one more failure is enough
    for number, pause in enumerate(pauses):
        assert pause == pytest.approx(min(FIRST_PAUSE * 2**number, LONGEST_PAUSE), rel=0.26)
    assert len({round(pause / FIRST_PAUSE / 2**number, 3) for number, pause in enumerate(pauses[:6])}) > 1  # jitter
    clock.now += 2 * LONGEST_PAUSE
    await take(hosts)
    for _ in range(FAILURES - 1):
        await fail(hosts)
    await take(hosts)


async def test_a_host_that_the_operator_named_is_tried_every_minute(clock: Clock) -> None:
    hosts = Hosts(replace(FAST, own={"plc.example": 100.0}), clock, print)
    await break_down(hosts, "plc.example")
    for _ in range(5):
        pause = (await refused(hosts, "plc.example")).retry_after or 0
        clock.now += pause
        await fail(hosts, "plc.example")
    assert pause == pytest.approx(OWN_LONGEST_PAUSE, rel=0.26)


async def test_one_request_tries_a_broken_host_for_all_others(hosts: Hosts, clock: Clock) -> None:
    await break_down(hosts)
    clock.now += 2 * FIRST_PAUSE
    async with hosts.turn(PDS) as trial:
        failure = await refused(hosts)
        assert failure.reason is FetchFailure.HOST_PAUSED
        assert failure.retry_after is not None
        assert failure.retry_after > 0
        trial.answered(200, None)
    assert await most_at_once(hosts, [PDS] * 3, 3) == 3


async def test_a_trial_that_is_called_off_decides_nothing(hosts: Hosts, clock: Clock) -> None:
    await break_down(hosts)
    clock.now += 2 * FIRST_PAUSE
    with pytest.raises(asyncio.CancelledError):
        async with hosts.turn(PDS):
            raise asyncio.CancelledError
    async with hosts.turn(PDS) as trial:
        await refused(hosts)
        trial.answered(200, None)
    await take(hosts)


async def test_failures_of_requests_sent_before_the_pause_make_it_no_longer(hosts: Hosts, clock: Clock) -> None:
    await asyncio.gather(*[fail(hosts) for _ in range(FAILURES)])
    async with hosts.turn("other.example"):
        pass
    pause = (await refused(hosts)).retry_after
    old = Turn(error="sent long ago")
    hosts._hosts[PDS].settle(old, clock.now)
    assert (await refused(hosts)).retry_after == pause


async def test_a_late_answer_shows_that_the_host_works(hosts: Hosts) -> None:
    async with hosts.turn(PDS) as late:
        await break_down(hosts)
        await refused(hosts)
        late.answered(200, None)
    await take(hosts)


# What is remembered


async def test_strangers_are_forgotten_and_those_in_use_or_paused_are_not(hosts: Hosts) -> None:
    await take(hosts, "paused.example", status=429, pause=600)
    await break_down(hosts, "broken.example")
    async with hosts.turn("busy.example"):
        for number in range(MOST_HOSTS + 2_000):
            await take(hosts, f"{number}.example")
            assert len(hosts._hosts) <= MOST_HOSTS
        assert "0.example" not in hosts._hosts
        assert "busy.example" in hosts._hosts
    assert (await refused(hosts, "paused.example")).reason is FetchFailure.THROTTLED
    assert (await refused(hosts, "broken.example")).reason is FetchFailure.HOST_PAUSED


async def test_more_pauses_than_there_is_room_for_do_not_keep_us_from_other_hosts(hosts: Hosts) -> None:
    await take(hosts, "longest.example", status=429, pause=3_600)
    for number in range(MOST_HOSTS + 2_000):
        await take(hosts, f"{number}.example", status=429, pause=600)
        assert len(hosts._hosts) <= MOST_HOSTS
    await take(hosts)
    await refused(hosts, "longest.example")


async def test_what_is_saved_is_what_happened_since(hosts: Hosts, clock: Clock) -> None:
    assert hosts.unsaved() == []
    await take(hosts)
    await fail(hosts)
    await take(hosts, "other.example", status=429, pause=30)
    first, other = hosts.unsaved()
    assert (first.host, first.requests, first.failures, first.streak) == (PDS, 2, 1, 1)
    assert (first.last_error, first.last_success) == ("unreachable: reset", clock.now)
    assert (other.paused_until, other.pause_reason) == (clock.now + 30, FetchFailure.THROTTLED)
    await fail(hosts)  # while it is being saved
    hosts.saved([first, other])
    assert [(state.host, state.requests, state.failures) for state in hosts.unsaved()] == [(PDS, 1, 1)]
    assert hosts.paused() == [replace(other, requests=0)]


async def test_a_pause_outlives_the_program(hosts: Hosts, clock: Clock) -> None:
    await take(hosts, "asked.example", status=429, pause=300)
    await break_down(hosts)
    again = Hosts(FAST, clock, print)
    again.load(hosts.unsaved())
    assert again.unsaved() == []
    assert (await refused(again, "asked.example")).reason is FetchFailure.THROTTLED
    assert (await refused(again)).reason is FetchFailure.HOST_PAUSED
    clock.now += 300
    await take(again, "asked.example")
    await fail(again)  # it was broken when we ended: one failure is enough
    await refused(again)


async def test_every_result_is_one_of_the_closed_set(hosts: Hosts, clock: Clock, results: list[str]) -> None:
    for status in range(200, 1_000):
        await take(hosts, f"{status}.example", status=status)
    for reason in FetchFailure:
        if reason in RESULTS:
            await fail(hosts, f"{reason}.example", reason=reason)
    assert set(results) == set(RESULTS) - {"given-up"}
