"""Use an embedded server: start it or find the running one, keep it alive, and stop it after its last use."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from urllib.parse import quote

import asyncpg
import structlog

from indexer.concurrency.stage_progress import StageProgress
from indexer.db.database_errors import SETTING, UnusableDatabaseError
from indexer.embedded.cluster import DATABASE, POLL_SECONDS, PORT, Cluster
from indexer.errors import SettingsError, UnavailableError
from indexer.reasons import FetchFailure

START_TIMEOUT = 600.0
"""Seconds to wait for a start. Crash recovery replays up to `max_wal_size` of log."""
RESTART_STALL_SECONDS = START_TIMEOUT + 60.0
"""A restart that takes longer has stalled. A shorter limit could let an orchestrator end each crash recovery."""
CONNECT_TIMEOUT = 5.0
RESTART_PAUSE_SECONDS = (0.1, 1.0, 5.0, 30.0)
"""Pauses before a restart, by the number of failed restarts before it."""
MAX_SHARED_BUFFERS = 1 << 30

_NOT_READY = (OSError, asyncpg.InterfaceError, asyncpg.PostgresConnectionError, asyncpg.OperatorInterventionError)
"""Errors of a connection to a server that starts or stops."""

_UNUSABLE_DIRECTORY = {errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EROFS}

log = structlog.get_logger(__name__)


def postgres_stage() -> StageProgress:
    """Return the stage that restarts an embedded server. A failed restart is no progress: only the server is."""
    return StageProgress("embedded Postgres", RESTART_STALL_SECONDS, needs_database=False)


def embedded_database_exists(data_dir: Path) -> bool:
    """Return True if the embedded server has a database in this data directory."""
    return (data_dir / "postgres" / "data").exists()


@asynccontextmanager
async def database(
    url: str | None,
    data_dir: Path,
    settings: Mapping[str, str] | None = None,
    on_restart: Callable[[], None] = lambda: None,
    stage: StageProgress | None = None,
) -> AsyncIterator[str]:
    """Provide a database during the block: the one at `url`, or the embedded one if `url` is None.

    All processes that need the embedded server share one. It stops when the last of them ends.

    Args:
        url: The connection string of a database.
        data_dir: The data directory; the embedded server uses its subdirectory `postgres`.
        settings: Settings of Postgres for the embedded server, which override the defaults.
        on_restart: Called when the embedded server runs again after it ended unexpectedly.
        stage: A restart of the embedded server is work of this stage until the server accepts connections.

    Yields:
        The connection string.

    Raises:
        SettingsError: There are no Postgres binaries, they have another major version than the cluster, or the data
            directory cannot be used. An error of the block about the embedded database names the data directory.
        UnavailableError: The server does not start.
        OSError: A process or a socket failed.
    """
    if url is not None:
        yield url
        return
    server = EmbeddedPostgres(Cluster(data_dir / "postgres"), settings or {}, on_restart, stage or postgres_stage())
    try:
        try:
            await server.start()
        except OSError as error:
            if error.errno not in _UNUSABLE_DIRECTORY:
                raise
            reason = f"the embedded Postgres cannot use {error.filename or data_dir}: {error.strerror}"
            raise SettingsError(f"INDEXER_DATA_DIR: {reason}") from error
        keep_alive = asyncio.create_task(server.keep_alive(), name="postgres")
        try:
            yield server.dsn
        except UnusableDatabaseError as error:
            raise UnusableDatabaseError(str(error).replace(SETTING, "INDEXER_DATA_DIR", 1)) from error
        finally:
            keep_alive.cancel()
            await asyncio.wait([keep_alive])
        if not keep_alive.cancelled():
            keep_alive.result()
    finally:
        await server.stop()


@dataclass(eq=False)
class EmbeddedPostgres:
    """One server for a cluster. `settings` are settings of Postgres, which override the defaults."""

    cluster: Cluster
    settings: Mapping[str, str]
    on_restart: Callable[[], None]
    stage: StageProgress

    def __post_init__(self) -> None:
        self._user: int | None = None

    @property
    def dsn(self) -> str:
        """The connection string of the database."""
        return f"postgresql://postgres@/{DATABASE}?host={quote(str(self.cluster.socket))}&port={PORT}"

    async def start(self) -> None:
        """Use the running server, or start one; wait until it accepts connections."""
        try:
            async with asyncio.timeout(START_TIMEOUT):
                while not await self._use():  # noqa: ASYNC110 - there is no event for a file lock
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            message = (
                f"an earlier server in {self.cluster.directory} does not end, or the present one does not accept "
                f"connections; see {self.cluster.log}"
            )
            raise UnavailableError(FetchFailure.TIMEOUT, message) from None

    async def stop(self) -> None:
        """Stop the server, unless other processes use it. Open transactions are rolled back."""
        if self._user is not None:
            user, self._user = self._user, None
            await self.cluster.leave(user)

    async def keep_alive(self) -> None:
        """Restart the server whenever it ends. Runs until it is cancelled."""
        while True:
            await self.cluster.wait_until_ended()
            log.error("postgres.ended", log=str(self.cluster.log))
            with self.stage.busy():
                for pause in chain(RESTART_PAUSE_SECONDS, repeat(RESTART_PAUSE_SECONDS[-1])):
                    await asyncio.sleep(pause)
                    try:
                        await self.start()
                        break
                    except (OSError, UnavailableError, SettingsError) as error:
                        log.error("postgres.not-restarted", error=str(error))  # noqa: TRY400 - no traceback
            log.info("postgres.restarted")
            self.on_restart()

    async def _use(self) -> bool:
        """Use a server that accepts connections; return False if another process starts or stops one."""
        if self._user is None:
            self._user = self.cluster.use()
        if self._user is None:
            return False
        settings = {**_default_settings(), **self.settings, "listen_addresses": "", "port": str(PORT)}
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        started = await self.cluster.start(options)
        while not await self._is_ready():
            if self.cluster.has_ended():
                if started:
                    words = " ".join(self.cluster.log.read_text(errors="replace").splitlines()[-3:])
                    raise UnavailableError(FetchFailure.UNREACHABLE, f"the embedded Postgres ended: {words}")
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True

    async def _is_ready(self) -> bool:
        """Return True if the server accepts connections."""
        socket = str(self.cluster.socket)
        try:
            connection = await asyncpg.connect(
                host=socket, port=PORT, user="postgres", database=DATABASE, timeout=CONNECT_TIMEOUT
            )
        except asyncpg.TooManyConnectionsError:
            return True
        except _NOT_READY:
            return False
        await connection.close()
        return True


def _default_settings() -> dict[str, str]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "shared_buffers": f"{min(memory // 4, MAX_SHARED_BUFFERS) // 1024}kB",
        "max_connections": "300",  # enough for ten processes with 23 each, and 70 for consumers and commands
        "max_wal_size": "4GB",
        "checkpoint_timeout": "15min",
        "wal_compression": "off",  # the wheel supports only pglz, which halves the write rate
        "timezone": "UTC",
        "log_timezone": "UTC",
    }
