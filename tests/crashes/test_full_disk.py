"""The disk of the spool files or of the database is full: the daemon waits, and continues when there is space again."""

import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from urllib.parse import parse_qs, urlsplit

import asyncpg
import pytest

from indexer.demo.scenario import NOTE
from tests.crashes.death_world import DeathWorld, death_world
from tests.database_server import dsn_of
from tests.faulty_network import FaultyAccount
from tests.lost_commits import lose_commit
from tests.waiting import until

pytestmark = pytest.mark.proof("crashes")

MIB = 1 << 20
TABLESPACE = "small"


@contextmanager
def small_disk(mib: int, owner: int = 0) -> Iterator[Path]:
    """Mount a file system of this size, which belongs to this user; skip the test if that is not allowed."""
    directory = Path(mkdtemp(prefix="indexer-small-disk-"))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(directory)]
    mounted = subprocess.run(mount, check=False, capture_output=True)
    if mounted.returncode:
        directory.rmdir()
        pytest.skip(f"NO DISK WAS FULL: this process may not mount one ({mounted.stderr.decode().strip()})")
    try:
        os.chown(directory, owner, -1)
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)
        directory.rmdir()


@contextmanager
def filled(disk: Path) -> Iterator[None]:
    """Leave no space on the disk during the block."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (MIB, 4_096, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                continue
    yield
    ballast.unlink()


async def test_full_disk_of_spool_files_delays_large_exports_and_nothing_else(database: str, tmp_path: Path) -> None:
    """An export above 1 MiB needs a spool file. Small exports, and the stream, go on."""
    with small_disk(16) as disk:
        async with death_world(database, tmp_path, {"data_dir": str(disk)}) as world:
            large = world.create_account()
            for number in range(3):
                large.create(NOTE, {"text": f"{number}" + "x" * 800_000})
            lose_commit(large)
            with filled(disk):
                world.daemon.start()
                await until(partial(has_row, world, large, "spool-full", "desynchronized"), world.daemon.log_tail)
                small = world.create_unseen_account()
                await until(partial(has_row, world, small, None, "synchronized"), world.daemon.log_tail)
            await world.check()


async def has_row(world: DeathWorld, account: FaultyAccount, failure: str | None, sync_status: str) -> bool:
    query = "select last_failure, sync_status, attempts from indexer.repo where did = $1"
    rows = await world.execute(query, account.did)
    assert all(row["attempts"] <= 1 for row in rows), "a full disk does not count as an attempt, the broken chain does"
    return [(row["last_failure"], row["sync_status"]) for row in rows] == [(failure, sync_status)]


@pytest.mark.one_server("the tables are in one directory")
async def test_full_disk_of_the_database_is_waited_for(database: str, tmp_path: Path) -> None:
    data = Path(parse_qs(urlsplit(database).query).get("host", [""])[0]).parent / "data"
    if not data.is_dir():
        pytest.skip("NO DISK OF A DATABASE WAS FULL: the tests did not start the server")
    with small_disk(64, data.stat().st_uid) as disk:
        async with tables_on(database, disk), death_world(database, tmp_path, {"log_level": "debug"}) as world:
            with filled(disk):
                world.daemon.start()
                for _ in range(200):
                    world.account().create(NOTE, {"text": os.urandom(3_000).hex()})
                await until(lambda: "No space left on device" in world.daemon.log.read_text(), world.daemon.log_tail)
            await world.check()


@asynccontextmanager
async def tables_on(dsn: str, disk: Path) -> AsyncIterator[None]:
    """Move the database to this directory for the block."""
    name = urlsplit(dsn).path[1:]
    connection = await asyncpg.connect(dsn_of(dsn, "postgres"))
    try:
        await connection.execute(f"create tablespace {TABLESPACE} location '{disk}'")
        await connection.execute(f"alter database {name} set tablespace {TABLESPACE}")
        try:
            yield
        finally:
            await connection.execute(
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = $1", name
            )
            await connection.execute(f"alter database {name} set tablespace pg_default")
            await connection.execute(f"drop tablespace {TABLESPACE}")
    finally:
        await connection.close()
