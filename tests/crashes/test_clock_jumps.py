"""The clock of the daemon jumps by a day, forwards and backwards, while it works, and then back.

Either the database is on another machine, whose clock stays right, or its clock jumps, too, as with an embedded
Postgres. The clock of the network stays right. No repo waits for a time that the wrong clock has shown.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from indexer.demo.local_pds import GET_REPO
from indexer.demo.scenario import NOTE
from indexer.net.http.host_limits import FAILURE_THRESHOLD
from indexer.reasons import Rejection
from tests.crashes.death_world import DeathWorld, death_world
from tests.crashes.shifted_clock import Offset, read_wrong_clock
from tests.faulty_network import Fault
from tests.lost_commits import lose_commit
from tests.waiting import until

DAY = 86_400
SAMPLE = pytest.param(False, id="alone", marks=pytest.mark.slow)
ALONE = pytest.param(False, id="alone", marks=pytest.mark.proof("crashes"))
WITH_DATABASE = pytest.param(
    True,
    id="with the database",
    marks=[pytest.mark.proof("crashes"), pytest.mark.one_server("the test changes one clock")],
)

# transaction_timestamp() is always the right time.
_WAITS = """
    select from indexer.repo where greatest(lease_until, nullif(next_attempt_at, 'infinity'))
        > transaction_timestamp() + make_interval(secs => $1)
"""
_PAUSED = "select from indexer.host where paused_until > transaction_timestamp() + make_interval(secs => $1)"


@asynccontextmanager
async def clock_world(dsn: str, directory: Path, *, both: bool) -> AsyncIterator[tuple[DeathWorld, Offset]]:
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


@pytest.mark.parametrize("both", [SAMPLE, WITH_DATABASE])
async def test_daemon_continues_after_its_clock_was_ahead(database: str, tmp_path: Path, *, both: bool) -> None:
    """While it is ahead, requests to a PDS fail: repos and host have a back-off."""
    async with clock_world(database, tmp_path, both=both) as (world, offset):
        await offset.set(DAY)
        [pds, _] = world.network.pdses
        pds.faults.append(Fault("", status=500, times=None))
        for _ in range(FAILURE_THRESHOLD + 1):
            lose_commit(world.network.create_account(pds=0))
        for has_fired in (is_paused, waits):
            await until(partial(has_fired, world), world.daemon.log_tail)
        pds.faults.clear()
        await offset.set(0)
        world.act(10)
        await world.check()
        await until(partial(is_ready, world), world.daemon.log_tail)


@pytest.mark.parametrize("both", [ALONE, WITH_DATABASE])
async def test_lease_from_a_clock_that_was_ahead_does_not_last(database: str, tmp_path: Path, *, both: bool) -> None:
    async with clock_world(database, tmp_path, both=both) as (world, offset):
        await offset.set(DAY)
        account = world.lose_commit()
        account.pds.faults.append(fault := Fault(GET_REPO, account.did, hang=True))
        await until(lambda: fault.fired == 1, world.daemon.log_tail)
        assert await waits(world) is both, "leases are times of the clock of the database"
        world.daemon.kill()
        await offset.set(0)
        world.daemon.start()
        await world.check()


@pytest.mark.parametrize("both", [ALONE, WITH_DATABASE])
async def test_daemon_continues_after_its_clock_was_behind(database: str, tmp_path: Path, *, both: bool) -> None:
    """While it is behind, commits are from the future and rejected. The next commit of each repo repairs it."""
    async with clock_world(database, tmp_path, both=both) as (world, offset):
        await offset.set(-DAY)
        world.act(5)
        world.lose_commit()
        await until(partial(has_rejected, world, Rejection.FUTURE_REV), world.daemon.log_tail)
        await offset.set(0)
        for account in world.network.accounts.values():
            if account.status is None:
                account.create(NOTE, {"text": "after the jump back"})
        await world.check()
        await until(partial(is_ready, world), world.daemon.log_tail)


async def waits(world: DeathWorld) -> bool:
    """Return True if a repo waits for a time that only the wrong clock shows soon."""
    return bool(await world.execute(_WAITS, DAY / 2))


async def is_paused(world: DeathWorld) -> bool:
    """Return True if a host is paused until a time that only the wrong clock shows soon."""
    return bool(await world.execute(_PAUSED, DAY / 2))


async def has_rejected(world: DeathWorld, reason: str) -> bool:
    return bool(await world.execute("select from atproto.rejected where reason = $1", reason))
