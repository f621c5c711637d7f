"""Sample the resources that a daemon and its database use."""

import json
import os
import stat
import sys
from asyncio import all_tasks
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic

import asyncpg
import httpx

from indexer import crash_points
from tests.soak.growth_check import Limit

Sample = dict[str, float]
"""Values by quantity."""

MIB = 1024.0 * 1024
INTERPRETER_FILE = "interpreter.json"
INTERPRETER_SECONDS = 1.0
CHANGE_LOG_TABLES = ("change", "change_batch")

# The log has one table for each segment.
_RELATIONS = """
    select coalesce(parent.relname, c.relname) as name, sum(pg_table_size(c.oid))::float8 as bytes,
        sum(pg_indexes_size(c.oid))::float8 as index_bytes
    from pg_class c
    left join pg_inherits i on i.inhrelid = c.oid left join pg_class parent on parent.oid = i.inhparent
    where c.relnamespace = 'indexer'::regnamespace and c.relkind = 'r' group by 1
"""
_CONNECTIONS = """
    select count(*)::float8 from pg_stat_activity
    where datname = current_database() and backend_type = 'client backend' and application_name <> $1
"""

PROCESS_LIMITS = {
    "memory (RSS)": Limit(16 * MIB, 0.1),
    "memory blocks of Python": Limit(40_000, 0.1),
    "file descriptors": Limit(8, 0.1),
    "threads": Limit(4, 0.1),
    "tasks": Limit(8, 0.1),
    "spool bytes": Limit(4 * MIB, 0.1),
    "queued bytes": Limit(MIB, 0.1),
    "metric series": Limit(50, 0.1),
}
"""Of the daemon that is never killed."""
DATABASE_LIMITS = {
    "connections": Limit(10, 0.1),  # idle ones are closed: there were 9 to 28 in a run without a leak
    "bytes of the change log": Limit(MIB, 0.2),
    "bytes of the database": Limit(16 * MIB, 0.1),
    # A batch may have hundreds of rejected messages, which need space until all but the newest ones are deleted.
    "bytes of dead_letter": Limit(8 * MIB, 0.1),
    # It grows to 1.8 MB, until autovacuum begins after 10,000 deleted rows: about once an hour in a soak.
    "bytes of buffered_event": Limit(3 * MIB, 0.1),
}
TABLE_BYTES = Limit(MIB, 0.2)
TABLE_ROWS = Limit(200, 0.2)


def report_interpreter() -> None:
    """Let this process, a daemon, write what only it knows to a file of its data directory, again and again."""
    file = Path(os.environ["INDEXER_DATA_DIR"], INTERPRETER_FILE)
    next_report = monotonic()

    def report(point: str) -> None:
        nonlocal next_report
        if point == "batch.settled" and monotonic() >= next_report:  # in the thread of the event loop
            next_report = monotonic() + INTERPRETER_SECONDS
            counts = {"tasks": len(all_tasks()), "memory blocks of Python": sys.getallocatedblocks()}
            new = file.with_suffix(".new")
            new.write_text(json.dumps(counts))
            new.replace(file)

    crash_points.hooks.append(report)


def process_sample(pid: int, directory: Path) -> Sample:
    """Return what a daemon with this data directory uses."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    sample = {
        "memory (RSS)": int(status["VmRSS"].split()[0]) * 1024.0,
        "threads": float(status["Threads"]),
        "file descriptors": float(len(list(Path(f"/proc/{pid}/fd").iterdir()))),
        "spool bytes": _spool_bytes(pid, directory),
    }
    with suppress(FileNotFoundError):  # no batch has been written yet
        sample |= json.loads((directory / INTERPRETER_FILE).read_text())
    return sample


async def metrics_sample(client: httpx.AsyncClient, health_url: str) -> Sample:
    """Return what a daemon shows of itself."""
    page = (await client.get(f"{health_url}/metrics")).text
    series = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    return {"queued bytes": float(series["indexer_queue_bytes"]), "metric series": float(len(series))}


async def database_sample(connection: asyncpg.Connection, observer: str) -> Sample:
    """Return the use of the database. `observer` is the application name of connections that do not count."""
    sample: Sample = {
        "connections": await connection.fetchval(_CONNECTIONS, observer),
        "bytes of the database": await connection.fetchval("select pg_database_size(current_database())::float8"),
        "bytes of the change log": 0.0,
    }
    for name, size, index_size in await connection.fetch(_RELATIONS):
        if name in CHANGE_LOG_TABLES:
            sample["bytes of the change log"] += size + index_size
        else:
            sample[f"bytes of {name}"] = size
            sample[f"bytes of indexes of {name}"] = index_size
            rows = f"select count(*)::float8 from indexer.{name}"  # noqa: S608 - the catalog has the name
            sample[f"rows of {name}"] = await connection.fetchval(rows)
    return sample


def limits_of(sample: Mapping[str, float]) -> dict[str, Limit]:
    """Return the limits of all quantities of a sample that have one."""
    limits = PROCESS_LIMITS | DATABASE_LIMITS
    for name in sample:
        if name.startswith("rows of "):
            limits[name] = TABLE_ROWS
        elif name.startswith("bytes of ") and name not in limits:
            limits[name] = TABLE_BYTES
    return limits


def _spool_bytes(pid: int, directory: Path) -> float:
    """Return the size of the files without a name that a process has open, and of those in its data directory."""
    unnamed = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            found = descriptor.stat()
            unnamed += found.st_size if stat.S_ISREG(found.st_mode) and found.st_nlink == 0 else 0
    files = [file for file in directory.iterdir() if file.is_file() and file.name != "daemon.log"]
    return float(unnamed + sum(file.stat().st_size for file in files))
