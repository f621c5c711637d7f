import asyncio
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import asyncpg
import pytest

from indexer.errors import SettingsError, UnavailableError
from indexer.store.embedded import cluster, database, server

pytestmark = pytest.mark.slow

QUICK = {"fsync": "off", "shared_buffers": "16MB"}

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


async def fetch(dsn: str, query: str) -> object:
    connection = await asyncpg.connect(dsn, timeout=10)
    try:
        return await connection.fetchval(query)
    finally:
        await connection.close()


async def fetch_in_the_end(dsn: str, query: str) -> object:
    async with asyncio.timeout(30):
        while True:
            try:
                return await fetch(dsn, query)
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                await asyncio.sleep(0.05)


async def become(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - another process's doings send us no event
            await asyncio.sleep(0.05)


def noted_pid(data_dir: Path) -> int:
    return int((data_dir / "postgres" / "data" / "postmaster.pid").read_text().splitlines()[0])


def is_ours(data_dir: Path) -> bool:
    """Whether this process is the parent of the server."""
    try:
        status = Path(f"/proc/{noted_pid(data_dir)}/stat").read_text()
    except (FileNotFoundError, ValueError, IndexError):
        return False
    return int(status.rpartition(")")[2].split()[1]) == os.getpid()


OWNER = """
    import asyncio, concurrent.futures.thread, os, sys  # all of it: whom this becomes may not be let to read more
    from pathlib import Path
    import asyncpg
    from indexer.store.embedded import cluster, database

    async def main():
        async with database(None, Path(sys.argv[1]), {"fsync": "off", "shared_buffers": "16MB"}) as dsn:
            connection = await asyncpg.connect(dsn)
            await connection.execute("create table if not exists kept as select 7 as seven")
            print(dsn, flush=True)
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

"""


@contextmanager
def owner(data_dir: Path, first: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that runs the server until its input ends, and its DSN. `first` is what it does before."""
    script = textwrap.dedent(OWNER) + first + "\nasyncio.run(main())"
    command = [sys.executable, "-c", script, str(data_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.stdin.close()


async def test_rows_and_the_address_are_the_same_after_a_restart(tmp_path: Path) -> None:
    async with database(None, tmp_path, QUICK) as first:
        await fetch(first, "create table kept as select 7 as seven")
    async with database(None, tmp_path, QUICK) as second:
        assert await fetch(second, "select seven from kept") == 7
    assert first == second
    assert not list((tmp_path / "postgres" / "socket").iterdir())


async def test_it_listens_on_its_socket_only(tmp_path: Path) -> None:
    async with database(None, tmp_path, {**QUICK, "listen_addresses": "*"}) as dsn:
        assert await fetch(dsn, "show listen_addresses") == ""
        assert await fetch(dsn, "select inet_server_addr()") is None
        links = [*Path(f"/proc/{noted_pid(tmp_path)}/fd").iterdir()]
        sockets = {link.readlink().name for link in links if link.readlink().name.startswith("socket:")}
        rows = [row.split() for row in Path("/proc/net/unix").read_text().splitlines()[1:]]
        unix = {f"socket:[{row[6]}]" for row in rows}
        assert sockets
        assert sockets <= unix, "a socket of another family"
        assert (tmp_path / "postgres" / "socket").stat().st_mode & 0o777 == 0o700


async def test_the_cluster_sorts_bytes(tmp_path: Path) -> None:
    async with database(None, tmp_path, QUICK) as dsn:
        assert (
            await fetch(dsn, "select datcollate || ' ' || datctype from pg_database where datname = 'indexer'") == "C C"
        )
        assert await fetch(dsn, "show server_encoding") == "UTF8"
        assert (
            await fetch(dsn, "select string_agg(x, '' order by x) from unnest(array['a', 'B', 'ä', '_']) x") == "B_aä"
        )
        assert await fetch(dsn, "show timezone") == "UTC"


async def test_a_closed_and_long_data_directory_is_left_as_it_is(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    long = closed / ("x" * 120)
    async with database(None, long, QUICK) as first:
        assert await fetch(first, "select 1") == 1
        async with database(None, long, QUICK) as found:
            assert found == first
    socket = (long / "postgres" / "socket").readlink()
    try:
        assert socket.stat().st_mode & 0o777 == 0o700
        async with database(None, long, QUICK) as again:
            assert again == first, "the short directory is used again"
        socket.chmod(0o777)
        async with database(None, long, QUICK) as other:
            assert other != first, "a directory that others may write to could be somebody else's"
        shutil.rmtree((long / "postgres" / "socket").readlink())
    finally:
        shutil.rmtree(socket)
    assert closed.stat().st_mode & 0o777 == 0o700
    assert closed.stat().st_uid == os.getuid()


async def test_neither_the_working_directory_nor_the_environment_matters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PGPORT", "6000")
    monkeypatch.setenv("PGHOST", "localhost")
    monkeypatch.setenv("PGDATABASE", "elsewhere")
    monkeypatch.setenv("LC_ALL", "tlh")
    async with database(None, Path("relative"), QUICK) as dsn:
        monkeypatch.chdir("/")
        assert await fetch(dsn, "select current_database()") == "indexer"


async def test_a_killed_server_is_started_again(tmp_path: Path) -> None:
    async with database(None, tmp_path, QUICK) as dsn:
        await fetch(dsn, "create table kept as select 7 as seven")
        for _ in range(2):
            killed = noted_pid(tmp_path)
            assert is_ours(tmp_path)
            os.kill(killed, signal.SIGKILL)
            assert await fetch_in_the_end(dsn, "select seven from kept") == 7
            assert noted_pid(tmp_path) != killed


async def test_those_who_start_together_share_one_server_and_the_last_keeps_it(tmp_path: Path) -> None:
    async with AsyncExitStack() as stays, AsyncExitStack() as goes:
        first, second = await asyncio.gather(
            goes.enter_async_context(database(None, tmp_path, QUICK)),
            stays.enter_async_context(database(None, tmp_path, QUICK)),
        )
        assert first == second
        await fetch(second, "create table kept as select 7 as seven")
        before = noted_pid(tmp_path)
        await goes.aclose()
        assert await fetch_in_the_end(second, "select seven from kept") == 7
    assert not Path(f"/proc/{before}").exists()
    assert not (tmp_path / "postgres" / "data" / "postmaster.pid").exists()


@pytest.mark.slow
async def test_another_process_finds_the_running_server_and_takes_over_when_its_owner_is_killed(tmp_path: Path) -> None:
    with owner(tmp_path) as (process, dsn):
        async with database(None, tmp_path, QUICK) as found:
            assert found == dsn
            assert await fetch(found, "select seven from kept") == 7
        assert await fetch(dsn, "select 1") == 1, "leaving must not stop a server that isn't ours"
        async with database(None, tmp_path, QUICK) as found:
            process.kill()
            process.wait()
            await become(lambda: is_ours(tmp_path))
            assert await fetch_in_the_end(found, "select seven from kept") == 7


@pytest.mark.slow
async def test_after_kill_9_of_the_owner_the_server_ends_and_the_next_start_has_everything(tmp_path: Path) -> None:
    with owner(tmp_path) as (process, _):
        process.kill()
    await become(lambda: not (tmp_path / "postgres" / "data" / "postmaster.pid").exists())
    async with database(None, tmp_path, QUICK) as dsn:
        assert await fetch(dsn, "select seven from kept") == 7


@pytest.mark.slow
async def test_an_orphan_is_stopped_and_replaced(tmp_path: Path) -> None:
    with owner(tmp_path, first="cluster.PR_SET_PDEATHSIG = 0") as (process, dsn):
        process.kill()
    orphan = noted_pid(tmp_path)
    assert await fetch(dsn, "select seven from kept") == 7, "it lives on without its owner"
    async with database(None, tmp_path, QUICK) as dsn:
        assert await fetch(dsn, "select seven from kept") == 7
        assert noted_pid(tmp_path) != orphan
        assert is_ours(tmp_path)


async def test_a_pid_that_is_anothers_by_now_is_left_alone(tmp_path: Path) -> None:
    async with database(None, tmp_path, QUICK):
        pass
    other = await asyncio.create_subprocess_exec("bash", "-c", "exec -a postgres sleep 60")  # like somebody's server
    try:
        for pid in (other.pid, os.getpid()):
            (tmp_path / "postgres" / "data" / "postmaster.pid").write_text(f"{pid}\n{tmp_path}\n0\n5432\n\n\n")
            async with database(None, tmp_path, QUICK) as dsn:
                assert await fetch(dsn, "select 1") == 1
        assert other.returncode is None
    finally:
        other.kill()
        await other.wait()


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


async def test_a_start_that_fails_says_why_and_leaves_the_way_free(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="shared_buffers"):
        async with database(None, tmp_path, {"shared_buffers": "plenty"}):
            pass
    async with database(None, tmp_path, QUICK) as dsn:
        assert await fetch(dsn, "select 1") == 1


async def test_it_has_connections_for_several_processes(tmp_path: Path) -> None:
    async with database(None, tmp_path, QUICK) as dsn:
        assert await fetch(dsn, "show max_connections") == "300"


async def test_no_binaries_are_a_bad_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INDEXER_PG_BINDIR", str(tmp_path))
    with pytest.raises(SettingsError, match="INDEXER_PG_BINDIR"):
        async with database(None, tmp_path / "data", QUICK):
            pass


async def test_the_log_is_bounded_while_the_server_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LOG_POLL_SECONDS", 0.05)
    monkeypatch.setattr(cluster, "LOG_BYTES", 20_000)
    log = tmp_path / "postgres" / "postgres.log"
    async with database(None, tmp_path, QUICK) as dsn:
        connection = await asyncpg.connect(dsn)
        async with asyncio.timeout(30):
            while not log.with_suffix(".log.1").exists() or b"no_such_column" not in log.read_bytes():
                with pytest.raises(asyncpg.UndefinedColumnError):
                    await connection.fetchval(f"select no_such_column, '{'x' * 5000}'")
        assert not log.read_bytes().startswith(b"\0"), "the server appends"
        await connection.close()


@pytest.mark.slow
@as_root
async def test_as_root_it_needs_no_way_to_the_binaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    monkeypatch.setenv("INDEXER_PG_BINDIR", str(cluster._copy_binaries(cluster._find_binaries(), closed)))
    for path in closed.rglob("*"):
        path.chmod(path.stat().st_mode & 0o700)  # as installed under umask 077
    async with database(None, tmp_path, QUICK) as dsn:
        assert await fetch(dsn, "select 1") == 1
        copies = (tmp_path / "postgres" / "binaries").readlink()
        assert copies.stat().st_uid == 0, "what the server runs isn't the server's to change"
        os.kill(noted_pid(tmp_path), signal.SIGKILL)
        assert await fetch_in_the_end(dsn, "select 1") == 1
    assert not copies.exists()
    assert not (tmp_path / "postgres" / "binaries").is_symlink()
    assert closed.stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
@as_root
async def test_it_runs_as_a_plain_user_whose_cluster_root_can_use_too() -> None:
    nobody = pwd.getpwnam("nobody")
    place = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's own directories are root's alone
    try:
        place.chmod(0o755)
        binaries = cluster._copy_binaries(cluster._find_binaries(), place)
        data_dir = place / "data"
        data_dir.mkdir()
        os.chown(data_dir, nobody.pw_uid, nobody.pw_gid)
        become_nobody = (
            f"os.environ['INDEXER_PG_BINDIR'] = {str(binaries)!r}; "
            f"os.setgroups([]); os.setgid({nobody.pw_gid}); os.setuid({nobody.pw_uid})"
        )
        with owner(data_dir, first=become_nobody) as (process, dsn):
            assert dsn.startswith("postgresql://")
            status = Path(f"/proc/{noted_pid(data_dir)}/status").read_text()
            assert f"Uid:\t{nobody.pw_uid}\t{nobody.pw_uid}" in status
        assert process.wait() == 0
        assert {path.stat().st_uid for path in data_dir.rglob("*")} == {nobody.pw_uid}
        async with database(None, data_dir, QUICK) as dsn:
            assert await fetch(dsn, "select seven from kept") == 7
    finally:
        shutil.rmtree(place)


async def test_a_url_starts_nothing(tmp_path: Path) -> None:
    async with database("postgresql://elsewhere/x", tmp_path) as dsn:
        assert dsn == "postgresql://elsewhere/x"
    assert list(tmp_path.iterdir()) == []
