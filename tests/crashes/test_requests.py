"""A daemon is killed between a request and the record: the row of the repo keeps the request."""

from pathlib import Path

import pytest

from indexer.demo.scenario import NOTE
from tests.crashes.death_world import DeathWorld, death_world
from tests.daemon_forks import Death
from tests.faulty_network import FaultyAccount
from tests.waiting import until

REQUEST = "select atproto.request_record($1, $2)"
STORED = "select from atproto.records where did = $1 and rkey = 'requested'"
DEATHS = [
    Death("claim.written"),
    Death("claim.written", committed=True),
    Death("resync.written"),
    Death("resync.finished"),
    Death("resync.finished", committed=True),
]


@pytest.mark.slow
async def test_killed_between_a_request_and_its_record(database: str, tmp_path: Path) -> None:
    """The relay is stopped, and sends all commits later: nothing is logged twice."""
    async with death_world(database, tmp_path) as world:
        accounts = [world.create_account() for _ in DEATHS]
        for account in accounts:
            account.create(NOTE, {"text": "first"}, rkey="first")
        world.daemon.start()
        await until(world.has_stored_all_messages, world.daemon.log_tail)
        world.daemon.kill()
        await world.network.relay.stop()
        for account, death in zip(accounts, DEATHS, strict=True):
            account.create(NOTE, {"text": "requested"}, rkey="requested")

            async def request(world: DeathWorld, account: FaultyAccount = account) -> None:
                [(requested,)] = await world.execute(REQUEST, f"at://{account.did}/{NOTE}/requested", account.rev)
                assert requested

            await world.die(death, request)
        world.daemon.start()
        for account in accounts:
            await until(lambda account=account: is_stored(world, account), world.daemon.log_tail)  # type: ignore[misc]
        world.daemon.kill()
        await world.network.relay.start()
        await world.settle()


async def is_stored(world: DeathWorld, account: FaultyAccount) -> bool:
    return bool(await world.execute(STORED, account.did))
