"""Run the daemon as one process, or as several processes that share its part of the accounts.

The first SIGTERM or SIGINT drains the daemon. The process ends within `INDEXER_STOP_TIMEOUT`. A second signal ends it
at once.

With `indexer run --processes N`, each process has its own port and consumes the whole stream. A process that ends is
restarted and continues from its cursor. Signals are passed on to the processes: they are not in the process group that
a terminal sends Ctrl-C to. If their parent ends at once, at a second signal or because it was killed, the kernel sends
a signal to the processes, and they drain and end.
"""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, closing
from functools import partial
from math import ceil
from pathlib import Path

import structlog

from indexer import __version__
from indexer.app.clients import core_of
from indexer.app.daemon import open_daemon
from indexer.app.process_setup import (
    PARENT_ENDED,
    StopRequest,
    available_cores,
    raise_file_limit,
    stop_on_signals,
    tune_garbage_collector,
)
from indexer.app.setting_types import MAX_PORT
from indexer.app.settings import Settings, variable
from indexer.app.tuning import Tuning
from indexer.cluster.tables import on_all_nodes
from indexer.concurrency.event_wait import wait_for_event
from indexer.db import DatabaseError
from indexer.db.migrate import prepare_database, start_pause
from indexer.embedded import database, postgres_stage
from indexer.embedded.server_parent import end_with_parent
from indexer.errors import SettingsError
from indexer.net.server.address import Address
from indexer.serve.health import Listener
from indexer.sync.shard import BUCKETS
from indexer.telemetry.metrics import Metrics

MIN_RESTART_SECONDS, MAX_RESTART_SECONDS = 1.0, 60.0
"""Pause before a process is restarted. It doubles each time."""
STOP_TIMEOUT_SHARE = 0.9
"""The part of `INDEXER_STOP_TIMEOUT` that the processes have, so that their parent can end after them."""
BAD_SETTINGS = 2
"""The exit code of a process that the operator has to correct something for."""

log = structlog.get_logger(__name__)


Preparation = Callable[[str], Awaitable[Settings]]
"""Prepares the database at a URL, and returns the settings to run with, which choose a scope unless one is stored."""


async def run(
    settings: Settings, *, migrate_first: bool = True, tuning: Tuning | None = None, prepare: Preparation | None = None
) -> int:
    """Run the daemon until a signal arrives, and return the exit code. `tuning`: see `open_daemon`.

    Raises:
        NoScopeError: Neither the settings, nor the database, nor `prepare` says what to index. Nothing was changed.
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
                daemon, attempts = None, 0
                chosen = settings.chooses_scope or prepare is not None
                while not daemon and await prepare_database(
                    dsn, stop, migrate_first=migrate_first, changing=on_all_nodes, scope_chosen=chosen
                ):
                    attempts += 1
                    try:
                        settings = await prepare(dsn) if prepare else settings
                        opened = open_daemon(settings, dsn, metrics, [postgres], core, tuning)
                        daemon = await stack.enter_async_context(opened)
                    except DatabaseError as error:
                        log.warning("database.waiting", error=error.detail)
                        await wait_for_event(stop, start_pause(attempts, dsn))
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


async def run_several(
    settings: Settings,
    processes: int,
    config: Path | None,
    *,
    migrate_first: bool = True,
    prepare: Preparation | None = None,
) -> int:
    """Run so many processes until a signal arrives, and return the highest exit code.

    Raises:
        NoScopeError: See `run`.
        SettingsError: There are more processes than buckets, a port is in use, or the operator has to correct
            something about the database.
    """
    shards = settings.shard.count * processes
    if shards > BUCKETS:
        needed = f"{processes} processes for shard {settings.shard} need {shards} shards"
        raise SettingsError(f"--processes: {needed}; the maximum is {BUCKETS}")
    await _require_free_ports(settings.http_bind, processes)
    stop = StopRequest()
    url = settings.database_url.get_secret_value() if settings.database_url else None
    with stop_on_signals(stop, settings.stop_timeout):
        async with database(url, settings.data_dir) as dsn:
            chosen = settings.chooses_scope or prepare is not None
            if not await prepare_database(
                dsn, stop, migrate_first=migrate_first, changing=on_all_nodes, scope_chosen=chosen
            ):
                return 0
            settings = await prepare(dsn) if prepare else settings
            stop.step = "wait for the daemon processes"
            environments = [process_environment(settings, index, processes) for index in range(processes)]
            codes = await asyncio.gather(
                *(_supervise(index, own, config, stop) for index, own in enumerate(environments))
            )
            stop.step = "end the use of the database"
    return max(1 if code < 0 else code for code in codes)


async def _require_free_ports(bind: Address, processes: int) -> None:
    """Raise `SettingsError` if a process could not serve at its port: before the schema is upgraded."""
    if bind.port + processes - 1 > MAX_PORT:
        raise SettingsError(f"--processes: {processes} processes from port {bind.port} need ports above {MAX_PORT}")
    for index in range(processes if bind.port else 0):
        with closing(Listener(bind._replace(port=bind.port + index))) as listener:
            await listener.bind()


def process_environment(settings: Settings, index: int, processes: int) -> dict[str, str]:
    """Return the variables of one process: shard, port, its share of threads and rates, and settings of `--lexicon`."""
    address = settings.http_bind
    scope = settings.first_scope
    own = {
        "shard": settings.shard.subshard(index, processes),
        "http_bind": address._replace(port=address.port + index if address.port else 0),
        "verify_threads": ceil((settings.verify_threads or available_cores()) / processes),
        "plc_rate": settings.plc_rate / processes,
        "host_rate": settings.host_rate / processes,
        "host_concurrency": ceil(settings.host_concurrency / processes),
        "handle_rate": settings.handle_rate / processes,
        "outbound_rate": settings.outbound_rate / processes,
        "stop_timeout": settings.stop_timeout * STOP_TIMEOUT_SHARE,
        "upstream": settings.upstream if "upstream" in settings.model_fields_set else "",
        "track": scope.track if settings.chooses_scope else "",
        "collections": "" if scope.collections.matches_all else scope.collections,
        "signal_collections": scope.signal_collections or "",
    }
    return {variable(name): str(value) for name, value in own.items()}


async def _supervise(index: int, environment: Mapping[str, str], config: Path | None, stop: asyncio.Event) -> int:
    """Run one process, again when it ends, until `stop` is set, and return the last exit code.

    If the process rejects its settings, set `stop`: a restart would end the same way.
    """
    pause = MIN_RESTART_SECONDS
    while True:
        code = await _run_child(index, environment, config, stop)
        if code == BAD_SETTINGS:
            stop.set()
        if not stop.is_set():
            log.error("process.ended", process=index, code=code, pause=pause)
            await wait_for_event(stop, pause)
        if stop.is_set():
            return code
        pause = min(2 * pause, MAX_RESTART_SECONDS)


async def _run_child(index: int, environment: Mapping[str, str], config: Path | None, stop: asyncio.Event) -> int:
    """Run one process until it ends, and let it drain when `stop` is set; return its exit code."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "indexer", *(("--config", str(config)) if config else ()), "run", "--no-migrate"),
        env=os.environ | environment,
        process_group=0,
        preexec_fn=partial(end_with_parent, PARENT_ENDED),
    )
    log.info("process.started", process=index, pid=process.pid)
    ended, stopped = asyncio.create_task(process.wait()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([ended, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            process.terminate()
        return await ended
    finally:
        stopped.cancel()
        if process.returncode is None:
            process.kill()
            await process.wait()
