"""The session by which each process of the daemon checks the database, and reports about itself, for `indexer status`.

A row is valid as long as the session that wrote it exists. So it says at once that a process has ended, however it did.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg

from indexer.db.columns import Connection
from indexer.db.database_errors import DatabaseError, database_errors
from indexer.db.shard_lock import IS_SESSION
from indexer.reasons import FetchFailure

CHECK_TIMEOUT = 5.0
"""Seconds after which a database that has not answered counts as unavailable."""

_COLUMNS = ("role", "started_at", "roles", "first_bucket", "last_bucket", "owns", "reported_at", "reasons")
_SAVE = f"""
    with ended as (
        delete from indexer.process_report o
        where pid <> pg_backend_pid() and not exists (select from pg_stat_activity a where {IS_SESSION})
    )
    insert into indexer.process_report (pid, {", ".join(_COLUMNS)})
    select a.pid, a.usesysid, a.backend_start, $1, $2, $3, $4, clock_timestamp(), $5
    from pg_stat_activity a where a.pid = pg_backend_pid()
    on conflict (pid) do update set {", ".join(f"{name} = excluded.{name}" for name in _COLUMNS)}
"""

_LOAD = f"""
    select o.roles, o.first_bucket, o.last_bucket, o.owns, o.reasons,
        greatest(0, date_part('epoch', clock_timestamp() - o.reported_at)) as age,
        o.pid, coalesce(host(a.client_addr), 'this machine') as client,
        greatest(0, date_part('epoch', clock_timestamp() - o.started_at)) as seconds
    from indexer.process_report o join pg_stat_activity a on a.datname = current_database() and {IS_SESSION}
    order by o.first_bucket, o.last_bucket, not o.owns, o.pid
"""


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """The state of one process of the daemon.

    Attributes:
        positions: The positions of its shard (`indexer.sync.shard`).
        owns: False while a process with the role `live` waits for its shard.
        reasons: The reasons of `/readyz`, as JSON objects.
        age: Seconds since it reported this.
        pid: The session by which it reported this.
        client: The network address of the process.
        seconds: Seconds since the session began.
    """

    roles: Sequence[str]
    positions: range
    owns: bool
    reasons: Sequence[Mapping[str, Any]]
    age: float = 0.0
    pid: int = 0
    client: str = ""
    seconds: float = 0.0


@dataclass
class DatabaseCheck:
    """A session of its own, so that a check never waits for a connection of the pool."""

    _dsn: str
    _seconds: float = CHECK_TIMEOUT
    _connection: asyncpg.Connection | None = None

    async def run(self, report: ProcessReport | None = None) -> str | None:
        """Check that the database answers in time, and store the report if there is one; return the error, or None."""
        try:
            with database_errors():
                async with asyncio.timeout(self._seconds):
                    if self._connection is None:
                        settings = {"application_name": "indexer database check"}
                        self._connection = await asyncpg.connect(self._dsn, server_settings=settings)
                    if report is None:
                        await self._connection.execute("select 1")
                    else:
                        await _save(self._connection, report)
        except DatabaseError as error:
            self.close()
            return f"no answer for {self._seconds:g} s" if error.reason is FetchFailure.TIMEOUT else str(error)
        return None

    def close(self) -> None:
        """Close the connection without waiting for the server, which may not answer."""
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None


async def _save(connection: Connection, report: ProcessReport) -> None:
    positions = report.positions
    reasons = json.dumps([dict(reason) for reason in report.reasons])
    await connection.execute(_SAVE, list(report.roles), positions[0], positions[-1], report.owns, reasons)


async def load(connection: Connection) -> list[ProcessReport]:
    """Return the reports of all processes whose session exists, by position."""
    return [
        ProcessReport(tuple(roles), range(first, last + 1), owns, json.loads(reasons), *of_session)
        for roles, first, last, owns, reasons, *of_session in await connection.fetch(_LOAD)
    ]
