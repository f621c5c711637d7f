"""A daemon whose only stream is a Jetstream: it ends equal to the network, and believes nothing that it is told."""

from pathlib import Path

import pytest

from indexer.cli.demo import compare
from indexer.demo.local_pds import GET_BLOCKS, GET_RECORD, GET_REPO
from tests.daemon.running_daemon import LIKE, POST, FilteredNetwork, RunningDaemon, running_daemon
from tests.local_jetstream import local_jetstream
from tests.waiting import until

pytestmark = pytest.mark.slow


async def equal(daemon: RunningDaemon) -> None:
    differences = ["not compared"]

    async def has_none() -> bool:
        nonlocal differences
        differences = await compare(daemon.network, daemon.db)
        return not differences

    await until(has_none, lambda: (differences[:5], daemon.stages.status.document()))


async def test_hints_lead_to_the_records_of_the_network(database: str, tmp_path: Path) -> None:
    async with (
        FilteredNetwork(collections=[LIKE]) as network,
        local_jetstream(network) as jetstream,
        running_daemon(
            database, tmp_path, network, upstream="jetstream", jetstreams=jetstream.ws_url, collections=LIKE
        ) as daemon,
    ):
        await until(lambda: bool(jetstream.queries))
        account = network.create_account("ada.test")
        path = account.create(LIKE, {"$type": LIKE})
        account.create(POST, {"$type": POST})
        await equal(daemon)
        for number in range(5):
            account.create(LIKE, {"$type": LIKE, "number": number})
            await equal(daemon)
        account.update(path, {"$type": LIKE, "changed": True})
        await equal(daemon)
        account.delete(path)
        await equal(daemon)
        print([(pds.requests) for pds in network.pdses], jetstream.queries)
        print(daemon.stages.probe.not_ready())
        print(await daemon.execute("select * from indexer.cursor"))
        print(await daemon.repo_row(account))
