"""A daemon that follows a Jetstream is killed: no hint is lost, and no change of a record is doubled."""

import asyncio
from pathlib import Path

import pytest

from indexer.atproto.syntax import CollectionFilter
from indexer.cli.demo import compare
from indexer.db import Database
from indexer.demo.scenario import LIKE, NOTE, POST
from indexer.sync.scope import Scope
from tests.background import running
from tests.crashes.death_world import DeathWorld, death_world
from tests.daemon.running_daemon import FilteredNetwork
from tests.daemon_forks import Death
from tests.local_jetstream import local_jetstream
from tests.passed_time import expire_waits
from tests.waiting import until

COLLECTIONS = [LIKE, NOTE, POST]
DEATHS = [
    Death("hints.written"),
    Death("batch.written", committed=True),
    Death("resync.finished"),
    Death("batch.written"),
    Death("claim.written", committed=True),
    Death("resync.written"),
    Death("resync.finished", committed=True),
]


async def nothing(_world: DeathWorld) -> None:
    """Change nothing."""


async def write_on(world: DeathWorld) -> None:
    """Let accounts write all the time."""
    while True:
        world.account().create(NOTE, {"text": "hinted"})
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    "deaths",
    [
        pytest.param(DEATHS[:3], id="sample", marks=pytest.mark.slow),
        pytest.param(DEATHS, id="all", marks=pytest.mark.proof("crashes")),
    ],
)
async def test_killed_while_hints_are_followed(
    database: str, db: Database, tmp_path: Path, deaths: list[Death]
) -> None:
    """Accounts write before and after each death. What was hinted while no process ran is found at the cursor."""
    await db.scope.begin(Scope(collections=CollectionFilter(COLLECTIONS)))
    async with (
        FilteredNetwork(collections=COLLECTIONS) as network,
        local_jetstream(network) as jetstream,
        death_world(database, tmp_path, steps=40, network=network) as world,
    ):
        world.change_settings(
            {
                "upstream": "jetstream",
                "jetstreams": jetstream.ws_url,
                "collections": ",".join(COLLECTIONS),
                "start": "live",
            }
        )
        for death in deaths:
            await world.die(death, nothing, write_on)
            world.account().create(NOTE, {"text": "while no process runs"})
        assert world.deaths.total() == len(deaths)

        async def equal() -> bool:
            return not await compare(network, world.db)

        world.daemon.start()
        async with running(expire_waits(database)):
            await until(equal, world.daemon.log_tail)
        await world.check_change_log()
