"""Turn the links of a shard on and off, and add the links of records that were stored before.

The backfill visits the repos of the shard in the order of their DIDs. It locks a repo, reads a part of its records and
adds their links. A repo in progress cannot be locked against its resync: it is visited again later. The stored position
is the DID up to which every repo is done, so a restart repeats little, and adds nothing twice.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from indexer.crash_points import crash_point
from indexer.reasons import Desync
from indexer.store.columns import Connection, unnest, visible
from indexer.store.link_rows import RecordValue, add_missing_links
from indexer.sync.repo_state import SyncStatus
from indexer.sync.shard import bucket_of

STEP_RECORDS = 200
"""Records after which a transaction of the backfill visits no further repo. The batch writer waits for its repos."""
SLICE_RECORDS = 200
"""Records of one repo in one transaction."""
SLICE_CHARACTERS = 4 << 20
"""Characters of values of one repo in one transaction, unless a single value is longer."""

_STATES = "select bucket, done_at is not null as done, off_at is not null as off from indexer.link_bucket"
_TABLES = "indexer.link, indexer.link_count, indexer.link_delta, indexer.link_recount"
_LOCK_STATES = "lock table indexer.link_bucket in share row exclusive mode"
_EMPTY_TABLES = f"truncate {_TABLES}"
_ADD_BUCKETS = """
    insert into indexer.link_bucket (bucket) select unnest($1::smallint[]) on conflict (bucket) do nothing
"""
_TURN_OFF = "update indexer.link_bucket set off_at = coalesce(off_at, now()) where bucket = any($1::smallint[])"
_FORGET_BUCKETS = "delete from indexer.link_bucket"
# The stored position is written later, and is durable only together with everything before it.
_COMMIT_LATER = "set local synchronous_commit = off"
_LOCK_TIMEOUT = "set local lock_timeout = '2s'"

_POSITION = """
    select min(backfilled_to) from indexer.link_bucket where bucket = any($1::smallint[]) and done_at is null
"""
# A repo that was never fetched has no records, unless its first resync began before links were on. A repo without rev
# may have some: they were not erased yet when its account became active again.
_NEXT_REPOS = f"""
    select did from indexer.repo
    where did > $1 and bucket = any($2::smallint[])
        and (rev is not null or sync_status = '{SyncStatus.IN_PROGRESS}' or sync_reason <> '{Desync.NEW}')
    order by did limit $3
"""
_SAVE_POSITION = f"""
    update indexer.link_bucket b set backfilled_to = $3, backfilled_repos = b.backfilled_repos + w.repos
    from {unnest({"bucket": "smallint", "repos": "bigint"}, "w")} where b.bucket = w.bucket
"""
_SAVE_DONE = "update indexer.link_bucket set done_at = now() where bucket = any($1::smallint[]) and done_at is null"

_LOCK_REPO = f"""
    select {visible("r")} as visible from indexer.repo r
    where did = $1 and bucket = $2 and sync_status <> '{SyncStatus.IN_PROGRESS}' for update skip locked
"""
_REPO_EXISTS = "select exists (select from indexer.repo where did = $1 and bucket = $2)"
_RECORDS = """
    select collection, rkey, value, number = records and records < $5 as last from (
        select collection, rkey, value, sum(length(value)) over (order by collection, rkey) - length(value) as before,
            row_number() over (order by collection, rkey) as number, count(*) over () as records
        from (
            select collection, rkey, coalesce(value::text, '') as value from indexer.record
            where did = $1 and bucket = $2 and (collection, rkey) > ($3, $4) order by collection, rkey limit $5
        ) part
    ) w where before < $6 order by collection, rkey
"""


class LinkState(NamedTuple):
    """The state of the links of a shard.

    Attributes:
        kept: The links of every bucket of the shard are kept.
        off: Links of the shard are stored and outdated: it was turned off, and other shards keep theirs.
        done: The backfill is complete.
    """

    kept: bool
    off: bool
    done: bool


RecordPath = tuple[str, str]
"""Collection and record key."""
FIRST_PATH: RecordPath = ("", "")
"""A path before all others."""


class RepoStep(NamedTuple):
    """The result of one transaction of the backfill for a repo.

    Attributes:
        after: The last record that was visited, from which to continue; None if the repo is done.
        locked: The repo could not be locked, and nothing was done.
    """

    after: RecordPath | None
    locked: bool = False


async def load_state(connection: Connection, buckets: Sequence[int]) -> LinkState:
    """Return the state of the links of these buckets."""
    rows = {row["bucket"]: row for row in await connection.fetch(_STATES)}
    own = [rows[bucket] for bucket in buckets if bucket in rows]
    off = any(row["off"] for row in own)
    kept = not off and len(own) == len(buckets)
    return LinkState(kept, off, kept and all(row["done"] for row in own))


async def turn_on(connection: Connection, buckets: Sequence[int]) -> LinkState:
    """Keep the links of these buckets from now on, unless outdated ones are stored. Run it in a transaction."""
    await connection.execute(_LOCK_STATES)
    rows = await connection.fetch(_STATES)
    if all(row["off"] for row in rows):
        await _remove_all(connection)
    state = await load_state(connection, buckets)
    if state.off:
        return state
    await connection.execute(_ADD_BUCKETS, list(buckets))
    return await load_state(connection, buckets)


async def turn_off(connection: Connection, buckets: Sequence[int]) -> bool:
    """Keep the links of these buckets no longer. Run it in a transaction.

    If the links of all buckets of the database are off, all links are removed.

    Returns:
        True if nothing is left to remove.
    """
    await connection.execute(_LOCK_STATES)
    await connection.execute(_TURN_OFF, list(buckets))
    rows = await connection.fetch(_STATES)
    if not all(row["off"] for row in rows):
        return not any(row["bucket"] in set(buckets) for row in rows)
    if rows:
        await _remove_all(connection)
    return True


async def _remove_all(connection: Connection) -> None:
    """Empty the tables of links. Consumers may read them, so this waits for their locks only for a moment."""
    await connection.execute(_LOCK_TIMEOUT)
    await connection.execute(_EMPTY_TABLES)
    await connection.execute(_FORGET_BUCKETS)


async def load_position(connection: Connection, buckets: Sequence[int]) -> str | None:
    """Return the DID up to which the backfill of these buckets is done; None if it is complete."""
    position: str | None = await connection.fetchval(_POSITION, list(buckets))
    return position


async def next_repos(connection: Connection, buckets: Sequence[int], after: str, limit: int) -> list[str]:
    """Return the next repos that may have records, in the order of their DIDs."""
    return [row["did"] for row in await connection.fetch(_NEXT_REPOS, after, list(buckets), limit)]


async def save_position(connection: Connection, buckets: Sequence[int], did: str, repos: Mapping[int, int]) -> None:
    """Store that all repos up to a DID are done, and how many of each bucket since the last call."""
    counts = [repos.get(bucket, 0) for bucket in buckets]
    await connection.execute(_SAVE_POSITION, list(buckets), counts, did)


async def save_done(connection: Connection, buckets: Sequence[int]) -> None:
    """Store that the backfill is complete."""
    await connection.execute(_SAVE_DONE, list(buckets))


async def backfill_step(connection: Connection, repos: Mapping[str, RecordPath]) -> tuple[dict[str, RepoStep], int]:
    """Add the links of a part of the records of each repo, those after a path. Run it in a transaction.

    Returns:
        What was done, for the first repos of those that are given, and the number of links that were added.
    """
    await connection.execute(_COMMIT_LATER)
    steps: dict[str, RepoStep] = {}
    values: list[RecordValue] = []
    for did, after in repos.items():
        if len(values) >= STEP_RECORDS:
            break
        steps[did], found = await _read_slice(connection, did, after)
        values += found
    added = await add_missing_links(connection, values)
    crash_point("links.visited")
    return steps, added


async def _read_slice(connection: Connection, did: str, after: RecordPath) -> tuple[RepoStep, list[RecordValue]]:
    """Lock a repo, and return its next records."""
    key = did, bucket_of(did)
    visible = await connection.fetchval(_LOCK_REPO, *key)
    if visible is None:
        exists = await connection.fetchval(_REPO_EXISTS, *key)
        return RepoStep(after if exists else None, locked=exists), []
    rows = await connection.fetch(_RECORDS, *key, *after, SLICE_RECORDS, SLICE_CHARACTERS)
    found = [RecordValue((did, collection, rkey), value, visible) for collection, rkey, value, _ in rows]
    is_last = not rows or rows[-1]["last"]
    return RepoStep(None if is_last else (rows[-1]["collection"], rows[-1]["rkey"])), found
