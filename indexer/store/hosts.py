"""The table of hosts: how each of them has answered, and its pause, so that no restart forgets it.

Several processes may share it: their requests add up, and of a host's state the last one's word counts.
"""

from collections.abc import Sequence

import asyncpg

from indexer.outbound import HostState
from indexer.outbound.hosts import MOST_HOSTS
from indexer.reasons import FetchFailure
from indexer.store.rows import Connection, columns_of, plain, unnest

WORST = 10
_BROKEN_SECONDS = 86_400.0  # after so long, nothing follows from a row of failures

_COLUMNS = {
    "host": "text",
    "requests": "bigint",
    "failures": "bigint",
    "streak": "integer",
    "paused_until": "float8",
    "pause_reason": "text",
    "last_error": "text",
    "last_success": "float8",
}
_REASONS = {str(reason): reason for reason in FetchFailure}
_TIMES = ("paused_until", "last_success")
_READ = ", ".join(f"date_part('epoch', {name}) as {name}" if name in _TIMES else name for name in _COLUMNS)

_SAVE = f"""
    insert into indexer.host as h ({", ".join(_COLUMNS)}, updated_at)
    select host, requests, failures, streak, to_timestamp(paused_until), pause_reason, last_error,
        to_timestamp(last_success), now()
    from {unnest(_COLUMNS, "w")} order by place
    on conflict (host) do update
    set requests = h.requests + excluded.requests, failures = h.failures + excluded.failures,
        streak = excluded.streak, paused_until = excluded.paused_until, pause_reason = excluded.pause_reason,
        last_error = coalesce(excluded.last_error, h.last_error),
        last_success = greatest(excluded.last_success, h.last_success), updated_at = excluded.updated_at
    returning xmax = 0 as inserted
"""

# As in memory: those without a pause go first, the longest unused before others.
_FORGET = """
    delete from indexer.host where host in (
        select host from indexer.host order by greatest(paused_until, now()) desc, updated_at desc offset $1
    )
"""

_LOAD = f"""
    select {_READ} from indexer.host
    where paused_until > now() or (streak > 0 and updated_at > now() - make_interval(secs => $1))
"""

_WORST = f"""
    select {_READ} from indexer.host where paused_until > now() order by streak desc, paused_until desc limit $1
"""


async def save(connection: Connection, states: Sequence[HostState]) -> None:
    """Adds their requests and failures; the table stays at `MOST_HOSTS` rows."""
    rows = [
        (
            state.host,
            state.requests,
            state.failures,
            state.streak,
            state.paused_until,
            state.pause_reason,
            plain(state.last_error),
            state.last_success,
        )
        for state in sorted(states, key=lambda state: state.host)
    ]
    saved = await connection.fetch(_SAVE, *columns_of(rows, _COLUMNS))
    if any(row["inserted"] for row in saved):
        await connection.execute(_FORGET, MOST_HOSTS)


async def load(connection: Connection) -> list[HostState]:
    """Those that are paused, or failed when they were last asked."""
    return [_state(row) for row in await connection.fetch(_LOAD, _BROKEN_SECONDS)]


async def worst(connection: Connection) -> list[HostState]:
    """A few of those that are paused, the most broken first."""
    return [_state(row) for row in await connection.fetch(_WORST, WORST)]


def _state(row: asyncpg.Record) -> HostState:
    reason = row["pause_reason"]
    return HostState(**{**row, "pause_reason": None if reason is None else _REASONS[reason]})
