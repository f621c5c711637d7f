"""The embedded Postgres server: ownership, restarts, permissions, and files."""

import asyncio
import fcntl
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import asyncpg
import pytest

from indexer.errors import SettingsError, UnavailableError
from indexer.store.embedded import cluster, database
from tests.waiting import until

pytestmark = pytest.mark.slow

QUICK = {"fsync": "off", "shared_buffers": "16MB"}

PYTHON_FOR_ALL = "/usr/bin/python3"
"""A Python interpreter that every account can run."""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change to another user")


async def fetch(dsn: str, query: str) -> object:
    connection = await asyncpg.connect(dsn, timeout=10)
    try:
        return await connection.fetchval(query)
    finally:
        await connection.close()


async def fetch_eventually(dsn: str, query: str) -> object:
    """Repeat the query until it succeeds."""
    async with asyncio.timeout(30):
        while True:
            try:
                return await fetch(dsn, query)
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                await asyncio.sleep(0.05)


def recorded_pid(data_dir: Path) -> int:
    """Return the process ID in the lock file of the server."""
    return int((data_dir / "postgres" / "data" / "postmaster.pid").read_text().splitlines()[0])


def parent_pid(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


STARTER = """
    import asyncio, concurrent.futures.thread, os, sys  # all of it: another user may not read the modules
    from pathlib import Path
    import asyncpg
    from indexer.store.embedded import cluster, database

    async def main():
        async with database(None, Path(sys.argv[1]), {"fsync": "off", "shared_buffers": "16MB"}) as dsn:
            connection = await asyncpg.connect(dsn)
            await connection.execute("create table if not exists stored as select 7 as seven")
            print(dsn, flush=True)
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

"""


@contextmanager
def starter(data_dir: Path, first: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a process that runs the server until its standard input ends; yield it and the DSN.

    `first` is code that it executes before.
    """
    script = textwrap.dedent(STARTER) + first + "\nasyncio.run(main())"
    command = [sys.executable, "-c", script, str(data_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.stdin.close()


async def test_rows_and_dsn_are_the_same_after_a_restart(tmp_path: Path) -> None:
    async with database(None, tmp_path, QUICK) as first:
        await fetch(first, "create table stored as select 7 as seven")
    async with database(None, tmp_path, QUICK) as second:
        assert await fetch(second, "select seven from stored") == 7
    assert first == second
    assert not list((tmp_path / "postgres" / "socket").iterdir())


async def test_the_server_listens_on_its_unix_socket_only(tmp_path: Path) -> None:
    async with database(None, tmp_path, {**QUICK, "listen_addresses": "*"}) as dsn:
        assert await fetch(dsn, "show listen_addresses") == ""
        assert await fetch(dsn, "select inet_server_addr()") is None
        links = [*Path(f"/proc/{recorded_pid(tmp_path)}/fd").iterdir()]
        sockets = {link.readlink().name for link in links if link.readlink().name.startswith("socket:")}
        rows = [row.split() for row in Path("/proc/net/unix").read_text().splitlines()[1:]]
        unix = {f"socket:[{row[6]}]" for row in rows}
        assert sockets
        assert sockets <= unix, "a socket of another family"
        assert (tmp_path / "postgres" / "socket").stat().st_mode & 0o777 == 0o700


async def test_the_cluster_sorts_text_by_bytes(tmp_path: Path) -> None:
    async with database(None, tmp_path, QUICK) as dsn:
        assert (
            await fetch(dsn, "select datcollate || ' ' || datctype from pg_database where datname = 'indexer'") == "C C"
        )
        assert await fetch(dsn, "show server_encoding") == "UTF8"
        assert (
            await fetch(dsn, "select string_agg(x, '' order by x) from unnest(array['a', 'B', 'ä', '_']) x") == "B_aä"
        )
        assert await fetch(dsn, "show timezone") == "UTC"


async def test_an_inaccessible_data_directory_with_a_long_path_keeps_its_permissions(tmp_path: Path) -> None:
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
            assert again == first, "the short directory is reused"
        socket.chmod(0o777)
        async with database(None, long, QUICK) as other:
            assert other != first, "a directory that others may write to is not used"
        shutil.rmtree((long / "postgres" / "socket").readlink())
    finally:
        shutil.rmtree(socket)
    assert closed.stat().st_mode & 0o777 == 0o700
    assert closed.stat().st_uid == os.getuid()


async def test_working_directory_and_environment_have_no_effect(
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


async def test_a_killed_server_is_restarted_and_the_restarts_are_counted(tmp_path: Path) -> None:
    restarts: list[int] = []

    async with database(None, tmp_path, QUICK, lambda: restarts.append(recorded_pid(tmp_path))) as dsn:
        await fetch(dsn, "create table stored as select 7 as seven")
        for _ in range(2):
            killed = recorded_pid(tmp_path)
            os.kill(killed, signal.SIGKILL)
            assert await fetch_eventually(dsn, "select seven from stored") == 7
            await until(lambda: bool(restarts) and restarts[-1] == recorded_pid(tmp_path))  # before the next kill
            assert restarts[-1] != killed
    assert len(restarts) == 2


async def test_concurrent_starts_share_one_server_until_the_last_one_ends(tmp_path: Path) -> None:
    async with AsyncExitStack() as stays, AsyncExitStack() as goes:
        first, second = await asyncio.gather(
            goes.enter_async_context(database(None, tmp_path, QUICK)),
            stays.enter_async_context(database(None, tmp_path, QUICK)),
        )
        assert first == second
        connection = await asyncpg.connect(second)
        before = recorded_pid(tmp_path)
        await goes.aclose()
        assert await connection.fetchval("select 7") == 7, "the session continues"
        assert recorded_pid(tmp_path) == before
        await connection.close()
    assert not is_running(before)
    assert not (tmp_path / "postgres" / "data" / "postmaster.pid").exists()


async def test_another_process_uses_the_server_and_keeps_it_when_the_one_that_started_it_is_killed(
    tmp_path: Path,
) -> None:
    with starter(tmp_path) as (process, dsn):
        async with database(None, tmp_path, QUICK) as found:
            assert found == dsn
            assert await fetch(found, "select seven from stored") == 7
        assert await fetch(dsn, "select 1") == 1, "the first user still needs it"
        async with database(None, tmp_path, QUICK) as found:
            connection, before = await asyncpg.connect(found), recorded_pid(tmp_path)
            process.kill()
            process.wait()
            assert await connection.fetchval("select seven from stored") == 7
            assert recorded_pid(tmp_path) == before
            await connection.close()
    assert not is_running(before)


async def test_the_server_ends_with_its_killed_user_and_the_next_start_has_all_rows(tmp_path: Path) -> None:
    with starter(tmp_path) as (process, _):
        pid = recorded_pid(tmp_path)
        process.kill()
    await until(lambda: not is_running(pid))
    async with database(None, tmp_path, QUICK) as dsn:
        assert await fetch(dsn, "select seven from stored") == 7


async def test_users_restart_the_server_when_its_parent_is_killed(tmp_path: Path) -> None:
    async with database(None, tmp_path, QUICK) as dsn, database(None, tmp_path, QUICK):
        await fetch(dsn, "create table stored as select 7 as seven")
        before = recorded_pid(tmp_path)
        os.kill(parent_pid(before), signal.SIGKILL)
        await until(lambda: not is_running(before))
        assert await fetch_eventually(dsn, "select seven from stored") == 7
        after = recorded_pid(tmp_path)
    assert not is_running(after)


async def test_signals_to_the_parent_do_not_end_a_server_that_is_used(tmp_path: Path) -> None:
    async with database(None, tmp_path, QUICK) as dsn:
        connection = await asyncpg.connect(dsn)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(parent_pid(recorded_pid(tmp_path)), number)
        async with database(None, tmp_path, QUICK) as found:
            assert found == dsn
        assert await connection.fetchval("select 7") == 7
        await connection.close()


async def test_a_server_without_a_parent_is_stopped_and_replaced(tmp_path: Path) -> None:
    with starter(tmp_path) as (process, _):
        old = recorded_pid(tmp_path)
        os.kill(old, signal.SIGSTOP)  # it does not react to the end of its parent
        os.kill(parent_pid(old), signal.SIGKILL)
        process.kill()
    starting = asyncio.create_task(started_pid(tmp_path))
    await until(lambda: is_locked(tmp_path / "postgres" / "lock"))
    assert is_running(old)
    os.kill(old, signal.SIGCONT)
    assert await starting != old


def is_locked(file: Path) -> bool:
    """Return True if another open file has the lock."""
    with file.open() as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


async def started_pid(data_dir: Path) -> int:
    async with database(None, data_dir, QUICK) as dsn:
        assert await fetch(dsn, "select seven from stored") == 7
        return recorded_pid(data_dir)


async def test_another_process_with_the_recorded_pid_is_not_killed(tmp_path: Path) -> None:
    async with database(None, tmp_path, QUICK):
        pass
    other = await asyncio.create_subprocess_exec("bash", "-c", "exec -a postgres sleep 60")  # looks like a server
    try:
        for pid in (other.pid, os.getpid()):
            (tmp_path / "postgres" / "data" / "postmaster.pid").write_text(f"{pid}\n{tmp_path}\n0\n5432\n\n\n")
            async with database(None, tmp_path, QUICK) as dsn:
                assert await fetch(dsn, "select 1") == 1
        assert other.returncode is None
    finally:
        other.kill()
        await other.wait()


async def test_a_cluster_of_another_major_version_is_a_settings_error(tmp_path: Path) -> None:
    async with database(None, tmp_path, QUICK):
        pass
    (tmp_path / "postgres" / "data" / "PG_VERSION").write_text("9\n")
    with pytest.raises(SettingsError, match=r"needs PostgreSQL 9, but the binaries have version \d+") as caught:
        async with database(None, tmp_path, QUICK):
            pass
    assert "\n" not in str(caught.value)


async def test_an_incomplete_cluster_is_replaced(tmp_path: Path) -> None:
    incomplete = tmp_path / "postgres" / "data.init"
    incomplete.mkdir(parents=True)
    (incomplete / "PG_VERSION").write_text("18\n")
    async with database(None, tmp_path, QUICK) as dsn:
        assert await fetch(dsn, "select 1") == 1
    assert not incomplete.exists()


async def test_a_failed_start_names_the_cause_and_a_later_start_succeeds(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="shared_buffers"):
        async with database(None, tmp_path, {"shared_buffers": "plenty"}):
            pass
    async with database(None, tmp_path, QUICK) as dsn:
        assert await fetch(dsn, "select 1") == 1


async def test_the_server_has_connections_for_several_processes(tmp_path: Path) -> None:
    async with database(None, tmp_path, QUICK) as dsn:
        assert await fetch(dsn, "show max_connections") == "300"


async def test_missing_binaries_are_a_settings_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INDEXER_PG_BINDIR", str(tmp_path))
    with pytest.raises(SettingsError, match="INDEXER_PG_BINDIR"):
        async with database(None, tmp_path / "data", QUICK):
            pass


async def test_the_log_is_limited_while_the_server_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "LOG_POLL_SECONDS", 0.05)
    monkeypatch.setattr(cluster, "MAX_LOG_BYTES", 20_000)
    log = tmp_path / "postgres" / "postgres.log"
    async with database(None, tmp_path, QUICK) as dsn:
        connection = await asyncpg.connect(dsn)
        async with asyncio.timeout(30):
            while not log.with_suffix(".log.1").exists() or b"no_such_column" not in log.read_bytes():
                with pytest.raises(asyncpg.UndefinedColumnError):
                    await connection.fetchval(f"select no_such_column, '{'x' * 5000}'")
        assert not log.read_bytes().startswith(b"\0"), "the server appends"
        await connection.close()


async def test_log_that_cannot_be_rotated_does_not_end_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, if the disk has no space for the copy."""
    monkeypatch.setattr(cluster, "LOG_POLL_SECONDS", 0.05)
    log = tmp_path / "postgres" / "postgres.log"
    log.with_suffix(".log.1").mkdir(parents=True)
    log.write_bytes(b"x" * (cluster.MAX_LOG_BYTES + 1))
    async with database(None, tmp_path, QUICK) as dsn:
        connection = await asyncpg.connect(dsn)
        assert await connection.fetchval("select 1 from pg_sleep(0.5)") == 1, "the parent looks at the log ten times"
        await connection.close()
    assert log.stat().st_size > cluster.MAX_LOG_BYTES


async def test_only_the_owner_may_read_the_logs(tmp_path: Path) -> None:
    """The logs of an earlier release were readable for everyone."""
    logs = [tmp_path / "postgres" / name for name in ("postgres.log", "postgres.log.1")]
    logs[0].parent.mkdir()
    for log in logs:
        log.write_bytes(b"x" * (cluster.MAX_LOG_BYTES + 1))
        log.chmod(0o644)
    async with database(None, tmp_path, QUICK):
        assert [stat.S_IMODE(log.stat().st_mode) for log in logs] == [0o600, 0o600]


@pytest.mark.slow
@as_root
async def test_as_root_inaccessible_binaries_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    monkeypatch.setenv("INDEXER_PG_BINDIR", str(cluster.copy_binaries(cluster.find_binaries(), closed)))
    for path in closed.rglob("*"):
        path.chmod(path.stat().st_mode & 0o700)  # as installed under umask 077
    async with database(None, tmp_path, QUICK) as dsn:
        assert await fetch(dsn, "select 1") == 1
        copies = (tmp_path / "postgres" / "binaries").readlink()
        assert copies.stat().st_uid == 0, "the server cannot change its binaries"
        os.kill(recorded_pid(tmp_path), signal.SIGKILL)
        assert await fetch_eventually(dsn, "select 1") == 1
    assert not copies.exists()
    assert not (tmp_path / "postgres" / "binaries").is_symlink()
    assert closed.stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
@as_root
@pytest.mark.skipif(not Path(PYTHON_FOR_ALL).exists(), reason="the test's own Python may be inaccessible to nobody")
async def test_a_cluster_of_an_ordinary_user_can_be_used_by_root() -> None:
    nobody = pwd.getpwnam("nobody")
    directory = Path(tempfile.mkdtemp(dir="/tmp"))  # only root can access the directories of pytest
    try:
        directory.chmod(0o755)
        binaries = cluster.copy_binaries(cluster.find_binaries(), directory)
        data_dir = directory / "data"
        data_dir.mkdir()
        os.chown(data_dir, nobody.pw_uid, nobody.pw_gid)
        become_nobody = (
            f"sys.executable = {PYTHON_FOR_ALL!r}; "
            f"os.environ['INDEXER_PG_BINDIR'] = {str(binaries)!r}; "
            f"os.setgroups([]); os.setgid({nobody.pw_gid}); os.setuid({nobody.pw_uid})"
        )
        with starter(data_dir, first=become_nobody) as (process, dsn):
            assert dsn.startswith("postgresql://")
            status = Path(f"/proc/{recorded_pid(data_dir)}/status").read_text()
            assert f"Uid:\t{nobody.pw_uid}\t{nobody.pw_uid}" in status
        assert process.wait() == 0
        assert {path.stat().st_uid for path in data_dir.rglob("*")} == {nobody.pw_uid}
        async with database(None, data_dir, QUICK) as dsn:
            assert await fetch(dsn, "select seven from stored") == 7
    finally:
        shutil.rmtree(directory)


async def test_no_server_is_started_for_a_url(tmp_path: Path) -> None:
    async with database("postgresql://elsewhere/x", tmp_path) as dsn:
        assert dsn == "postgresql://elsewhere/x"
    assert list(tmp_path.iterdir()) == []
