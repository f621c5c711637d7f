"""The reports of the processes of the daemon about themselves, for `indexer status`.

A row is valid as long as the session that wrote it exists. So it says at once that a process has ended, however it did.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from indexer.db.columns import Connection

# As in `shard_lock`: the start of a session of another role may be hidden (null).
_OF_SESSION = "a.pid = p.pid and a.usesysid = p.role and coalesce(a.backend_start, p.started_at) = p.started_at"

_FORGET_ENDED = f"""
    delete from indexer.process_report p where not exists (select from pg_stat_activity a where {_OF_SESSION})
"""

_SAVE = """
    insert into indexer.process_report as p
        (pid, role, started_at, roles, first_bucket, last_bucket, owns, reported_at, reasons)
    select a.pid, a.usesysid, a.backend_start, $1, $2, $3, $4, clock_timestamp(), $5
    from pg_stat_activity a where a.pid = pg_backend_pid()
    on conflict (pid) do update set
        role = excluded.role, started_at = excluded.started_at, roles = excluded.roles,
        first_bucket = excluded.first_bucket, last_bucket = excluded.last_bucket,
        owns = excluded.owns, reported_at = excluded.reported_at, reasons = excluded.reasons
"""

_LOAD = f"""
    select p.roles, p.first_bucket, p.last_bucket, p.owns, p.reasons,
        date_part('epoch', clock_timestamp() - p.reported_at) as age
    from indexer.process_report p
    where exists (select from pg_stat_activity a where a.datname = current_database() and {_OF_SESSION})
    order by p.first_bucket, p.last_bucket, not p.owns, p.pid
"""


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """The state of one process of the daemon.

    Attributes:
        roles: Its roles.
        positions: The positions of its shard (`indexer.sync.shard`).
        owns: False while a process with the role `live` waits for its shard.
        reasons: The reasons of `/readyz`, as JSON objects.
        age: Seconds since it reported this.
    """

    roles: Sequence[str]
    positions: range
    owns: bool
    reasons: Sequence[Mapping[str, Any]]
    age: float = 0.0


async def forget_ended(connection: Connection) -> None:
    """Delete the rows of sessions that have ended."""
    await connection.execute(_FORGET_ENDED)


async def save(connection: Connection, report: ProcessReport) -> None:
    """Store the report of the process that owns the connection."""
    positions = report.positions
    reasons = json.dumps([dict(reason) for reason in report.reasons])
    await connection.execute(_SAVE, list(report.roles), positions[0], positions[-1], report.owns, reasons)


async def load(connection: Connection) -> list[ProcessReport]:
    """Return the reports of all processes whose session exists, by position."""
    return [
        ProcessReport(
            tuple(row["roles"]),
            range(row["first_bucket"], row["last_bucket"] + 1),
            row["owns"],
            json.loads(row["reasons"]),
            max(0.0, row["age"]),
        )
        for row in await connection.fetch(_LOAD)
    ]
