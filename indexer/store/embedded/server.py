"""Own an embedded server: start it or find the one of another process, keep it alive, stop it."""

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import asyncpg
import structlog

from indexer.errors import SettingsError, UnavailableError
from indexer.reasons import FetchFailure
from indexer.store.database_errors import DatabaseError, database_errors
from indexer.store.embedded.cluster import POLL_SECONDS, PORT, Cluster

START_TIMEOUT = 600.0
"""Seconds to wait for a start. Crash recovery replays up to `max_wal_size` of log."""
STOP_TIMEOUT = 60.0
CONNECT_TIMEOUT = 5.0
RESTART_PAUSE_SECONDS = (0.1, 1.0, 5.0, 30.0)
"""Pauses before a restart, by the number of failed restarts before it."""
OWNER_POLL_SECONDS = 0.5
LOG_POLL_SECONDS = 60.0
MAX_SHARED_BUFFERS = 1 << 30
DATABASE = "indexer"

log = structlog.get_logger(__name__)


@asynccontextmanager
async def database(url: str | None, data_dir: Path, settings: Mapping[str, str] | None = None) -> AsyncIterator[str]:
    """Provide a database during the block: the one at `url`, or the embedded one if `url` is None.

    If another process already runs the embedded server, that server is used.

    Args:
        url: The connection string of a database.
        data_dir: The data directory; the embedded server uses its subdirectory `postgres`.
        settings: Settings of Postgres for the embedded server, which override the defaults.

    Yields:
        The connection string.

    Raises:
        SettingsError: There are no Postgres binaries, or they have another major version than the cluster.
        UnavailableError: The server does not start.
        OSError: The data directory cannot be used.
    """
    if url is not None:
        yield url
        return
    server = EmbeddedPostgres(data_dir / "postgres", settings or {})
    await server.start()
    keep_alive = asyncio.create_task(server.keep_alive(), name="postgres")
    try:
        yield server.dsn
    finally:
        keep_alive.cancel()
        try:
            await asyncio.wait([keep_alive])
        finally:
            await server.stop()
    if not keep_alive.cancelled():
        keep_alive.result()


class EmbeddedPostgres:
    """One server for the cluster in `directory`. `settings` are settings of Postgres, which override the defaults."""

    def __init__(self, directory: Path, settings: Mapping[str, str]) -> None:
        self._cluster = Cluster(directory)
        self._settings = {**_default_settings(), **settings, "listen_addresses": "", "port": str(PORT)}
        self._owned = False
        self._process: Process | None = None

    @property
    def dsn(self) -> str:
        """The connection string of the database."""
        return f"postgresql://postgres@/{DATABASE}?host={quote(str(self._cluster.socket))}&port={PORT}"

    async def start(self) -> None:
        """Start the server, or wait until the server of another process accepts connections."""
        async with _start_timeout(
            f"the server that another process runs in {self._cluster.directory} does not accept connections"
        ):
            while not self._own():
                if await self._accepts_connections(DATABASE):
                    return
                await asyncio.sleep(POLL_SECONDS)
        try:
            await self._launch()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop the server if this process owns it, and give up the ownership. Open transactions are rolled back."""
        try:
            if self._process is not None and self._process.returncode is None:
                await self._shut_down(self._process)
        finally:
            self._cluster.disown()
            self._owned = False

    async def keep_alive(self) -> None:
        """Restart the server whenever it ends, including when its owner ends. Runs until it is cancelled."""
        failures = 0
        while True:
            await self._wait_until_down()
            await asyncio.sleep(RESTART_PAUSE_SECONDS[min(failures, len(RESTART_PAUSE_SECONDS) - 1)])
            try:
                await self._launch()
            except (OSError, UnavailableError, SettingsError) as error:
                failures += 1
                log.error("postgres.not-restarted", error=str(error))  # noqa: TRY400 - the traceback adds nothing
            else:
                failures = 0
                log.info("postgres.restarted")

    async def _wait_until_down(self) -> None:
        """Wait until no server runs and this process owns the cluster."""
        while not self._own():  # noqa: ASYNC110 - there is no event for a file lock that another process releases
            await asyncio.sleep(OWNER_POLL_SECONDS)
        while self._process is not None:
            with contextlib.suppress(TimeoutError):
                code = await asyncio.wait_for(self._process.wait(), LOG_POLL_SECONDS)
                log.error("postgres.ended", code=code, log=str(self._cluster.log))
                return
            self._cluster.rotate_log()

    def _own(self) -> bool:
        self._owned = self._owned or self._cluster.own()
        return self._owned

    async def _launch(self) -> None:
        """Start the server and wait until it accepts connections."""
        options = [word for name, value in self._settings.items() for word in ("-c", f"{name}={value}")]
        async with _start_timeout(
            f"an earlier server does not end, or the new one does not start; see {self._cluster.log}"
        ):
            async with self._cluster.opened() as directory_fd:
                self._process = await self._cluster.serve(directory_fd, options)
            while not await self._accepts_connections("postgres"):
                if self._process.returncode is not None:
                    words = " ".join(self._cluster.log.read_text(errors="replace").splitlines()[-3:])
                    raise UnavailableError(FetchFailure.UNREACHABLE, f"the embedded Postgres ended: {words}")
                await asyncio.sleep(POLL_SECONDS)
        await self._create_database()

    async def _shut_down(self, process: Process) -> None:
        process.send_signal(signal.SIGINT)
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT)
        except TimeoutError:
            log.exception("postgres.killed")
            process.kill()
            await process.wait()

    async def _accepts_connections(self, name: str) -> bool:
        try:
            with database_errors():
                connection = await self._connect(name)
        except DatabaseError as error:
            return isinstance(error.__cause__, asyncpg.TooManyConnectionsError)
        await connection.close()
        return True

    async def _create_database(self) -> None:
        with database_errors(), contextlib.suppress(asyncpg.DuplicateDatabaseError):
            connection = await self._connect("postgres")
            try:
                await connection.execute(f"create database {DATABASE}")
            finally:
                await connection.close()

    async def _connect(self, name: str) -> "asyncpg.Connection[asyncpg.Record]":
        socket = str(self._cluster.socket)
        return await asyncpg.connect(host=socket, port=PORT, user="postgres", database=name, timeout=CONNECT_TIMEOUT)


@asynccontextmanager
async def _start_timeout(message: str) -> AsyncIterator[None]:
    """Raise `UnavailableError` with the message if the block takes longer than `START_TIMEOUT`."""
    try:
        async with asyncio.timeout(START_TIMEOUT):
            yield
    except TimeoutError:
        raise UnavailableError(FetchFailure.TIMEOUT, message) from None


def _default_settings() -> dict[str, str]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "shared_buffers": f"{min(memory // 4, MAX_SHARED_BUFFERS) // 1024}kB",
        "max_connections": "300",  # enough for twenty processes with default settings, and for consumers
        "max_wal_size": "4GB",
        "checkpoint_timeout": "15min",
        "wal_compression": "off",  # the wheel supports only pglz, which halves the write rate
        "timezone": "UTC",
        "log_timezone": "UTC",
    }
