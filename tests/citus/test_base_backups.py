"""All nodes are restored from base backups to one restore point, as docs/scaling.md describes it."""

import asyncio
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from indexer.demo.scenario import Scenario
from tests.citus.own_cluster import distribute_new_schema, own_cluster
from tests.citus_cluster import COORDINATOR, Cluster
from tests.daemon.running_daemon import RunningDaemon, running_daemon
from tests.database_checks import assert_change_log_consistent, fetch
from tests.faulty_network import FaultyNetwork
from tests.waiting import until

pytestmark = [pytest.mark.proof("cluster"), pytest.mark.timeout(600)]

ARCHIVE = "archive=../archive/$(basename $PWD); mkdir -p $archive && cp %p $archive/%f"
"""A command of each node, which runs in its data directory."""
RESTORED = """
restore_command = 'cp {archive}/%f %p'
recovery_target_name = 'hourly'
recovery_target_action = 'promote'
"""
STEPS = 120


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = {"archive_mode": "on", "archive_command": ARCHIVE}
    with own_cluster(tmp_path_factory, settings) as cluster:
        yield cluster


async def test_nodes_are_restored_to_one_restore_point_and_the_daemon_continues(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Each base backup is taken at another moment, and the daemon writes before and after the restore point."""
    dsn = cluster.url_of(COORDINATOR)
    await distribute_new_schema(dsn)
    async with FaultyNetwork() as network:
        scenario, step = Scenario(network, seed=18), 0

        async def act(daemon: RunningDaemon, steps: int) -> tuple[int, int]:
            """Let accounts write and wait until it is stored; return the cursor and the number of stored records."""
            nonlocal step
            for _ in range(steps):
                scenario.perform(step, STEPS)
                step += 1
            await daemon.wait_until_equal()
            return await stored(dsn)

        async with running_daemon(dsn, tmp_path, network) as daemon:
            for node in cluster.names:
                await act(daemon, 20)
                await asyncio.to_thread(back_up, cluster, node)
            before = await act(daemon, 20)
            await fetch(dsn, "select citus_create_restore_point('hourly')")
            after = await act(daemon, STEPS - step)
        for node in cluster.names:
            await archive_everything(cluster, node)
        for node in cluster.names:
            await asyncio.to_thread(restore, cluster, node)
        for node in cluster.names:
            await until(partial(is_primary, cluster, node))
        assert await stored(dsn) == before != after
        async with running_daemon(dsn, tmp_path, network) as daemon:
            await daemon.wait_until_equal()
            assert await daemon.dead_letters() == []
        await assert_change_log_consistent(dsn)


async def stored(dsn: str) -> tuple[int, int]:
    """Return the cursor and the number of records."""
    [(seq,)] = await fetch(dsn, "select max(seq) from indexer.cursor")
    [(records,)] = await fetch(dsn, "select count(*) from indexer.record")
    return seq, records


def back_up(cluster: Cluster, node: str) -> None:
    """Take a base backup of a running node."""
    cluster.run("pg_basebackup", "-d", cluster.url_of(node), "-D", f"backup/{node}", "-X", "none", "-c", "fast")


async def archive_everything(cluster: Cluster, node: str) -> None:
    """Wait until the node has archived all that it has written."""
    url = cluster.url_of(node)
    [(file,)] = await fetch(url, "select pg_walfile_name(pg_current_wal_lsn())")
    await fetch(url, "select pg_switch_wal()")
    await until((cluster.dir / "archive" / node / file).exists)


def restore(cluster: Cluster, node: str) -> None:
    """Replace the files of the node by those of its base backup, and start it."""
    cluster.kill(node)
    files = cluster.dir / node
    shutil.move(files, cluster.dir / f"{node}.lost")
    shutil.move(cluster.dir / "backup" / node, files)
    with (files / "postgresql.conf").open("a") as configuration:
        configuration.write(RESTORED.format(archive=cluster.dir / "archive" / node))
    (files / "recovery.signal").touch()
    cluster.start(node)


async def is_primary(cluster: Cluster, node: str) -> bool:
    """Return True if the node has reached the restore point."""
    [(is_restoring,)] = await fetch(cluster.url_of(node), "select pg_is_in_recovery()")
    return not is_restoring
