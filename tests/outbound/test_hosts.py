import asyncio
from time import monotonic

import pytest

from indexer.errors import UnavailableError
from indexer.outbound.hosts import _MOST_HOSTS, Hosts
from indexer.reasons import FetchFailure


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def take(hosts: Hosts, name: str = "pds.example") -> None:
    async with hosts.turn(name):
        pass


async def test_so_many_at_once_and_no_more(clock: Clock) -> None:
    hosts = Hosts(1_000, 3, {}, clock)
    inside, leave, most = 0, asyncio.Event(), 0

    async def visit() -> None:
        nonlocal inside, most
        async with hosts.turn("pds.example"):
            inside += 1
            most = max(most, inside)
            if inside == 3:
                leave.set()
            await leave.wait()
            inside -= 1

    await asyncio.gather(*[visit() for _ in range(20)])
    assert most == 3


async def test_one_host_does_not_wait_for_another(clock: Clock) -> None:
    hosts = Hosts(1_000, 1, {}, clock)
    async with hosts.turn("slow.example"):
        await take(hosts)


async def test_so_many_a_second(clock: Clock) -> None:
    hosts = Hosts(20, 100, {"fast.example": 10_000}, clock)
    started = monotonic()
    await asyncio.gather(*[take(hosts, "fast.example") for _ in range(100)])
    await asyncio.gather(*[take(hosts) for _ in range(20)])  # as many as may come in a burst
    between = monotonic()
    await asyncio.gather(*[take(hosts) for _ in range(6)])
    assert between - started < 0.25
    assert monotonic() - between >= 0.2


async def test_less_than_one_a_second(clock: Clock) -> None:
    await take(Hosts(0.01, 1, {}, clock))


async def test_a_paused_host_is_left_alone_until_then(clock: Clock) -> None:
    hosts = Hosts(1_000, 1, {}, clock)
    hosts.pause("pds.example", 30)
    hosts.pause("pds.example", 5)  # a shorter one doesn't end it
    clock.now += 20
    with pytest.raises(UnavailableError) as failure:
        await take(hosts)
    assert failure.value.reason is FetchFailure.THROTTLED
    assert failure.value.retry_after == pytest.approx(10)
    await take(hosts, "other.example")
    clock.now += 10
    await take(hosts)


async def test_those_in_the_queue_hear_of_a_pause(clock: Clock) -> None:
    hosts = Hosts(1_000, 1, {}, clock)
    async with hosts.turn("pds.example"):
        waiting = asyncio.create_task(take(hosts))
        await asyncio.sleep(0)
        hosts.pause("pds.example", 30)
    with pytest.raises(UnavailableError):
        await waiting


async def test_strangers_are_forgotten_and_those_in_use_are_not(clock: Clock) -> None:
    hosts = Hosts(1_000, 1, {}, clock)
    async with hosts.turn("busy.example"):
        for number in range(_MOST_HOSTS + 50):
            await take(hosts, f"{number}.example")
        assert len(hosts._hosts) == _MOST_HOSTS
        second = asyncio.create_task(take(hosts, "busy.example"))
        await asyncio.sleep(0)
        assert not second.done()
    await second
