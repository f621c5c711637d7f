"""The hosts whose own streams are read, because relays do not pass on their accounts, and the withheld repos.

A withheld repo may be synchronized only while its host is subscribed (docs/protocol.md#withheld-accounts). Whoever may
have missed messages of the host's stream, or ends it, removes the row of the host, and then desynchronizes its withheld
repos. A resync ends a withheld repo as synchronized only if the row is the same as before its export was requested, and
locks it until COMMIT. So the removal waits for the resync, and no repo is left over.
"""

from collections.abc import Callable
from functools import partial
from time import time

from indexer.crash_points import crash_point
from indexer.db.columns import Connection, repo_columns, repo_of
from indexer.db.connections import Area
from indexer.db.write import change_repos
from indexer.reasons import Desync
from indexer.sync.repo import Repo, SyncStatus, amend, withhold
from indexer.sync.shard import Shard

BATCH_SIZE = 500
"""Repos that one transaction changes."""

_LOAD = "select pds, shard from indexer.subscribed_host order by pds"
_ADD = "insert into indexer.subscribed_host (pds, shard) values ($1, $2) on conflict do nothing"
_REMOVE = "delete from indexer.subscribed_host where (pds, shard) = ($1, $2)"

# An index lists the withheld repos.
_WITHHELD = f"""
    select {repo_columns("r")} from indexer.repo r left join indexer.identity i on i.did = r.did and i.bucket = r.bucket
    where r.withheld_since is not null and r.bucket = any($1::smallint[]) and {{condition}} limit $3
"""
STALE = _WITHHELD.format(
    condition=f"r.sync_status = '{SyncStatus.SYNCHRONIZED}' and coalesce(i.pds, '') <> all($2::text[])"
)
COUNT = """
    select i.pds, count(*) from indexer.repo r join indexer.identity i on i.did = r.did and i.bucket = r.bucket
    where r.withheld_since is not null and r.bucket = any($1::smallint[]) and r.active and i.pds is not null
    group by i.pds
"""
# A repo that could not be fetched waits as long as any other one.
WAITING = _WITHHELD.format(
    condition=f"""r.sync_status = '{SyncStatus.DESYNCHRONIZED}' and r.sync_reason = '{Desync.WITHHELD}' and r.active
        and r.next_attempt_at = 'infinity' and r.last_failure is null and i.pds = any($2::text[])"""
)


async def holds(connection: Connection, row: int) -> bool:
    """Return True if the row with this ID still exists. It stays until the transaction ends."""
    return await connection.fetchval("select id from indexer.subscribed_host where id = $1 for share", row) is not None


class SubscribedHosts(Area):
    """The subscribed hosts of each shard. A host is named by its URL, as in the identities of its accounts."""

    async def load(self, shard: Shard) -> list[str]:
        """Return the subscribed hosts of the shard."""
        return [pds for pds, of in await self._fetch(_LOAD) if of == str(shard)]

    async def withheld(self, shard: Shard) -> dict[str, int]:
        """Return the number of withheld accounts of the shard on each host that has some."""
        return {row["pds"]: row["count"] for row in await self._fetch(COUNT, list(shard.buckets))}

    async def find(self, did: str, pds: str) -> int | None:
        """Return the ID of the row of an account's host, for the shard of the account; None if there is none."""
        layout = self._pool.layout
        rows = await self._fetch("select shard, id from indexer.subscribed_host where pds = $1", pds)
        return next((row for of, row in rows if Shard.parse(of).placed(layout).owns(did)), None)

    async def add(self, pds: str, shard: Shard) -> None:
        """Note that no message of the host's stream is missed from now on. If that is known, nothing changes."""
        await self._execute(_ADD, pds, str(shard))

    async def remove(self, pds: str, shard: Shard) -> int:
        """Desynchronize the host's withheld repos, as messages of its stream may be missed; return how many.

        The host may be added again meanwhile.
        """
        await self._execute(_REMOVE, pds, str(shard))
        crash_point("host.removed")
        return await self._change_all(STALE, shard, withhold, removed=pds)

    async def remove_former(self, shard: Shard) -> None:
        """Remove the rows of other shards with some of the same buckets, from before the number of shards changed."""
        for pds, of in await self._fetch(_LOAD):
            if of != str(shard) and shard.overlaps(Shard.parse(of)):
                await self._execute(_REMOVE, pds, of)

    async def withhold(self, shard: Shard) -> int:
        """Desynchronize the withheld repos of the shard whose host is not subscribed; return how many.

        There are some after a removal, and if an account has moved to another host.
        """
        return await self._change_all(STALE, shard, withhold)

    async def unpark(self, shard: Shard) -> int:
        """Make the withheld repos due that wait, and whose host is subscribed; return how many."""
        return await self._change_all(WAITING, shard, partial(amend, next_attempt_at=time()))

    async def _change_all(
        self, statement: str, shard: Shard, change: Callable[[Repo], Repo], removed: str | None = None
    ) -> int:
        """Change all repos that the statement selects, in transactions of a few; return how many."""
        subscribed, changed = [pds for pds in await self.load(shard) if pds != removed], 0
        while True:
            async with self._pool.transaction() as connection:
                rows = await connection.fetch(statement, list(shard.buckets), subscribed, BATCH_SIZE)
                changed += await change_repos(connection, map(repo_of, rows), change)
                crash_point("withheld.written")
            if not rows:
                return changed
