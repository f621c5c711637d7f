"""The table of hosts: request statistics and the pause of each host, so that a pause survives a restart.

Several processes share the table. Their counts are added. Of all other columns the last write wins. The ends of pauses
are times of the clocks of these processes, not of the database's.
"""

from collections.abc import Sequence
from time import time

from indexer.crash_points import crash_point
from indexer.db.columns import columns_of, select_list, stored_values, typed, unnest, values_of
from indexer.db.connections import Area
from indexer.reasons import FetchFailure
from indexer.sync.identity import MAX_HOSTS, HostState

_COLUMNS = typed(
    "host text, requests bigint, failures bigint, consecutive_failures integer, paused_until float8, "
    "pause_reason text, last_error text, last_success float8"
)
_REASONS = {str(reason): reason for reason in FetchFailure}

_SAVE = f"""
    insert into indexer.host as h ({", ".join(_COLUMNS)}, updated_at)
    select {", ".join(stored_values(_COLUMNS, "w").values())}, now() from {unnest(_COLUMNS, "w")} order by ordinal
    on conflict (host) do update
    set requests = h.requests + excluded.requests, failures = h.failures + excluded.failures,
        consecutive_failures = excluded.consecutive_failures, paused_until = excluded.paused_until,
        pause_reason = excluded.pause_reason, last_error = coalesce(excluded.last_error, h.last_error),
        last_success = greatest(excluded.last_success, h.last_success), updated_at = excluded.updated_at
    returning xmax = 0 as inserted
"""

# In the order in which `HostLimits` removes hosts from memory: hosts without a pause first, the least recently used
# before others.
_TRIM = """
    delete from indexer.host where host in (
        select host from indexer.host order by greatest(paused_until, now()) desc, updated_at desc offset $1
    )
"""

_LOAD = f"""
    select {select_list(_COLUMNS, "h")} from indexer.host h
    where paused_until > to_timestamp($1) or (consecutive_failures > 0 and updated_at > now() - interval '24 hours')
"""


class Hosts(Area):
    """The states of hosts."""

    async def load(self) -> list[HostState]:
        """Return the hosts that are paused, or whose last request failed less than a day ago."""
        rows = await self._fetch(_LOAD, time())
        return [HostState(**{**row, "pause_reason": _REASONS.get(row["pause_reason"])}) for row in rows]

    async def save(self, states: Sequence[HostState]) -> None:
        """Add requests and failures to the stored counts, and store the rest. Limits the number of rows."""
        async with self._pool.transaction() as connection:
            rows = [values_of(state, _COLUMNS) for state in sorted(states, key=lambda state: state.host)]
            saved = await connection.fetch(_SAVE, *columns_of(rows, _COLUMNS))
            if any(row["inserted"] for row in saved):
                await connection.execute(_TRIM, MAX_HOSTS)
            crash_point("hosts.saved")
