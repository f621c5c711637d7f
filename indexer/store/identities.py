"""The table of identities."""

from collections.abc import Mapping, Sequence

from indexer.store.feed import log_changes
from indexer.store.rows import Connection, buckets_of, columns_of, of_buckets, plain, unnest
from indexer.sync.feed import Change
from indexer.sync.identity import INVALID_HANDLE, HandleCheck, HandleClaim, StoredIdentity
from indexer.sync.shard import bucket_of

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

# The same claim again is checked at once if it doesn't hold so far, for that may be what has changed.
_SAME = "i.claimed_handle is not distinct from excluded.claimed_handle"
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
        from {unnest(_COLUMNS, "w")} order by place
        on conflict (did, bucket) do update
        set claimed_handle = excluded.claimed_handle, pds = excluded.pds, signing_key = excluded.signing_key,
            fetched_at = excluded.fetched_at, stale = excluded.stale, problem = excluded.problem,
            handle = case when {_SAME} then i.handle else excluded.handle end,
            handle_attempts = case when {_SAME} then i.handle_attempts else 0 end,
            handle_due_at = case when {_SAME} and i.handle = i.claimed_handle then i.handle_due_at
                else excluded.handle_due_at end
        where i.fetched_at <= excluded.fetched_at
        returning did, bucket, pds
    )
    select did from saved join before using (did, bucket) where saved.pds <> before.pds order by did
"""

# The last to become due first, so that what is new waits for no backlog. Of two at the same moment one finds that the
# time has moved. By DID, as all take their locks; IS NOT DISTINCT, which no index knows, as thousands may share a time.
_CLAIM_HANDLES = f"""
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

_SAVE_CHECK = """
    update indexer.identity
    set handle = $4, handle_attempts = $5, handle_due_at = to_timestamp($6::float8)
    where did = $1 and bucket = $2 and claimed_handle is not distinct from $3
"""

# A handle leads to one DID: others that it once held for are due.
_CONTEST = f"""
    update indexer.identity set handle_due_at = now()
    where handle = $2 and handle <> '{INVALID_HANDLE}' and did <> $1
"""

_STALE = "select did from indexer.identity where stale and bucket = any($1::smallint[]) order by fetched_at limit $2"

# Until another that it once held for is checked again, there may be two.
_DID_OF_HANDLE = f"""
    select did from indexer.identity where handle = $1 and handle <> '{INVALID_HANDLE}'
    order by handle_due_at desc limit 1
"""


async def load(connection: Connection, dids: Sequence[str]) -> Mapping[str, StoredIdentity]:
    rows = await connection.fetch(_LOAD, list(dids), buckets_of(dids))
    return {row["did"]: StoredIdentity(**row) for row in rows}


async def save(connection: Connection, identities: Sequence[StoredIdentity]) -> None:
    """What was read later stays; of several for one DID the last one counts. Within a transaction, as a repo that
    has moved to another PDS is told to readers.
    """
    latest = {identity.did: identity for identity in identities}
    rows = [
        (
            did,
            bucket_of(did),
            plain(identity.handle),
            plain(identity.pds),
            plain(identity.signing_key),
            identity.fetched_at,
            identity.stale,
            plain(identity.problem),
        )
        for did, identity in sorted(latest.items())
    ]
    moved = await connection.fetch(_SAVE, *columns_of(rows, _COLUMNS))
    await log_changes(connection, [Change(did, "moved", None, live=True) for (did,) in moved])


async def claim_handles(
    connection: Connection, count: int, buckets: range, lease_until: float, now: float
) -> list[HandleClaim]:
    """Handles that are due to be checked; until `lease_until` they are nobody else's."""
    rows = await connection.fetch(_CLAIM_HANDLES, list(buckets), count, now, lease_until, list(buckets))
    return [HandleClaim(**row) for row in rows]


async def save_check(connection: Connection, check: HandleCheck) -> None:
    """Nothing, if the account claims another handle by now. Within a transaction."""
    claim = check.claim
    await connection.execute(
        _SAVE_CHECK, claim.did, bucket_of(claim.did), claim.claimed, check.handle, check.attempts, check.due_at
    )
    if check.handle is not None and check.handle == claim.claimed != claim.known:
        await connection.execute(_CONTEST, claim.did, check.handle)


async def stale(connection: Connection, buckets: range, most: int) -> list[str]:
    """DIDs that are known to have changed since they were looked up, those first that have waited longest."""
    return [row["did"] for row in await connection.fetch(_STALE, list(buckets), most)]


async def did_of_handle(connection: Connection, handle: str) -> str | None:
    did: str | None = await connection.fetchval(_DID_OF_HANDLE, handle)
    return did
