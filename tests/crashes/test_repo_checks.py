"""A daemon without any hint is killed while it compares repos with their hosts: the next pass finds what is left."""

from dataclasses import replace
from pathlib import Path

import pytest

from indexer.cli.demo import compare
from indexer.demo.scenario import NOTE
from tests.crashes.death_world import DeathWorld, death_world
from tests.daemon_forks import Death
from tests.quick_tuning import MORTAL, QUICK
from tests.waiting import until

TUNING = replace(MORTAL, repo_checks=QUICK.repo_checks)
SETTINGS = {
    "upstream": "jetstream",
    "jetstreams": "ws://127.0.0.1:9",
    "collections": "com.example.*",
    "sweep_interval": "60",
    "start": "live",
}
DEATHS = [
    Death("repo-checks.done"),
    Death("repo-checks.done", committed=True),
    Death("claim.written", committed=True),
    Death("resync.finished"),
    Death("resync.finished", committed=True),
]


async def write(world: DeathWorld) -> None:
    """Let known accounts write; one leaves, and those come back that left before."""
    for account in world.network.accounts.values():
        if account.status == "deactivated":
            account.set_status(None)
    for number in range(4):
        world.account().create(NOTE, {"text": f"{number}"})
    world.account().set_status("deactivated")


async def settle(world: DeathWorld) -> None:
    """Run a daemon until the database is equal to the network, and compare the change log with it."""

    async def is_equal() -> bool:
        return not await compare(world.network, world.db)

    world.daemon.start()
    await until(is_equal, world.daemon.log_tail)
    world.daemon.kill()
    await world.count_death(None)


@pytest.mark.parametrize(
    "deaths",
    [
        pytest.param(DEATHS[:2], id="sample", marks=pytest.mark.slow),
        pytest.param(DEATHS, id="all", marks=pytest.mark.proof("crashes")),
    ],
)
async def test_killed_while_repos_are_compared_with_their_hosts(
    database: str, tmp_path: Path, deaths: list[Death]
) -> None:
    async with death_world(database, tmp_path) as world:
        world.change_settings(SETTINGS, TUNING)
        for death in deaths:
            await world.die(death, write)
            await write(world)
            await settle(world)
        assert world.deaths.total() == 2 * len(deaths)
        [(complete,)] = await world.execute(
            "select bool_and(complete_at >= now() - interval '1 minute') from atproto.repos where visible"
        )
        assert complete
