"""Owning a server: starting it, finding another's, keeping it alive, stopping it."""

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
from indexer.store.embedded.cluster import POLL_SECONDS, PORT, Cluster
from indexer.store.errors import DatabaseError, database_errors

START_SECONDS = 600.0  # crash recovery replays up to `max_wal_size` of log
STOP_SECONDS = 60.0
PROBE_SECONDS = 5.0
RESTART_PAUSE_SECONDS = (0.1, 1.0, 5.0, 30.0)
OWNER_POLL_SECONDS = 0.5
LOG_POLL_SECONDS = 60.0
SHARED_BUFFERS_MOST = 1 << 30
DATABASE = "indexer"

log = structlog.get_logger(__name__)


@asynccontextmanager
async def database(url: str | None, data_dir: Path, settings: Mapping[str, str] | None = None) -> AsyncIterator[str]:
    """A DSN: `url` if there is one, else the embedded server's, which runs for as long as the block does.

    If another process of ours runs the server already, that one is used. Raises `SettingsError` if there are no
    binaries, or none for the cluster's version, `UnavailableError` for a server that doesn't start, and `OSError`
    for a data directory that can't be used.
    """
    if url is not None:
        yield url
        return
    server = EmbeddedPostgres(data_dir / "postgres", settings or {})
    await server.start()
    keeper = asyncio.create_task(server.keep_alive(), name="postgres")
    try:
        yield server.dsn
    finally:
        keeper.cancel()
        try:
            await asyncio.wait([keeper])
        finally:
            await server.stop()
    if not keeper.cancelled():
        keeper.result()


class EmbeddedPostgres:
    """One server on the cluster in `directory`. `settings` are Postgres's own, over ours."""

    def __init__(self, directory: Path, settings: Mapping[str, str]) -> None:
        self._cluster = Cluster(directory)
        self._settings = {**_default_settings(), **settings, "listen_addresses": "", "port": str(PORT)}
        self._owned = False
        self._process: Process | None = None

    @property
    def dsn(self) -> str:
        return f"postgresql://postgres@/{DATABASE}?host={quote(str(self._cluster.socket))}&port={PORT}"

    async def start(self) -> None:
        """Waits until a server answers: one that this process starts, or another process's."""
        async with _patience(f"no answer from the server that another process runs in {self._cluster.directory}"):
            while not self._own():
                if await self._answers(DATABASE):
                    return
                await asyncio.sleep(POLL_SECONDS)
        try:
            await self._launch()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stops the server, if it is ours, rolling back what is open; leaves the cluster to the next."""
        try:
            if self._process is not None and self._process.returncode is None:
                await self._end(self._process)
        finally:
            self._cluster.disown()
            self._owned = False

    async def keep_alive(self) -> None:
        """Starts the server again whenever it ends, be it by itself or with its owner; runs until cancelled."""
        failures = 0
        while True:
            await self._until_down()
            await asyncio.sleep(RESTART_PAUSE_SECONDS[min(failures, len(RESTART_PAUSE_SECONDS) - 1)])
            try:
                await self._launch()
            except (OSError, UnavailableError, SettingsError) as error:
                failures += 1
                log.error("postgres.not-restarted", error=str(error))  # noqa: TRY400 - the error says it all
            else:
                failures = 0
                log.info("postgres.restarted")

    async def _until_down(self) -> None:
        """Returns when there is no server, and it is ours to start one."""
        while not self._own():  # noqa: ASYNC110 - a lock given back by another process sends us no event
            await asyncio.sleep(OWNER_POLL_SECONDS)
        while self._process is not None:
            with contextlib.suppress(TimeoutError):
                code = await asyncio.wait_for(self._process.wait(), LOG_POLL_SECONDS)
                log.error("postgres.ended", code=code, log=str(self._cluster.log))
                return
            self._cluster.bound_log()

    def _own(self) -> bool:
        self._owned = self._owned or self._cluster.own()
        return self._owned

    async def _launch(self) -> None:
        """Starts the server and waits until it answers."""
        options = [word for name, value in self._settings.items() for word in ("-c", f"{name}={value}")]
        async with _patience(f"no end of an earlier server, or no start of a new one: see {self._cluster.log}"):
            async with self._cluster.opened() as open_:
                self._process = await self._cluster.serve(open_, options)
            while not await self._answers("postgres"):
                if self._process.returncode is not None:
                    words = " ".join(self._cluster.log.read_text(errors="replace").splitlines()[-3:])
                    raise UnavailableError(FetchFailure.UNREACHABLE, f"the embedded Postgres ended: {words}")
                await asyncio.sleep(POLL_SECONDS)
        await self._create_database()

    async def _end(self, process: Process) -> None:
        process.send_signal(signal.SIGINT)
        try:
            await asyncio.wait_for(process.wait(), STOP_SECONDS)
        except TimeoutError:
            log.exception("postgres.killed")
            process.kill()
            await process.wait()

    async def _answers(self, name: str) -> bool:
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
        return await asyncpg.connect(host=socket, port=PORT, user="postgres", database=name, timeout=PROBE_SECONDS)


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
        "max_connections": "300",  # some twenty processes at their defaults, and readers
        "max_wal_size": "4GB",
        "checkpoint_timeout": "15min",
        "wal_compression": "off",  # the wheel has pglz only, which halves the write rate
        "timezone": "UTC",
        "log_timezone": "UTC",
    }
