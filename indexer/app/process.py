"""Run the daemon as a process: prepare its database, run it until a signal arrives, and end.

The first SIGTERM or SIGINT drains the daemon. The process ends within `INDEXER_STOP_TIMEOUT`. A second signal ends it
at once.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, closing, suppress
from functools import partial

import structlog

from indexer import __version__
from indexer.app.clients import core_of
from indexer.app.daemon import Daemon, open_daemon
from indexer.app.process_setup import StopRequest, raise_file_limit, stop_on_signals, tune_garbage_collector
from indexer.app.settings import Settings
from indexer.app.tuning import Tuning
from indexer.db import DatabaseError
from indexer.db.prepare_database import prepare_database, start_pause
from indexer.embedded import database, postgres_stage
from indexer.serve.health import Listener
from indexer.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)


async def run(settings: Settings, *, migrate_first: bool = True, tuning: Tuning | None = None) -> int:
    """Run the daemon until a signal arrives, and return the exit code. `tuning`: see `open_daemon`.

    Raises:
        SchemaVersionError: This release cannot use the version of the database schema.
        SettingsError: The operator has to correct the address of the HTTP server, the URL of the database, its
            password, or a privilege, or to install the native core.
    """
    stop, core = StopRequest(), core_of(settings)
    raise_file_limit()
    url = settings.database_url.get_secret_value() if settings.database_url else None
    metrics, postgres = Metrics(), postgres_stage()
    listener = Listener(settings.http_bind)
    await listener.bind()  # before the schema is upgraded: a port in use is the operator's to correct
    with stop_on_signals(stop, settings.stop_timeout), closing(listener):
        async with database(url, settings.data_dir, on_restart=metrics.postgres_restarts.inc, stage=postgres) as dsn:
            async with AsyncExitStack() as stack:
                opened = partial(open_daemon, settings, dsn, metrics, [postgres], core, tuning)
                daemon = await _open_when_available(stack, opened, dsn, stop, migrate_first=migrate_first)
                if daemon is None:
                    log.info("daemon.stopped")
                    return 0
                address = await stack.enter_async_context(daemon.serve_http(listener))
                tune_garbage_collector()
                log.info(
                    "daemon.started",
                    health=f"http://{address}",
                    version=__version__,
                    core=f"{core.name} {core.version}",
                    threads=core.threads,
                )
                unwritten = await daemon.run(stop)
                stop.step = "close connections"
            stop.step = "stop the embedded Postgres" if url is None else stop.step
    stop.step = "end threads"
    log.info("daemon.stopped")
    return 1 if unwritten else 0


async def _open_when_available(
    stack: AsyncExitStack,
    opened: Callable[[], AbstractAsyncContextManager[Daemon]],
    dsn: str,
    stop: asyncio.Event,
    *,
    migrate_first: bool,
) -> Daemon | None:
    """Return the daemon, opened as soon as its database is prepared and answers; None if `stop` ended the wait."""
    attempt = 0
    while await prepare_database(dsn, stop, migrate_first=migrate_first):
        attempt += 1
        try:
            return await stack.enter_async_context(opened())
        except DatabaseError as error:
            log.warning("database.waiting", error=error.detail)
        with suppress(TimeoutError):
            async with asyncio.timeout(start_pause(attempt, dsn)):
                await stop.wait()
    return None
