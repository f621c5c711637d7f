"""The clock of the daemon jumps by an hour or a day, forwards and backwards, while it works, and then back.

Either the database is on another machine, whose clock stays right, or its clock jumps, too, as with an embedded
Postgres. The clock of the network stays right. No repo waits for a time that the wrong clock has shown.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from indexer.localnet.http_server import Fault
from indexer.localnet.local_pds import GET_REPO
from indexer.localnet.scenario import NOTE
from indexer.outbound.host_limits import FAILURE_THRESHOLD
from indexer.reasons import Rejection
from tests.crashes.death_world import DeathWorld, death_world
from tests.crashes.shifted_clock import Offset, read_wrong_clock
from tests.lost_commits import lose_commit
from tests.waiting import until

pytestmark = pytest.mark.timeout(300)

HOUR, DAY = 3_600, 86_400


def jumps(of_a_day: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """Return the parameters of a test: seconds, and True if the clock of the database jumps, too."""
    proof, one_clock = pytest.mark.proof("crashes"), pytest.mark.one_server("it has one clock")
    return pytest.mark.parametrize(
        ("seconds", "both"),
        [
            pytest.param(HOUR, False, id="an hour", marks=proof),
            pytest.param(DAY, False, id="a day", marks=of_a_day),
            pytest.param(DAY, True, id="a day with the database", marks=[proof, one_clock]),
        ],
    )


# transaction_timestamp() is always the right time.
_WAITS = """
    select from indexer.repo where greatest(lease_until, nullif(next_attempt_at, 'infinity'))
        > transaction_timestamp() + make_interval(secs => $1)
"""
_SYNCHRONIZED = "select from indexer.repo where synchronized_at > transaction_timestamp() + make_interval(secs => $1)"
_PAUSED = "select from indexer.host where paused_until > transaction_timestamp() + make_interval(secs => $1)"


@asynccontextmanager
async def clock_world(dsn: str, directory: Path, both: bool) -> AsyncIterator[tuple[DeathWorld, Offset]]:
    """Run a daemon with a clock that can be changed; with `both`, the clock of the database changes with it."""
    offset = Offset(directory / "offset")
    if both:
        await offset.include_database(dsn)
    prepare = partial(read_wrong_clock, offset.file)
    async with death_world(dsn, directory, prepare=prepare) as world:
        world.daemon.start()
        await world.check()
        yield world, offset


async def is_ready(world: DeathWorld) -> bool:
    async with httpx.AsyncClient(base_url=world.daemon.health_url()) as client:
        return [(await client.get(path)).status_code for path in ("/healthz", "/readyz")] == [200, 200]


@jumps(pytest.mark.slow)
async def test_daemon_continues_after_its_clock_was_ahead(
    database: str, tmp_path: Path, seconds: int, both: bool
) -> None:
    """While it is a day ahead, requests to a PDS fail: repos and host have a back-off. One of an hour is usual."""
    async with clock_world(database, tmp_path, both) as (world, offset):
        await offset.set(seconds)
        [pds, _] = world.network.pdses
        if seconds == DAY:
            pds.faults.append(Fault("", status=500, times=None))
        for _ in range(FAILURE_THRESHOLD + 1):
            lose_commit(world.network.create_account(pds=0))
        for has_fired in (is_paused, waits) if seconds == DAY else (is_synchronized_ahead,):
            await until(partial(has_fired, world, seconds), world.daemon.log_tail)
        pds.faults.clear()
        await offset.set(0)
        world.act(10)
        await world.check()
        await until(partial(is_ready, world), world.daemon.log_tail)


@jumps(pytest.mark.proof("crashes"))
async def test_lease_of_a_daemon_whose_clock_was_ahead_does_not_last(
    database: str, tmp_path: Path, seconds: int, both: bool
) -> None:
    async with clock_world(database, tmp_path, both) as (world, offset):
        await offset.set(seconds)
        account = world.lose_commit()
        account.pds.faults.append(fault := Fault(GET_REPO, account.did, hang=True))
        await until(lambda: fault.fired == 1, world.daemon.log_tail)
        assert await waits(world, seconds)
        world.daemon.kill()
        await offset.set(0)
        world.daemon.start()
        await world.check()


@jumps(pytest.mark.proof("crashes"))
async def test_daemon_continues_after_its_clock_was_behind(
    database: str, tmp_path: Path, seconds: int, both: bool
) -> None:
    """While it is behind, commits are from the future and rejected. The next commit of each repo repairs it."""
    async with clock_world(database, tmp_path, both) as (world, offset):
        await offset.set(-seconds)
        world.act(5)
        world.lose_commit()
        await until(partial(has_rejected, world, Rejection.FUTURE_REV), world.daemon.log_tail)
        await offset.set(0)
        for account in world.network.accounts.values():
            if account.status is None:
                account.create(NOTE, {"text": "after the jump back"})
        await world.check()
        await until(partial(is_ready, world), world.daemon.log_tail)


async def waits(world: DeathWorld, seconds: int) -> bool:
    """Return True if a repo waits for a time that only the wrong clock shows soon."""
    return bool(await world.execute(_WAITS, seconds / 2))


async def is_paused(world: DeathWorld, seconds: int) -> bool:
    """Return True if a host is paused until a time that only the wrong clock shows soon."""
    return bool(await world.execute(_PAUSED, seconds / 2))


async def is_synchronized_ahead(world: DeathWorld, seconds: int) -> bool:
    """Return True if a repo became synchronized at a time that only the wrong clock has shown."""
    return bool(await world.execute(_SYNCHRONIZED, seconds / 2))


async def has_rejected(world: DeathWorld, reason: str) -> bool:
    return bool(await world.execute("select from atproto.rejected where reason = $1", reason))
