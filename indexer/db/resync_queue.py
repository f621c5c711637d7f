"""The queue of resyncs in the table `repo`: claim repos that are due, renew and expire leases, unpark repos."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import groupby
from random import choice
from time import time

from indexer.atproto.record import Problem
from indexer.atproto.syntax import is_did, is_nsid, is_record_key
from indexer.crash_points import COMMITTED, crash_point
from indexer.db.change_log import log_changes
from indexer.db.columns import Connection, buckets_of, of_buckets, repo_columns, repo_of
from indexer.db.connections import Area
from indexer.db.database_errors import refused_writes
from indexer.db.resync_transaction import SOME_STORED, STORED, ResyncTransaction
from indexer.db.write import change_repos
from indexer.reasons import Desync, FetchFailure
from indexer.sync.changes import ChangeLogEntry
from indexer.sync.repo import OUT_OF_SCOPE, Repo, SyncStatus, Trigger, amend, desynchronize, transition
from indexer.sync.shard import bucket_of

LONGEST_LEASE_SECONDS = 600
"""A lease that ends later was written before the clock was set back."""
BATCH_SIZE = 500
"""Repos that one transaction expires, unparks or desynchronizes."""

MAX_REQUEST = 1_024
"""Characters of a notification about a requested record. The resync of a record with a longer path begins later."""

_WAITING = SyncStatus.DESYNCHRONIZED
_, _CLAIMED = transition(_WAITING, Trigger.CLAIMED)
# Leases are times of the database's clock, because processes of several machines compare them. The parameters are times
# of the clock of this process: the one to translate, and the present one.
_BY_DATABASE_CLOCK = "to_timestamp({}) + (statement_timestamp() - to_timestamp({}))"
_DUE_AT = "coalesce(next_attempt_at, '-infinity'::timestamptz)"

# Read only the head of each queue, and no more rows of it than may be claimed, so that the index scan stays short
# whatever waits for later or for other shards. Repos that were synchronized before come first: their visible records
# are wrong by now, not only missing. The exclusive or gives each caller its own order of buckets, so that concurrent
# workers rarely find the same rows.
DUE = f"""
    select due.did, due.bucket
    from (
        select bucket, priority, bucket # $4::smallint as bucket_order from indexer.resync_queue
        where bucket = any($2::smallint[]) order by priority, bucket_order
    ) q, lateral (
        select did, bucket, {_DUE_AT} as at from indexer.repo r
        where r.bucket = q.bucket and r.priority = q.priority
            and sync_status = '{_WAITING}' and active and {_DUE_AT} <= to_timestamp($3)
        order by {_DUE_AT} limit $1
    ) due
    order by q.priority, q.bucket_order, due.at limit $1
"""

# The buckets of one part of the layout, because Citus locks rows of only one shard at a time. SKIP LOCKED, because
# a row may stay locked for long. IS NOT DISTINCT keeps the planner from scanning the index of due repos for each DID.
CLAIM = f"""
    with locked as materialized (
        select did from indexer.repo r
        where {of_buckets("r")} and did = any($2::text[]) and sync_status is not distinct from '{_WAITING}' and active
            and {_DUE_AT} <= to_timestamp($3)
        for update skip locked
    ), claimed as (
        update indexer.repo r
        set sync_status = '{_CLAIMED}', lease = lease + 1, version = version + 1,
            lease_until = {_BY_DATABASE_CLOCK.format("$4", "$5")}, updated_at = now()
        where {of_buckets("r")} and did = any(array(select did from locked))
        returning *
    )
    select {repo_columns("claimed")} from claimed order by priority, next_attempt_at nulls first
"""

_RENEW = f"""
    update indexer.repo set lease_until = statement_timestamp() + make_interval(secs => $4)
    where did = $1 and bucket = $2 and lease = $3 and sync_status = '{_CLAIMED}'
    returning true
"""

# This statement and the next four lock nothing: `write` compares versions, so rows that changed are skipped.
_PRESENT = _BY_DATABASE_CLOCK.format("$1", "$4")
_EXPIRED = f"""
    select {repo_columns("r")} from indexer.repo r
    where sync_status = '{_CLAIMED}' and bucket = any($2::smallint[])
        and (lease_until < {_PRESENT} or lease_until > {_PRESENT} + interval '{LONGEST_LEASE_SECONDS} s')
    order by lease_until limit $3
"""

# Read from the end of each queue, as `DUE` is from its beginning. Only new accounts of one host may wait for so long.
LONG_WAITS = f"""
    select {repo_columns("late")}
    from indexer.resync_queue q, lateral (
        select * from indexer.repo r
        where r.bucket = q.bucket and r.priority = q.priority and sync_status = '{_WAITING}' and active
            and {_DUE_AT} > to_timestamp($1) and {_DUE_AT} < 'infinity'
            and last_failure is distinct from '{FetchFailure.NEW_ACCOUNTS}'
        order by {_DUE_AT} limit $3
    ) late
    where q.bucket = any($2::smallint[]) limit $3
"""

# Few records lack a value, and an index lists them. It is in a sub-query, so that the planner does not scan all repos.
INCOMPLETE = f"""
    select {repo_columns("r")}
    from (
        select distinct did, bucket from indexer.record
        where value_problem = '{Problem.MISSING}' and bucket = any($2::smallint[])
    ) c, indexer.repo r
    where r.did = c.did and r.bucket = c.bucket and {of_buckets("r", 4)}
        and r.sync_status = '{SyncStatus.SYNCHRONIZED}' and r.synchronized_at < to_timestamp($1)
    order by r.synchronized_at limit $3
"""

# Few repos are marked, and an index lists them in this order.
UNPROVEN = f"""
    select {repo_columns("r")} from indexer.repo r
    where r.unproven_since is not null and r.sync_status = '{SyncStatus.SYNCHRONIZED}' and r.active
        and (r.attempts = 0 or r.synchronized_at < to_timestamp($1)) and r.bucket = any($2::smallint[])
    order by r.unproven_since limit $3
"""

# In index order, so that no more rows are read than returned.
PARKED = f"""
    select {repo_columns("r")} from indexer.repo r
    where r.parked_at < to_timestamp($1) and r.bucket = any($2::smallint[])
    order by r.bucket, r.parked_at limit $3
"""

# Repos that were parked: because their DID has no usable identity, and no authentic message of them was received; or
# for any permanent failure, if only the stream has named them. An index lists them.
_DENIED = f"""
    r.parked_at < to_timestamp($1) and not r.takedown and r.priority = 2 and (
        r.from_stream or r.latest_verified_rev is null
            and r.last_failure in ('{FetchFailure.IDENTITY_MISSING}', '{FetchFailure.IDENTITY_GONE}')
    )
"""
# Accounts that upstream hides. An index lists them: they are few, as most are deleted. Repos that an operator untracked
# stay.
_HIDDEN = f"""
    r.updated_at < to_timestamp($1) and not r.active and r.priority = 2 and r.erase_at is null and not r.takedown
    and (r.tracked or r.hosting_status = '{OUT_OF_SCOPE}') and r.sync_status = '{_WAITING}'
"""


def _find_forgettable(condition: str, order: str) -> str:
    # A repo without a rev (priority 2) may have records: an account that becomes active, or a repo that is tracked
    # again, cancels the erasure. The next resync corrects them.
    return f"""
        select r.did, r.bucket from indexer.repo r
        where {condition} and r.bucket = any($2::smallint[]) and ({STORED} and {of_buckets("c", 4)} limit 1) is null
        order by {order} limit $3
    """


DENIED = _find_forgettable(_DENIED, "r.bucket, r.parked_at")
HIDDEN = _find_forgettable(_HIDDEN, "r.bucket")

# One bucket per statement, and SKIP LOCKED, for the reasons of `CLAIM`.
_FORGET = f"""
    with locked as materialized (
        select did from indexer.repo r
        where bucket = $2 and did = any($3::text[]) and {{condition}} and ({STORED} and c.bucket = $2 limit 1) is null
        for update skip locked
    )
    delete from indexer.repo where bucket = $2 and did = any(array(select did from locked)) returning did
"""
_FORGET_IDENTITIES = "delete from indexer.identity where bucket = $1 and did = any($2::text[])"


class Resyncs(Area):
    """The queue of resyncs, and their transactions."""

    async def claim(self, count: int, buckets: Sequence[int], lease_seconds: float, now: float) -> list[Repo]:
        """Claim at most `count` repos of the buckets that are due at `now`, with leases of `lease_seconds`.

        If the layout has several parts, the repos of a random part are claimed, if there are enough, because each
        further part costs as much. So the order of the queue holds within a part.
        """
        until, layout = now + lease_seconds, self._pool.layout
        async with self._pool.transaction() as connection:
            first = choice(buckets)  # noqa: S311 - spreads the load
            part = layout.part_of(first)
            of_part = [bucket for bucket in buckets if layout.part_of(bucket) == part]
            due = await connection.fetch(DUE, count, list(of_part), now, first)
            if len(due) < count and len(of_part) < len(buckets):
                due = await connection.fetch(DUE, count, list(buckets), now, first)
            claimed: list[Repo] = []
            for dids in layout.divide([did for did, _ in due], str, 0):
                rows = await connection.fetch(CLAIM, buckets_of(dids), dids, now, until, time())
                claimed += [repo_of(row) for row in rows]
                crash_point("claim.written")
            return claimed

    async def entries(self, did: str, limit: int) -> dict[bytes, bytes]:
        """Return the CIDs of at most `limit` stored records by path, in ascending order.

        The CID of a record without its value is followed by a zero byte.
        """
        rows = await self._fetch(SOME_STORED, did, bucket_of(did), limit)
        return {row[0]: row[1] for row in rows}

    async def renew(self, did: str, lease: int, seconds: float) -> bool:
        """Extend a lease to `seconds` from now; return False if the claim is lost."""
        return await self._fetchval(_RENEW, did, bucket_of(did), lease, seconds) is not None

    async def expire_leases(self, buckets: Sequence[int], now: float) -> int:
        """End claims whose lease expired; return how many.

        The back-off grows as with any other failure. A renewal does not change the version, so one that arrives at the
        same moment has no effect: its worker finds the claim lost.
        """
        expire = _desynchronization(Trigger.LEASE_EXPIRED, Desync.LEASE_EXPIRED, now)
        return await self._change(expire, _EXPIRED, now, list(buckets), BATCH_SIZE, time())

    async def end_long_waits(self, buckets: Sequence[int], seconds: float, now: float) -> int:
        """Make repos due now that wait for longer than `seconds`; return how many.

        No wait is so long, unless the clock was set back after the wait began.
        """
        arguments = now + seconds, list(buckets), BATCH_SIZE
        return await self._change(lambda repo: amend(repo, next_attempt_at=now), LONG_WAITS, *arguments)

    async def request_missing_values(self, buckets: Sequence[int], seconds: float, now: float) -> int:
        """Desynchronize repos that lack values and were synchronized `seconds` ago or earlier; return how many."""
        request = _desynchronization(Trigger.VALUES_MISSING, Desync.RECORD_MISSING, now)
        return await self._change(request, INCOMPLETE, now - seconds, list(buckets), BATCH_SIZE, list(buckets))

    async def request_unproven(self, buckets: Sequence[int], seconds: float, now: float, limit: int) -> int:
        """Desynchronize repos to which undecidable commits were applied; return how many.

        At most `limit`, the oldest marks first. Repos that broke before and became synchronized less than `seconds` ago
        are skipped: their back-off has not started from the beginning again.
        """
        request = _desynchronization(Trigger.UNPROVEN, Desync.LENIENT_COMMIT, now)
        return await self._change(request, UNPROVEN, now - seconds, list(buckets), limit)

    async def forget_denied(self, buckets: Sequence[int], parked_for: float, now: float) -> int:
        """Delete repos that cannot be fetched and were parked `parked_for` seconds ago or earlier; return how many.

        Either their DIDs never existed, as far as is known, or only the stream has named them.
        """
        async with self._pool.transaction() as connection:
            return len(await _forget(connection, DENIED, _DENIED, buckets, now - parked_for))

    async def forget_hidden(self, buckets: Sequence[int], unchanged_for: float, now: float) -> int:
        """Delete repos of inactive accounts of which nothing is stored, unchanged for `unchanged_for` seconds.

        Return how many. Consumers may have been told that such a repo is hidden. A repo that is added later begins
        visible, so they are told that it is visible again.
        """
        async with self._pool.transaction() as connection:
            forgotten = await _forget(connection, HIDDEN, _HIDDEN, buckets, now - unchanged_for)
            await log_changes(connection, [ChangeLogEntry(did, "visible", None, live=True) for did in forgotten])
            return len(forgotten)

    async def unpark(self, buckets: Sequence[int], seconds: float, now: float) -> int:
        """Make repos due now that were parked `seconds` ago or earlier; return how many."""
        arguments = now - seconds, list(buckets), BATCH_SIZE
        return await self._change(lambda repo: amend(repo, next_attempt_at=now), PARKED, *arguments)

    async def _change(self, change: Callable[[Repo], Repo], statement: str, *arguments: object) -> int:
        """Change the repos that the statement selects; return how many were still at the version that was read."""
        async with self._pool.transaction() as connection:
            repos = [repo_of(row) for row in await connection.fetch(statement, *arguments)]
            written = await change_repos(connection, repos, change)
            if written:
                crash_point("queue.written")
            return written

    async def listen(self, on_request: Callable[[str, str], None]) -> None:
        """Call a function with DID and path of each record that is requested, until the connection ends.

        Both are empty at first. Any role may notify, so neither may be true, but both are valid and short.
        """

        def read(text: str | None) -> None:
            did, _, path = (text or "").partition(" ")
            collection, _, rkey = path.partition("/")
            is_valid = is_did(did) and is_nsid(collection) and is_record_key(rkey) and len(text or "") <= MAX_REQUEST
            if text is None or is_valid:
                on_request(did, path)

        await self._pool.listen("indexer_requests", read)

    @asynccontextmanager
    async def transaction(self, *claimed: Repo, scope_version: int = 0) -> AsyncIterator[ResyncTransaction]:
        """Begin the transaction of one or several resyncs, which are planned with this version of the scope.

        The end of the block commits it if it was finished, else rolls it back. So does an exception in the block.
        Transient errors come from the database, whatever else the block does.

        Raises:
            RefusedWriteError: The database cannot store the values of the resync.
        """
        async with self._pool.refusals_checked():
            with refused_writes():
                async with self._pool.resync_connections, self._pool.connection() as connection:
                    transaction = connection.transaction()
                    await transaction.start()
                    begun = ResyncTransaction(connection, claimed, scope_version)
                    commit = False
                    try:
                        yield begun
                        commit = begun.finished
                    finally:
                        await (transaction.commit() if commit else transaction.rollback())
                        self._pool.committed.set()
                    if commit:
                        crash_point(COMMITTED)


async def _forget(
    connection: Connection, search: str, condition: str, buckets: Sequence[int], before: float
) -> list[str]:
    """Delete repos that `search` finds, with their identities, if the condition still holds; return their DIDs."""
    every, forgotten = list(buckets), list[str]()
    found = await connection.fetch(search, before, every, BATCH_SIZE, every)
    for bucket, rows in groupby(found, lambda row: row["bucket"]):
        deleted = await connection.fetch(
            _FORGET.format(condition=condition), before, bucket, [row["did"] for row in rows]
        )
        dids = [did for (did,) in deleted]
        await connection.execute(_FORGET_IDENTITIES, bucket, dids)
        crash_point("repo.forgotten")
        forgotten += dids
    return forgotten


def _desynchronization(trigger: Trigger, reason: Desync, now: float) -> Callable[[Repo], Repo]:
    return lambda repo: desynchronize(repo, trigger, reason, now)
