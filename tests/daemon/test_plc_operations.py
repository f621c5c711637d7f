"""Daemons that follow the operations of their PLC directory, and one that uses an import."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from indexer.app.clients import make_plc_operations, open_outbound_client
from indexer.atproto.crypto import PrivateKey
from indexer.db import Database
from indexer.demo.local_plc import LocalIdentity
from indexer.live.streams import open_relays
from indexer.telemetry.conditions import Conditions
from indexer.telemetry.metrics import Metrics
from tests.daemon.running_daemon import RunningDaemon, post, running_daemon
from tests.daemon_harness import settings_for
from tests.faulty_network import Fault, FaultyAccount, FaultyNetwork
from tests.waiting import until

pytestmark = pytest.mark.slow

POST = "app.bsky.feed.post"
OTHER_HOST = "https://other.example.com"


async def import_identities(db: Database, network: FaultyNetwork, directory: Path) -> int:
    """Import what the directory has about tracked repos; return the number of verified operations."""
    settings = settings_for(network.relay_url, network.plc_url, directory)
    async with open_outbound_client(settings) as outbound:
        reading = make_plc_operations(settings, db, outbound, Conditions(), Metrics())
        progress = await reading.begin()
        return (await reading.read(progress, reading.export.pages(progress.cursor))).found


def lookups(network: FaultyNetwork) -> int:
    """Return the number of requests to the directory, without those for its export."""
    return sum(count for path, count in network.plc.requests.items() if not path.startswith("/export"))


@pytest.mark.parametrize("repos", [30, pytest.param(10_000, marks=pytest.mark.proof("daemon"))])
async def test_backfill_after_an_import_asks_the_directory_nothing(
    database: str, db: Database, tmp_path: Path, repos: int
) -> None:
    async with FaultyNetwork(pds=16) as network:
        accounts = [network.create_account(f"n{number}.test") for number in range(repos)]
        for account in accounts:
            account.create(POST, post("hello"))
        await db.repos.add([account.did for account in accounts])
        assert await import_identities(db, network, tmp_path) == len(network.plc.operations) == 2 * repos
        async with running_daemon(database, tmp_path, network, start="live") as daemon:
            await daemon.wait_for_counter("resync", result="synchronized", above=repos - 1)
            await wait_until_equal(network, daemon)
        assert lookups(network) == 0


async def wait_until_equal(network: FaultyNetwork, *daemons: RunningDaemon) -> None:
    """Let an account write when the daemons are connected, so that they have a cursor; wait until they are equal."""
    await until(lambda: all(open_relays(daemon.stages.streams) for daemon in daemons))
    next(iter(network.accounts.values())).create(POST, post("hello"))
    for daemon in daemons:
        await daemon.wait_until_equal()


def move_silently(network: FaultyNetwork, account: FaultyAccount) -> LocalIdentity:
    """Let an account that sends nothing move, with a new key."""
    key = PrivateKey.from_seed("k256", f"{account.did} elsewhere".encode()).public.did_key()
    moved = LocalIdentity(account.handle, key, OTHER_HOST)
    network.plc.publish(account.did, moved)
    return moved


@pytest.mark.parametrize("offers_stream", [True, False])
async def test_silent_move_changes_key_and_host_without_a_lookup(
    database: str, db: Database, tmp_path: Path, offers_stream: bool
) -> None:
    """Two processes have the accounts. One of them follows, and the other one drops its key, too."""
    async with AsyncExitStack() as stack:
        network = await stack.enter_async_context(FaultyNetwork())
        if not offers_stream:
            network.plc.faults.append(Fault("/export/stream", status=404, times=None))
        accounts = [network.create_account(f"n{number}.test") for number in range(8)]
        await db.repos.add([account.did for account in accounts])
        await import_identities(db, network, tmp_path)
        daemons = [
            await stack.enter_async_context(
                running_daemon(database, tmp_path, network, start="live", shard=f"{part}/2", plc_follow="true")
            )
            for part in range(2)
        ]
        await wait_until_equal(network, *daemons)
        dids = [account.did for account in accounts]
        for daemon in daemons:
            await daemon.stages.identities.preload(dids)
        before, seq = lookups(network), await db.changes.latest_seq()
        moved = {account.did: move_silently(network, account) for account in accounts}

        def keys(daemon: RunningDaemon) -> list[str | None]:
            found = [daemon.stages.identities.peek(did) for did in dids]
            return [one.key.did_key() if one and one.key else None for one in found]

        async def dropped() -> bool:
            for daemon in daemons:
                await daemon.stages.identities.preload(dids)
            return all(keys(daemon) == [one.key for one in moved.values()] for daemon in daemons)

        await until(dropped, lambda: [keys(daemon) for daemon in daemons])
        assert lookups(network) == before
        rows = await daemons[0].execute("select did, action from atproto.changes where seq > $1", seq)
        assert sorted(map(tuple, rows)) == sorted((did, "moved") for did in dids)
