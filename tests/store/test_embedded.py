import asyncio
import os
import pwd
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from indexer.errors import SettingsError
from indexer.store.embedded import EmbeddedPostgres, database

QUICK = {"fsync": "off", "shared_buffers": "16MB"}


async def fetch(dsn: str, query: str) -> object:
    connection = await asyncpg.connect(dsn, timeout=10)
    try:
        return await connection.fetchval(query)
    finally:
        await connection.close()


async def test_rows_are_there_again_after_a_restart(tmp_path: Path) -> None:
    async with database(None, tmp_path, QUICK) as dsn:
        await fetch(dsn, "create table kept as select 7 as seven")
    async with database(None, tmp_path, QUICK) as dsn:
        assert await fetch(dsn, "select seven from kept") == 7


async def test_it_listens_on_its_socket_only(tmp_path: Path) -> None:
    async with database(None, tmp_path, QUICK) as dsn:
        assert await fetch(dsn, "show listen_addresses") == ""
        assert await fetch(dsn, "select inet_server_addr()") is None
        pid = (tmp_path / "postgres" / "data" / "postmaster.pid").read_text().splitlines()[0]
        inodes = {link.readlink().name for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
        listening = {
            f"socket:[{row.split()[9]}]"
            for table in ("tcp", "tcp6")
            for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        }
        assert not inodes & listening


async def test_the_data_directory_may_be_closed_to_others_and_long(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    long = closed / ("x" * 120)
    async with database(None, long, QUICK) as dsn:
        assert await fetch(dsn, "select 1") == 1
    assert closed.stat().st_mode & 0o777 == 0o700
    assert closed.stat().st_uid == os.getuid()


async def test_a_killed_server_is_started_again(tmp_path: Path) -> None:
    async with database(None, tmp_path, QUICK) as dsn:
        await fetch(dsn, "create table kept as select 7 as seven")
        pid = int((tmp_path / "postgres" / "data" / "postmaster.pid").read_text().splitlines()[0])
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(30):
            while True:
                try:
                    assert await fetch(dsn, "select seven from kept") == 7
                    break
                except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                    await asyncio.sleep(0.05)
        assert int((tmp_path / "postgres" / "data" / "postmaster.pid").read_text().splitlines()[0]) != pid


OWNER = """
    import asyncio, sys
    from pathlib import Path
    import asyncpg
    from indexer.store.embedded import database

    async def main():
        async with database(None, Path(sys.argv[1]), {"fsync": "off", "shared_buffers": "16MB"}) as dsn:
            connection = await asyncpg.connect(dsn)
            await connection.execute("create table if not exists kept as select 7 as seven")
            print(dsn, flush=True)
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

    asyncio.run(main())
"""


def own(directory: Path, **options: Any) -> subprocess.Popen[str]:
    """A process that runs the server until its input ends."""
    process: subprocess.Popen[str] = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(OWNER), str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )
    return process


@pytest.mark.slow
async def test_another_process_finds_the_running_server(tmp_path: Path) -> None:
    with own(tmp_path) as owner:
        assert owner.stdout is not None
        dsn = (await asyncio.to_thread(owner.stdout.readline)).strip()
        async with database(None, tmp_path, QUICK) as found:
            assert found == dsn
            assert await fetch(found, "select seven from kept") == 7
        assert await fetch(dsn, "select 1") == 1, "leaving must not stop a server that isn't ours"
        assert owner.stdin is not None
        owner.stdin.close()


@pytest.mark.slow
async def test_after_kill_9_of_the_owner_the_next_start_has_everything(tmp_path: Path) -> None:
    with own(tmp_path) as owner:
        assert owner.stdout is not None
        assert (await asyncio.to_thread(owner.stdout.readline)).strip()
        owner.kill()
    async with database(None, tmp_path, QUICK) as dsn:
        assert await fetch(dsn, "select seven from kept") == 7


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_it_runs_as_a_plain_user_as_well() -> None:
    nobody = pwd.getpwnam("nobody")
    directory = Path("/tmp") / f"indexer-test-{os.getpid()}"  # noqa: S108 - pytest's own directories are root's alone
    directory.mkdir()
    os.chown(directory, nobody.pw_uid, nobody.pw_gid)
    try:
        with own(directory, user=nobody.pw_uid, group=nobody.pw_gid, extra_groups=[], cwd="/") as owner:
            assert owner.stdout is not None
            assert "indexer-pg-" in owner.stdout.readline()
            assert owner.stdin is not None
            owner.stdin.close()
    except PermissionError:
        pytest.skip(f"nobody may not run {sys.executable}")
    finally:
        shutil.rmtree(directory)


async def test_another_major_version_is_refused_in_one_line(tmp_path: Path) -> None:
    async with database(None, tmp_path, QUICK):
        pass
    (tmp_path / "postgres" / "data" / "PG_VERSION").write_text("9\n")
    with pytest.raises(SettingsError, match=r"made by PostgreSQL 9, and the binaries are \d+") as caught:
        async with database(None, tmp_path, QUICK):
            pass
    assert "\n" not in str(caught.value)


async def test_a_half_made_cluster_is_made_anew(tmp_path: Path) -> None:
    half = tmp_path / "postgres" / "data.init"
    half.mkdir(parents=True)
    (half / "PG_VERSION").write_text("18\n")
    async with database(None, tmp_path, QUICK) as dsn:
        assert await fetch(dsn, "select 1") == 1
    assert not half.exists()


async def test_a_pid_that_is_somebody_elses_by_now_does_not_stop_the_start(tmp_path: Path) -> None:
    async with database(None, tmp_path, QUICK):
        pass
    lock = tmp_path / "postgres" / "data" / "postmaster.pid"
    lock.write_text(f"{os.getpid()}\n{tmp_path}\n0\n5432\n\n\n")
    server = EmbeddedPostgres(tmp_path / "postgres", QUICK)
    assert await server.start()
    await server.stop()


async def test_a_url_starts_nothing(tmp_path: Path) -> None:
    async with database("postgresql://elsewhere/x", tmp_path) as dsn:
        assert dsn == "postgresql://elsewhere/x"
    assert list(tmp_path.iterdir()) == []
