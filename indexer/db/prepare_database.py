"""Prepare the database at the start of the daemon: wait until it answers, then migrate or check it."""

import asyncio
from itertools import count
from time import monotonic

import structlog

from indexer.db.database_errors import DatabaseError, without_password
from indexer.db.schema_version import SchemaChange, needs_upgrade, require_current_schema, require_privileges
from indexer.sync.backoff import backoff_seconds

FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.4, 12.0
"""Pauses between attempts, before the jitter of 25 %: the longest pause is 15 seconds."""
FIRST_LINE_SECONDS, LINE_SECONDS = 2.0, 10.0
"""Time until the first line about a migration that lasts, and the interval of the following ones."""

log = structlog.get_logger(__name__)


async def prepare_database(dsn: str, stop: asyncio.Event, *, migrate_first: bool, changing: SchemaChange) -> bool:
    """Wait until the database answers, and migrate it or check its version; return False if `stop` ended this.

    Args:
        dsn: The database.
        stop: Set it to end the wait. A migration that has begun is rolled back.
        migrate_first: Upgrade the schema. Otherwise this release must be able to use it as it is.
        changing: See `indexer.db.migrate.migrate`.

    Raises:
        SchemaVersionError: The schema is too old and `migrate_first` is False, or it is too new for this release.
        SettingsError: The operator has to correct the URL, the password, a privilege, or the contents of the database.
    """
    prepared = asyncio.create_task(_prepare(dsn, changing if migrate_first else None), name="prepare database")
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([prepared, stopped], return_when=asyncio.FIRST_COMPLETED)
        if prepared.done():
            prepared.result()
        return not stop.is_set()
    finally:
        prepared.cancel()
        stopped.cancel()
        await asyncio.gather(prepared, stopped, return_exceptions=True)


async def _prepare(dsn: str, changing: SchemaChange | None) -> None:
    address = without_password(dsn)
    for attempt in count(1):
        try:
            if changing is None:
                await require_current_schema(dsn)
            elif await needs_upgrade(dsn):
                await _migrate(dsn, changing)
            await require_privileges(dsn)
        except DatabaseError as error:
            if attempt == 1:
                log.warning("database.waiting", error=error.detail)
        else:
            if attempt > 1:
                log.info("database.answered", database=address, attempts=attempt)
            return
        await asyncio.sleep(start_pause(attempt, dsn))


def start_pause(attempt: int, dsn: str) -> float:
    """Return the pause in seconds after this number of attempts to start with the database."""
    return backoff_seconds(attempt, without_password(dsn), first=FIRST_PAUSE_SECONDS, maximum=MAX_PAUSE_SECONDS)


async def _migrate(dsn: str, changing: SchemaChange) -> None:
    """Upgrade the schema. Log how far it is while it lasts, and its end."""
    from indexer.db.migrate import migrate  # noqa: PLC0415 - loads SQLAlchemy and Alembic

    started = monotonic()
    applied: int = 0
    versions: int | None = None

    def on_version(now_applied: int, of_versions: int) -> None:
        nonlocal applied, versions
        applied, versions = now_applied, of_versions

    async def log_progress() -> None:
        await asyncio.sleep(FIRST_LINE_SECONDS)
        while True:
            log.info("database.migrating", applied=applied, versions=versions, seconds=round(monotonic() - started))
            await asyncio.sleep(LINE_SECONDS)

    progress = asyncio.create_task(log_progress(), name="log the progress of the migration")
    try:
        await migrate(dsn, on_version=on_version, changing=changing)
    finally:
        progress.cancel()
        await asyncio.gather(progress, return_exceptions=True)
    if versions:
        log.info("database.migrated", versions=versions, seconds=round(monotonic() - started))
