"""The table of identities."""

from collections.abc import Mapping, Sequence

from indexer.store.feed import log_changes
from indexer.store.rows import Connection, buckets_of, columns_of, plain, unnest
from indexer.sync.feed import Change
from indexer.sync.identity import StoredIdentity
from indexer.sync.shard import bucket_of

_COLUMNS = {
    "did": "text",
    "bucket": "smallint",
    "handle": "text",
    "pds": "text",
    "signing_key": "text",
    "fetched_at": "float8",
    "stale": "boolean",
    "problem": "text",
}

_LOAD = f"""
    select i.did, i.handle, i.pds, i.signing_key, date_part('epoch', i.fetched_at) as fetched_at, i.stale, i.problem
    from {unnest({"did": "text", "bucket": "smallint"}, "w")}
    join indexer.identity i on i.did = w.did and i.bucket = w.bucket
"""

_SAVE = f"""
    with before as materialized (
        select did, bucket, pds from indexer.identity
        where did = any($1::text[]) and bucket = any($2::smallint[])
    ), saved as (
        insert into indexer.identity as i (did, bucket, handle, pds, signing_key, fetched_at, stale, problem)
        select did, bucket, handle, pds, signing_key, to_timestamp(fetched_at), stale, problem
        from {unnest(_COLUMNS, "w")} order by place
        on conflict (did, bucket) do update
        set handle = excluded.handle, pds = excluded.pds, signing_key = excluded.signing_key,
            fetched_at = excluded.fetched_at, stale = excluded.stale, problem = excluded.problem
        where i.fetched_at <= excluded.fetched_at
        returning did, bucket, pds
    )
    select did from saved join before using (did, bucket) where saved.pds <> before.pds order by did
"""

# More than one DID may claim a handle; the one that was read last is as good a guess as there is.
_DID_OF_HANDLE = "select did from indexer.identity where handle = $1 order by fetched_at desc limit 1"


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


async def did_of_handle(connection: Connection, handle: str) -> str | None:
    did: str | None = await connection.fetchval(_DID_OF_HANDLE, handle)
    return did
