"""A daemon that reads the stream of a host is killed: its withheld accounts end equal to the host, nothing doubles."""

from dataclasses import replace
from pathlib import Path

import pytest

from indexer.demo.scenario import NOTE
from indexer.live.host_streams import HostStreamSettings
from tests.crashes.death_world import DeathWorld, death_world
from tests.daemon_forks import Death
from tests.quick_tuning import MORTAL
from tests.withholding_network import WithholdingNetwork

TUNING = replace(MORTAL, host_streams=HostStreamSettings(interval=0.05))
DEATHS = [
    Death("host.removed"),
    Death("withheld.written"),
    Death("withheld.written", committed=True),
    Death("resync.finished"),
    Death("resync.finished", committed=True),
    Death("batch.written"),
    Death("batch.written", committed=True),
]
WITHHELD_AND_SYNCHRONIZED = """
    select r.did from indexer.repo r join indexer.identity i using (did, bucket)
    where r.withheld_since is not null and r.sync_status = 'synchronized'
        and not exists (select from indexer.subscribed_host s where s.pds = i.pds)
"""


@pytest.mark.parametrize(
    "deaths",
    [
        pytest.param(DEATHS[:1], id="sample", marks=pytest.mark.slow),
        pytest.param(DEATHS, id="all", marks=pytest.mark.proof("crashes")),
    ],
)
async def test_killed_while_the_stream_of_a_host_is_read(database: str, tmp_path: Path, deaths: list[Death]) -> None:
    """Before each death, the stream has lost its window, and the withheld account has written."""
    async with WithholdingNetwork() as network, death_world(database, tmp_path, network=network) as world:
        world.change_settings({}, TUNING)
        account = network.create_account("withheld.test", pds=0)
        account.create(NOTE, {"text": "first"})
        await world.settle()
        network.relay.withhold(account)

        async def lose_window(_world: DeathWorld) -> None:
            account.create(NOTE, {"text": "lost"})
            network.host.events.forget_messages(keep=0)
            account.create(NOTE, {"text": "after the gap"})

        for death in deaths:
            await world.die(death, lose_window)
        await world.settle()
        assert world.deaths.total() == len(deaths)
        assert len(await world.execute("select from indexer.subscribed_host")) == 1
        assert await world.execute(WITHHELD_AND_SYNCHRONIZED) == []
