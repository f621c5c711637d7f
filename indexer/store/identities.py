"""The table of identities: the contents of DID documents, and the queue of handles to verify."""

from collections.abc import Mapping, Sequence

from indexer.store.change_log import log_changes
from indexer.store.columns import Connection, buckets_of, columns_of, of_buckets, storable, unnest
from indexer.sync.changes import ChangeLogEntry
from indexer.sync.shard import bucket_of
from indexer.sync.stored_identity import INVALID_HANDLE, HandleCheck, HandleClaim, StoredIdentity

_COLUMNS = {
    "did": "text",
    "bucket": "smallint",
    "claimed_handle": "text",
    "pds": "text",
    "signing_key": "text",
    "fetched_at": "float8",
    "stale": "boolean",
    "problem": "text",
}

_LOAD = """
    select did, claimed_handle as handle, pds, signing_key, date_part('epoch', fetched_at) as fetched_at, stale, problem
    from indexer.identity where did = any($1::text[]) and bucket = any($2::smallint[])
"""

# If the claim is unchanged and verified, keep the time of its next check. If it is unchanged but not verified, check it
# now: the document may have been read because something changed.
_SAME_CLAIM = "i.claimed_handle is not distinct from excluded.claimed_handle"
_SAVE = f"""
    with before as materialized (
        select did, bucket, pds from indexer.identity
        where did = any($1::text[]) and bucket = any($2::smallint[])
    ), saved as (
        insert into indexer.identity as i (
            did, bucket, claimed_handle, pds, signing_key, fetched_at, stale, problem,
            handle, handle_attempts, handle_due_at
        )
        select did, bucket, claimed_handle, pds, signing_key, to_timestamp(fetched_at), stale, problem,
            case when claimed_handle is null then '{INVALID_HANDLE}' end, 0,
            case when claimed_handle is not null then now() end
        from {unnest(_COLUMNS, "w")} order by ordinal
        on conflict (did, bucket) do update
        set claimed_handle = excluded.claimed_handle, pds = excluded.pds, signing_key = excluded.signing_key,
            fetched_at = excluded.fetched_at, stale = excluded.stale, problem = excluded.problem,
            handle = case when {_SAME_CLAIM} then i.handle else excluded.handle end,
            handle_attempts = case when {_SAME_CLAIM} then i.handle_attempts else 0 end,
            handle_due_at = case when {_SAME_CLAIM} and i.handle = i.claimed_handle then i.handle_due_at
                else excluded.handle_due_at end
        where i.fetched_at <= excluded.fetched_at
        returning did, bucket, pds
    )
    select did from saved join before using (did, bucket) where saved.pds <> before.pds order by did
"""

CLAIM_HANDLES = f"""
    with due as materialized (
        select did, handle_due_at from indexer.identity
        where bucket = any($1::smallint[]) and handle_due_at <= to_timestamp($3)
        order by handle_due_at desc limit $2
    )
    update indexer.identity i set handle_due_at = to_timestamp($4)
    from (select * from due order by did) d
    where i.did = d.did and {of_buckets("i", 5)} and i.handle_due_at is not distinct from d.handle_due_at
    returning i.did, i.claimed_handle as claimed, i.handle as known, i.handle_attempts as attempts
"""
"""Takes buckets, count, the present time, the end of the lease, and the buckets again.

The handles that became due last come first, so that new handles do not wait for a backlog. Rows are locked in the order
of DIDs, as in all statements. Of two concurrent claims the second one finds that `handle_due_at` changed. IS NOT
DISTINCT, because no index supports it: thousands of rows may share one time.
"""

_SAVE_HANDLE_CHECK = """
    update indexer.identity
    set handle = $4, handle_attempts = $5, handle_due_at = to_timestamp($6::float8)
    where did = $1 and bucket = $2 and claimed_handle is not distinct from $3
"""

# A handle resolves to one DID, so other accounts for which it was verified before must be checked again.
_RECHECK_OTHERS = f"""
    update indexer.identity set handle_due_at = now()
    where handle = $2 and handle <> '{INVALID_HANDLE}' and did <> $1
"""

_STALE = "select did from indexer.identity where stale and bucket = any($1::smallint[]) order by fetched_at limit $2"

# Two accounts may have the handle until the earlier one is checked again.
_DID_OF_HANDLE = f"""
    select did from indexer.identity where handle = $1 and handle <> '{INVALID_HANDLE}'
    order by handle_due_at desc limit 1
"""


async def load_identities(connection: Connection, dids: Sequence[str]) -> Mapping[str, StoredIdentity]:
    """Return the stored identities by DID; unknown DIDs are left out."""
    rows = await connection.fetch(_LOAD, list(dids), buckets_of(dids))
    return {row["did"]: StoredIdentity(**row) for row in rows}


async def save_identities(connection: Connection, identities: Sequence[StoredIdentity]) -> None:
    """Store identities, unless a later reading is stored. Of several for one DID the last one is stored.

    Logs a change for each account that has another PDS. Run it in a transaction.
    """
    latest = {identity.did: identity for identity in identities}
    rows = [
        (
            did,
            bucket_of(did),
            storable(identity.handle),
            storable(identity.pds),
            storable(identity.signing_key),
            identity.fetched_at,
            identity.stale,
            storable(identity.problem),
        )
        for did, identity in sorted(latest.items())
    ]
    moved = await connection.fetch(_SAVE, *columns_of(rows, _COLUMNS))
    await log_changes(connection, [ChangeLogEntry(did, "moved", None, live=True) for (did,) in moved])


async def claim_handles(
    connection: Connection, count: int, buckets: range, lease_until: float, now: float
) -> list[HandleClaim]:
    """Claim at most `count` handles that are due to be checked, with leases until `lease_until`."""
    rows = await connection.fetch(CLAIM_HANDLES, list(buckets), count, now, lease_until, list(buckets))
    return [HandleClaim(**row) for row in rows]


async def save_handle_check(connection: Connection, check: HandleCheck) -> None:
    """Store the result of a check, unless the account claims another handle now. Run it in a transaction."""
    claim = check.claim
    await connection.execute(
        _SAVE_HANDLE_CHECK, claim.did, bucket_of(claim.did), claim.claimed, check.handle, check.attempts, check.due_at
    )
    if check.handle is not None and check.handle == claim.claimed != claim.known:
        await connection.execute(_RECHECK_OTHERS, claim.did, check.handle)


async def stale_identities(connection: Connection, buckets: range, limit: int) -> list[str]:
    """Return DIDs whose document is known to have changed since it was read, longest ago first."""
    return [row["did"] for row in await connection.fetch(_STALE, list(buckets), limit)]


async def did_of_handle(connection: Connection, handle: str) -> str | None:
    """Return the DID for which the handle was verified; None if there is none."""
    did: str | None = await connection.fetchval(_DID_OF_HANDLE, handle)
    return did
