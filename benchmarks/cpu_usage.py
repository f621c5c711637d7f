"""CPU time and memory of processes, from Linux's /proc."""

import os
from collections.abc import Iterable
from pathlib import Path

import asyncpg

_TICKS = os.sysconf("SC_CLK_TCK")
# Indexes of fields of /proc/PID/stat after the command: ppid; utime and stime, also of the reaped children.
_PARENT, _TIMES = 1, slice(11, 15)

_BACKENDS = """
    select pid from pg_stat_activity
    where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid()
"""


def cpu_seconds(roots: Iterable[int]) -> float:
    """Return the user and system time of processes and all their descendants, including ended ones."""
    stats = _stats()
    family = set(roots) & stats.keys()
    while more := {pid for pid, fields in stats.items() if int(fields[_PARENT]) in family} - family:
        family |= more
    return sum(int(ticks) for pid in family for ticks in stats[pid][_TIMES]) / _TICKS


async def backend_pids(dsn: str) -> list[int]:
    """Return the Postgres processes of all connections to this database, except the one that asks."""
    connection = await asyncpg.connect(dsn)
    rows = await connection.fetch(_BACKENDS)
    await connection.close()
    return [row["pid"] for row in rows]


def backend_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time of single-threaded processes, with nanosecond resolution."""
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in pids) / 1e9


def parent_pid(pid: int) -> int:
    """Return the parent of a process."""
    return int(_stats()[pid][_PARENT])


def reset_peak_rss(pid: int) -> None:
    """Let `peak_rss` begin again at the present size."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_rss(pid: int) -> int:
    """Return the peak resident set size of a process, in bytes: since its start, or the last `reset_peak_rss`."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(pid)


def _stats() -> dict[int, list[str]]:
    stats = {}
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                stat = (directory / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):  # the process has ended meanwhile
                continue
            stats[int(directory.name)] = stat.rpartition(") ")[2].split()
    return stats
