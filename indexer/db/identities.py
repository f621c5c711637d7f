"""The table of identities: the contents of DID documents, and the queue of handles to verify."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from time import time

from indexer.crash_points import crash_point
from indexer.db.change_log import log_changes
from indexer.db.columns import Connection, buckets_of, columns_of, of_buckets, typed, unnest, values_of
from indexer.db.connections import Area
from indexer.sync.changes import ChangeLogEntry
from indexer.sync.identity import INVALID_HANDLE, DueIdentity, HandleCheck, HandleClaim, StoredIdentity
from indexer.sync.shard import bucket_of

MAX_LOCK_WAIT = 10
"""Seconds that a statement may wait for a row before its parameter for the present time is too old. It is shorter than
each postponement of a refresh."""


def _is_postponed(now: str) -> str:
    """Return the SQL condition that the refresh of identity `i` is postponed; `now` is SQL for Unix seconds.

    `refresh_at` is the time of an announcement or of a postponed refresh. An announcement is not in the future, except
    by the time that the statement has waited for the row.
    """
    return f"i.refresh_at > to_timestamp({now}::float8 + {MAX_LOCK_WAIT})"


CHANNEL = "indexer_identities"
"""The channel of notifications of changed identities. The payload has DIDs, separated by spaces."""
OLD_SECONDS = 86_400.0
"""Time after which the reading of an export is old: as `IdentityLifetimes.max_age`."""
DIDS_PER_NOTIFICATION = 200
"""Maximum number of DIDs in a notification, which has at most 8,000 bytes."""

_COLUMNS = typed(
    "did text, bucket smallint, claimed_handle text, pds text, signing_key text, fetched_at float8, stale boolean, "
    "problem text, denials integer, denied_at float8, refresh_at float8, chain bytea, handle_wanted boolean"
)

_FIELDS = ("handle", *list(_COLUMNS)[3:])
"""The fields of `StoredIdentity` that the columns after the bucket store."""

_LOAD = """
    select did, claimed_handle as handle, pds, signing_key, date_part('epoch', fetched_at) as fetched_at, stale,
        problem, denials, date_part('epoch', denied_at) as denied_at, chain,
        handle is not null or handle_due_at is not null as handle_wanted
    from indexer.identity where did = any($1::text[]) and bucket = any($2::smallint[])
"""

_WANT_HANDLES = """
    update indexer.identity set handle_due_at = now()
    where did = any($1::text[]) and bucket = any($2::smallint[]) and handle is null and handle_due_at is null
"""
# The export of another directory, or of fewer repos, was perhaps read until an earlier time, and has chains, too.
_READ_UNTIL = """
    select date_part('epoch', min(coalesce(finished_at, '-infinity'))) from indexer.crawl_progress
    where purpose = 'identities'
"""
_CHAIN = typed("did text, bucket smallint, chain bytea")
_DROP_CHAINS = f"""
    update indexer.identity i set chain = null from {unnest(_CHAIN, "w")}
    where i.did = w.did and i.bucket = w.bucket and i.chain is distinct from w.chain returning i.did
"""
_NOTIFY = f"select pg_notify('{CHANNEL}', $1)"

# A handle that becomes null is not logged: its verification follows, and is.
# If the claim is unchanged and verified, keep the time of its next check. If it is unchanged but not verified, check it
# now: the document may have been read because something changed.
_SAME_CLAIM = "i.claimed_handle is not distinct from excluded.claimed_handle"
_RENAMED = "(saved.handle is not null and saved.handle is distinct from before.handle)"
_NOW = f"${len(_COLUMNS) + 1}"
# A change was announced after the lookup asked, so the answer may be from before it (see `_MARK_STALE`).
# The time of a postponed refresh is not that of an announcement, and without a time there was no announcement. During a
# back-off the time of the latest announcement is unknown: the mark stays, and the identity is soon due once more.
_CHANGED_SINCE = f"""
    coalesce(i.stale and i.refresh_at > excluded.fetched_at and (i.refresh_failures > 0 or not {_is_postponed(_NOW)}),
        false)
"""
# The clock was set back since then: clocks of several machines differ by less.
_FROM_THE_FUTURE = f"i.fetched_at > to_timestamp({_NOW}::float8 + 3600)"
_SAVE = f"""
    with before as materialized (
        select did, bucket, pds, handle from indexer.identity
        where did = any($1::text[]) and bucket = any($2::smallint[])
    ), saved as (
        insert into indexer.identity as i (
            did, bucket, claimed_handle, pds, signing_key, fetched_at, stale, problem, denials, denied_at, refresh_at,
            handle, handle_attempts, handle_due_at, chain
        )
        select did, bucket, claimed_handle, pds, signing_key, to_timestamp(fetched_at), stale, problem,
            denials, to_timestamp(denied_at), to_timestamp(refresh_at),
            case when claimed_handle is null then '{INVALID_HANDLE}' end, 0,
            case when claimed_handle is not null and handle_wanted then to_timestamp(fetched_at) end, chain
        from {unnest(_COLUMNS, "w")}
        where not exists (select from indexer.removal v where v.target = w.did and v.action = 'redact')
        order by ordinal
        on conflict (did, bucket) do update
        set claimed_handle = excluded.claimed_handle, pds = excluded.pds, signing_key = excluded.signing_key,
            fetched_at = excluded.fetched_at, stale = excluded.stale or {_CHANGED_SINCE}, problem = excluded.problem,
            denials = excluded.denials, denied_at = excluded.denied_at,
            refresh_at = case
                when {_CHANGED_SINCE} then least(i.refresh_at, to_timestamp({_NOW}::float8 + {MAX_LOCK_WAIT}))
                else excluded.refresh_at end,
            refresh_failures = 0,
            handle = case when {_SAME_CLAIM} then i.handle else excluded.handle end,
            handle_attempts = case when {_SAME_CLAIM} then i.handle_attempts else 0 end,
            handle_due_at = case when {_SAME_CLAIM} and i.handle = i.claimed_handle then i.handle_due_at
                else excluded.handle_due_at end,
            chain = coalesce(excluded.chain, i.chain)
        where i.fetched_at <= excluded.fetched_at or {_FROM_THE_FUTURE}
        returning did, bucket, pds, handle
    )
    select did, coalesce(saved.pds <> before.pds, false) as moved, {_RENAMED} as renamed
    from saved join before using (did, bucket) where saved.pds <> before.pds or {_RENAMED} order by did
"""

# `refresh_at` is not before the latest announcement, so that a lookup that asked earlier does not remove the mark
# (`_CHANGED_SINCE`). So an announcement ends a postponement, but not the back-off after failed refreshes, which is the
# same however often the identity is announced.
_MARK_STALE = f"""
    update indexer.identity i
    set stale = true, refresh_at = case
        when i.refresh_failures > 0 then greatest(i.refresh_at, to_timestamp($3)) else to_timestamp($3)
    end
    from {unnest({"did": "text"}, "w", 2)}
    where i.did = w.did and {of_buckets("i")} and (
        not i.stale or i.refresh_at < to_timestamp($3) or i.refresh_failures = 0 and {_is_postponed("$3")}
    )
"""

_SAVE_HANDLE_CHECK = f"""
    with before as materialized (
        select did, bucket, handle from indexer.identity where did = $1 and bucket = $2
    ), saved as (
        update indexer.identity
        set handle = $4, handle_attempts = $5, handle_due_at = to_timestamp($6::float8)
        where did = $1 and bucket = $2 and claimed_handle is not distinct from $3
        returning did, bucket, handle
    )
    select {_RENAMED} from saved join before using (did, bucket)
"""

# A handle resolves to one DID, so other accounts for which it was verified before must be checked again.
_OTHERS_WITH_HANDLE = f"""
    select did from indexer.identity where handle = $2 and handle <> '{INVALID_HANDLE}' and did <> $1
"""
_RECHECK = """
    update indexer.identity set handle_due_at = to_timestamp($4) where did = $1 and bucket = $2 and handle = $3
"""

# The oldest and the newest: the oldest, so that each has its turn; the newest, so that none waits for a long queue.
_FIRST_AND_LAST = """
    (select {columns} from indexer.identity where {condition} and bucket = any($1::smallint[]) order by {at} limit $2)
    union (
        select {columns} from indexer.identity where {condition} and bucket = any($1::smallint[])
        order by {at} desc limit $2
    )
"""
DUE_IDENTITIES = _FIRST_AND_LAST.format(
    columns="did, pds, refresh_failures as failures, refresh_at",
    condition="starts_with(did, 'did:web:') = $4 and refresh_at <= to_timestamp($3)",
    at="refresh_at",
)
DUE_HANDLES = _FIRST_AND_LAST.format(
    columns="did, claimed_handle as claimed, handle as known, handle_attempts as attempts, handle_due_at",
    condition="handle_due_at <= to_timestamp($3)",
    at="handle_due_at",
)

_POSTPONE = """
    update indexer.identity set refresh_at = to_timestamp($3), refresh_failures = $4
    where did = $1 and bucket = $2 and refresh_at is not null
"""


class Identities(Area):
    """Identities and handles."""

    async def stored(self, dids: Sequence[str]) -> dict[str, StoredIdentity]:
        """Return the rows by DID; unknown DIDs are left out."""
        rows = await self._fetch(_LOAD, list(dids), buckets_of(dids))
        return {row["did"]: StoredIdentity(**row) for row in rows}

    async def load(self, dids: Sequence[str]) -> Mapping[str, StoredIdentity]:
        """Return the stored identities by DID, and let their handles be verified.

        One that equals the last verified operation counts as fetched when the export was last read. If that was long
        ago, or the import has not ended, later operations may follow: it is stale unless a lookup was later.
        """
        stored = await self.stored(dids)
        if unwanted := [did for did, identity in stored.items() if not identity.handle_wanted]:
            await self._execute(_WANT_HANDLES, unwanted, buckets_of(unwanted))
        if exported := [identity for identity in stored.values() if identity.is_exported]:
            until = await self._fetchval(_READ_UNTIL) or 0.0
            old = until < time() - OLD_SECONDS
            for one in exported:
                stale = one.stale or (old and one.fetched_at <= until)
                stored[one.did] = replace(one, fetched_at=max(one.fetched_at, until), stale=stale)
        return stored

    async def save(self, stored: Sequence[StoredIdentity]) -> None:
        """Store identities, unless a later reading is stored or the account is redacted.

        Of several for one DID the last one is stored. Logs a change for each account that has another PDS or handle.

        Rows of several parts of the layout are not locked in the order of DIDs. If several processes save the same
        identities at once, this may be a deadlock. Then one of the transactions fails, and `IdentityCache` saves its
        identities one by one.
        """
        async with self._pool.transaction() as connection:
            await save_identities(connection, stored)
            crash_point("identity.saved")

    async def listen(self, on_change: Callable[[Sequence[str] | None], None]) -> None:
        """Call a function with the DIDs of each notification of changed identities, until the connection ends.

        The first call, with None, means that earlier notifications may have been lost.
        """
        await self._pool.listen(CHANNEL, lambda text: on_change(None if text is None else text.split()))

    async def due(self, buckets: Sequence[int], limit: int, now: float, *, web: bool) -> list[DueIdentity]:
        """Return identities to refresh: those that became due first, and as many that became due last.

        At most `limit` of each; with `web` only those of did:web, otherwise only the others.
        """
        rows = await self._fetch(f"{DUE_IDENTITIES} order by refresh_at", list(buckets), limit, now, web)
        return [DueIdentity(row["did"], row["pds"], row["failures"]) for row in rows]

    async def postpone_refresh(self, did: str, until: float, failures: int) -> None:
        """Set the time of the next refresh and the number of failures, unless the identity was refreshed meanwhile."""
        await self._execute(_POSTPONE, did, bucket_of(did), until, failures)

    async def did_of_handle(self, handle: str) -> str | None:
        """Return the DID for which the handle was verified; None if there is none."""
        did: str | None = await self._fetchval("select atproto.did_of($1)", handle)
        return did

    async def due_handles(
        self, buckets: Sequence[int], limit: int, now: float
    ) -> tuple[list[HandleClaim], float | None]:
        """Return handles to verify: those that became due last, and then as many that became due first.

        At most `limit` of each. The second result is the time with which the next call continues after the former ones;
        None if all handles were returned.
        """
        rows = await self._fetch(f"{DUE_HANDLES} order by handle_due_at desc", list(buckets), limit, now)
        claims = [HandleClaim(did, claimed, known, attempts) for did, claimed, known, attempts, _ in rows]
        return claims, rows[limit - 1]["handle_due_at"].timestamp() - 1e-6 if len(rows) > limit else None

    async def save_handle_check(self, check: HandleCheck) -> None:
        """Store the result of a check, and log a change of the handle, unless the account claims another one now."""
        async with self._pool.transaction() as connection:
            claim = check.claim
            dids, renamed = [claim.did], False
            if check.handle is not None and check.handle == claim.claimed != claim.known:
                dids += [did for (did,) in await connection.fetch(_OTHERS_WITH_HANDLE, claim.did, check.handle)]
            # Rows are locked in the order of DIDs, as in all statements: `save` may write the same rows.
            for did in sorted(dids):
                if did == claim.did:
                    result = (claim.claimed, check.handle, check.attempts, check.due_at)
                    renamed = await connection.fetchval(_SAVE_HANDLE_CHECK, did, bucket_of(did), *result)
                else:
                    await connection.execute(_RECHECK, did, bucket_of(did), check.handle, time())
            if renamed:
                await log_changes(connection, [ChangeLogEntry(claim.did, "identity", None, live=True)])
            crash_point("handle.saved")


async def save_identities(connection: Connection, stored: Iterable[StoredIdentity]) -> None:
    """Store identities, and log changes, as of `Identities.save`."""
    latest = {identity.did: identity for identity in stored}
    rows = [(did, bucket_of(did), *values_of(latest[did], _FIELDS)) for did in sorted(latest)]
    saved = await connection.fetch(_SAVE, *columns_of(rows, _COLUMNS), time()) if rows else []
    changes: list[ChangeLogEntry] = []
    for did, moved, renamed in saved:
        changes += [ChangeLogEntry(did, "moved", None, live=True)] if moved else []
        changes += [ChangeLogEntry(did, "identity", None, live=True)] if renamed else []
    await log_changes(connection, changes)


async def drop_incomplete_chains(connection: Connection, stored: Iterable[StoredIdentity]) -> list[str]:
    """Remove the chains of identities that were not stored, because a later lookup was; return their DIDs.

    Otherwise such a chain would lack an operation, and count as complete.
    """
    rows = sorted((one.did, bucket_of(one.did), one.chain) for one in stored)
    return [did for (did,) in await connection.fetch(_DROP_CHAINS, *columns_of(rows, _CHAIN))] if rows else []


async def mark_stale(connection: Connection, dids: Iterable[str]) -> None:
    """Note that the identities may have changed, so that they are looked up again."""
    ordered = sorted(dids)
    await connection.execute(_MARK_STALE, buckets_of(ordered), ordered, time())


async def notify(connection: Connection, dids: Sequence[str]) -> None:
    """Notify all processes, when the transaction is committed, that these identities have changed."""
    for start in range(0, len(dids), DIDS_PER_NOTIFICATION):
        await connection.execute(_NOTIFY, " ".join(dids[start : start + DIDS_PER_NOTIFICATION]))
