"""The embedded Postgres server: ownership, restarts, permissions, and files."""

import asyncio
import errno
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
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import asyncpg
import pytest

from indexer.embedded import cluster, database, embedded_database_exists
from indexer.errors import SettingsError, UnavailableError
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
    from indexer.embedded import cluster, database

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


@pytest.fixture(scope="session")
def new_cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data directory in which a server has run."""
    directory = tmp_path_factory.mktemp("cluster")

    async def start() -> None:
        async with database(None, directory, QUICK):
            pass

    asyncio.run(start())
    return directory


@pytest.fixture
def data_dir(new_cluster: Path, tmp_path: Path) -> Path:
    """Return a copy of it: to create a cluster takes longer."""
    (tmp_path / "postgres").mkdir()
    subprocess.run(["cp", "-a", new_cluster / "postgres" / "data", tmp_path / "postgres"], check=True)
    return tmp_path


async def test_a_new_server_listens_on_its_unix_socket_only_and_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It replaces an incomplete cluster, sorts text by bytes, and ignores the environment and the directory."""
    for name, value in {"PGPORT": "6000", "PGHOST": "localhost", "PGDATABASE": "elsewhere", "LC_ALL": "tlh"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    incomplete, socket_directory = (tmp_path / "relative" / "postgres" / name for name in ("data.init", "socket"))
    incomplete.mkdir(parents=True)
    (incomplete / "PG_VERSION").write_text("18\n")
    assert not embedded_database_exists(Path("relative"))
    async with database(None, Path("relative"), {**QUICK, "listen_addresses": "*"}) as first:
        assert embedded_database_exists(Path("relative"))
        monkeypatch.chdir("/")
        assert not incomplete.exists()
        links = [*Path(f"/proc/{recorded_pid(tmp_path / 'relative')}/fd").iterdir()]
        sockets = {link.readlink().name for link in links if link.readlink().name.startswith("socket:")}
        rows = [row.split() for row in Path("/proc/net/unix").read_text().splitlines()[1:]]
        assert sockets
        assert sockets <= {f"socket:[{row[6]}]" for row in rows}, "a socket of another family"
        assert socket_directory.stat().st_mode & 0o777 == 0o700
        letters = "select string_agg(x, '' order by x) from unnest(array['a', 'B', 'ä', '_']) x"
        assert await fetch(first, letters) == "B_aä"
        shown = ("listen_addresses", "server_encoding", "timezone", "max_connections")
        found = [await fetch(first, f"show {name}") for name in shown]
        assert found == ["", "UTF8", "UTC", "300"]
        assert await fetch(first, "select current_database()") == "indexer"
        await fetch(first, "create table stored as select 7 as seven")
    assert not list(socket_directory.iterdir())
    async with database(None, tmp_path / "relative", QUICK) as second:
        assert await fetch(second, "select seven from stored") == 7
    assert first == second


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


async def test_a_killed_server_is_restarted_and_the_restarts_are_counted(data_dir: Path) -> None:
    restarts: list[int] = []

    async with database(None, data_dir, QUICK, lambda: restarts.append(recorded_pid(data_dir))) as dsn:
        await fetch(dsn, "create table stored as select 7 as seven")
        for _ in range(2):
            killed = recorded_pid(data_dir)
            os.kill(killed, signal.SIGKILL)
            assert await fetch_eventually(dsn, "select seven from stored") == 7
            await until(lambda: bool(restarts) and restarts[-1] == recorded_pid(data_dir))  # before the next kill
            assert restarts[-1] != killed
    assert len(restarts) == 2


async def test_concurrent_starts_share_one_server_until_the_last_one_ends(data_dir: Path) -> None:
    async with AsyncExitStack() as stays, AsyncExitStack() as goes:
        first, second = await asyncio.gather(
            goes.enter_async_context(database(None, data_dir, QUICK)),
            stays.enter_async_context(database(None, data_dir, QUICK)),
        )
        assert first == second
        connection = await asyncpg.connect(second)
        before = recorded_pid(data_dir)
        await goes.aclose()
        assert await connection.fetchval("select 7") == 7, "the session continues"
        assert recorded_pid(data_dir) == before
        await connection.close()
    assert not is_running(before)
    assert not (data_dir / "postgres" / "data" / "postmaster.pid").exists()


async def test_the_server_ends_with_its_last_user_also_if_users_are_killed(data_dir: Path) -> None:
    with starter(data_dir) as (process, dsn):
        async with database(None, data_dir, QUICK) as found:
            assert found == dsn
            assert await fetch(found, "select seven from stored") == 7
        assert await fetch(dsn, "select 1") == 1, "the first user still needs it"
        async with database(None, data_dir, QUICK) as found:
            connection, before = await asyncpg.connect(found), recorded_pid(data_dir)
            process.kill()
            process.wait()
            assert await connection.fetchval("select seven from stored") == 7
            assert recorded_pid(data_dir) == before
            await connection.close()
    assert not is_running(before)
    with starter(data_dir) as (process, _):
        last = recorded_pid(data_dir)
        process.kill()
    await until(lambda: not is_running(last))
    async with database(None, data_dir, QUICK) as dsn:
        assert await fetch(dsn, "select seven from stored") == 7


async def test_the_parent_ignores_signals_and_users_restart_the_server_when_it_is_killed(data_dir: Path) -> None:
    async with database(None, data_dir, QUICK) as dsn, database(None, data_dir, QUICK):
        connection, before = await asyncpg.connect(dsn), recorded_pid(data_dir)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(parent_pid(before), number)
        async with database(None, data_dir, QUICK) as found:
            assert found == dsn
        await connection.execute("create table stored as select 7 as seven")
        os.kill(parent_pid(before), signal.SIGKILL)
        await until(lambda: not is_running(before))
        connection.terminate()
        assert await fetch_eventually(dsn, "select seven from stored") == 7
        after = recorded_pid(data_dir)
    await until(lambda: not is_running(after))


async def test_a_server_without_a_parent_is_stopped_and_replaced(data_dir: Path) -> None:
    with starter(data_dir) as (process, _):
        old = recorded_pid(data_dir)
        os.kill(old, signal.SIGSTOP)  # it does not react to the end of its parent
        os.kill(parent_pid(old), signal.SIGKILL)
        process.kill()
    starting = asyncio.create_task(started_pid(data_dir))
    await until(lambda: is_locked(data_dir / "postgres" / "lock"))
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


async def test_another_process_with_the_recorded_pid_is_not_killed(data_dir: Path) -> None:
    async with database(None, data_dir, QUICK):
        pass
    other = await asyncio.create_subprocess_exec("bash", "-c", "exec -a postgres sleep 60")  # looks like a server
    try:
        for pid in (other.pid, os.getpid()):
            (data_dir / "postgres" / "data" / "postmaster.pid").write_text(f"{pid}\n{data_dir}\n0\n5432\n\n\n")
            async with database(None, data_dir, QUICK) as dsn:
                assert await fetch(dsn, "select 1") == 1
        assert other.returncode is None
    finally:
        other.kill()
        await other.wait()


async def test_a_process_without_free_file_descriptors_still_waits_for_the_end_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would not restart the server later, when clients have closed their connections."""
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    waiting = asyncio.create_task(cluster.Cluster(tmp_path).wait_until_ended())
    await asyncio.sleep(0.05)

    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        await asyncio.sleep(3 * cluster.POLL_SECONDS)
    assert not waiting.done()
    os.close(lock)
    await asyncio.wait_for(waiting, 5)


async def test_a_failed_start_names_the_cause_and_a_later_start_succeeds(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(**settings: str) -> None:
        async with database(None, data_dir, QUICK | settings) as dsn:
            assert await fetch(dsn, "select 1") == 1

    async with database("postgresql://elsewhere/x", data_dir / "none") as dsn:
        assert dsn == "postgresql://elsewhere/x"
    assert not (data_dir / "none").exists(), "no server is started for a URL"
    with pytest.raises(UnavailableError, match="shared_buffers"):
        await start(shared_buffers="plenty")
    await start()
    with monkeypatch.context() as patch:
        patch.setenv("INDEXER_PG_BINDIR", str(data_dir))
        with pytest.raises(SettingsError, match="INDEXER_PG_BINDIR"):
            await start()
    (data_dir / "postgres" / "data" / "PG_VERSION").write_text("9\n")
    with pytest.raises(SettingsError, match=r"needs PostgreSQL 9, but the binaries have version \d+\."):
        await start()


async def test_the_log_is_limited_while_the_server_runs(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the log cannot be rotated, for example without space for the copy, the server goes on."""
    monkeypatch.setattr(cluster, "LOG_POLL_SECONDS", 0.05)
    monkeypatch.setattr(cluster, "MAX_LOG_BYTES", 20_000)
    log, former = (data_dir / "postgres" / name for name in ("postgres.log", "postgres.log.1"))
    former.mkdir()

    async with database(None, data_dir, QUICK) as dsn:
        connection = await asyncpg.connect(dsn)

        async def fill_log(is_done: Callable[[], bool]) -> None:
            async with asyncio.timeout(30):
                while not is_done():
                    with pytest.raises(asyncpg.UndefinedColumnError):
                        await connection.fetchval(f"select no_such_column, '{'x' * 5000}'")

        await fill_log(lambda: log.stat().st_size > 500_000)
        former.rmdir()
        await fill_log(lambda: former.is_file() and b"no_such_column" in log.read_bytes())
        assert not log.read_bytes().startswith(b"\0"), "the server appends"
        await connection.close()


async def test_only_the_owner_may_read_the_logs(data_dir: Path) -> None:
    """The logs of an earlier release were readable for everyone."""
    logs = [data_dir / "postgres" / name for name in ("postgres.log", "postgres.log.1")]
    for log in logs:
        log.write_bytes(b"x" * (cluster.MAX_LOG_BYTES + 1))
        log.chmod(0o644)
    async with database(None, data_dir, QUICK):
        assert [stat.S_IMODE(log.stat().st_mode) for log in logs] == [0o600, 0o600]


@pytest.fixture
def copies_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a directory for copies of binaries that every account can reach."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        directory = Path(name)
        directory.chmod(0o755)
        monkeypatch.setattr(cluster, "COPIES", directory)
        yield directory


@pytest.mark.proof("deploy")
@as_root
async def test_as_root_inaccessible_binaries_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies_directory: Path
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    monkeypatch.setenv("INDEXER_PG_BINDIR", str(cluster.copy_binaries(cluster.find_binaries(), closed)))
    for path in closed.rglob("*"):
        path.chmod(path.stat().st_mode & 0o700)  # as installed under umask 077
    async with database(None, tmp_path, QUICK) as dsn:
        assert await fetch(dsn, "select 1") == 1
        copies, *others = copies_directory.iterdir()
        assert not others
        assert copies.stat().st_uid == 0, "the server cannot change its binaries"
        os.kill(recorded_pid(tmp_path), signal.SIGKILL)
        assert await fetch_eventually(dsn, "select 1") == 1
    assert list(copies_directory.iterdir()) == [copies], "the next start uses them again"
    assert closed.stat().st_mode & 0o777 == 0o700


def test_a_copy_that_another_cluster_has_completed_first_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = cluster.copy_binaries

    def copied_twice(binaries: Path, directory: Path) -> Path:
        monkeypatch.setattr(cluster, "copy_binaries", copy)
        cluster.copy_once(binaries)
        return copy(binaries, directory)

    monkeypatch.setattr(cluster, "COPIES", tmp_path)
    monkeypatch.setattr(cluster, "copy_binaries", copied_twice)
    binaries = cluster.copy_once(cluster.find_binaries())
    assert (binaries / "postgres").exists()
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.proof("deploy")
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
