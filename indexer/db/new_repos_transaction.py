"""The transaction that writes several small repos of which nothing is stored.

A resync has a fixed cost: the statements of its transaction, and the commit. Repos that share a transaction share it.
A repo that needs more than its records and its row is not written here, but by a `ResyncTransaction`.
"""

from collections.abc import Sequence

from indexer.crash_points import crash_point
from indexer.db import scope_row
from indexer.db.apply_batch import apply
from indexer.db.columns import Connection, buckets_of, of_buckets, repo_columns, repo_of
from indexer.db.copy_records import NewRepoRecords, copy_chunks
from indexer.db.database_errors import database_errors, refused_writes
from indexer.sync.plans import Batch
from indexer.sync.repo_state import Repo, SyncStatus

# A scalar subquery with LIMIT, so that the planner looks into the index for each repo, and does not read all records.
ELIGIBLE = f"""
    select {repo_columns("r")},
        (
            select true from indexer.record c where c.did = r.did and c.bucket = r.bucket and {of_buckets("c")} limit 1
        ) as stored
    from indexer.repo r
    where r.bucket = any($1::smallint[]) and r.did = any($2::text[])
        and sync_status is not distinct from '{SyncStatus.IN_PROGRESS}' and buffered_events = 0
"""
"""Takes buckets and DIDs."""


class NewReposTransaction:
    """The writes of several resyncs. `Store.write_new_repos` begins and ends the transaction.

    It locks no row before `finish`, which writes each row only at the version that `eligible` returned. So a repo whose
    claim was lost since then, or for which an event was buffered, makes `finish` return False.

    Attributes:
        finished: True after `finish` returned True; then the transaction is committed.
    """

    def __init__(self, connection: Connection, scope_version: int) -> None:
        self._connection = connection
        self._scope_version = scope_version
        self.finished = False

    async def eligible(self, claimed: Sequence[Repo]) -> dict[str, Repo]:
        """Return the present rows of those repos that this transaction can write, by DID.

        A claim of them holds, no record of them is stored, and no event is buffered for them. Of two attempts of one
        repo, the row has the lease of the one that holds the claim.
        """
        dids = sorted(repo.did for repo in claimed)
        with database_errors():
            rows = await self._connection.fetch(ELIGIBLE, buckets_of(dids), dids)
        claims = {(repo.did, repo.lease) for repo in claimed}
        repos = [repo_of(row) for row in rows if not row["stored"]]
        return {repo.did: repo for repo in repos if (repo.did, repo.lease) in claims}

    async def create(self, parts: Sequence[NewRepoRecords]) -> None:
        """Insert the records of eligible repos, and log them.

        Raises:
            RecordsExistError: One of the records exists: its repo has been written by another worker meanwhile.
            RefusedWriteError: The database cannot store the values.
        """
        with refused_writes(), database_errors():
            await copy_chunks(self._connection, parts)
        crash_point("new-repos.copied")

    async def finish(self, batch: Batch) -> bool:
        """Write the new rows; return False if the scope or the row of a repo has changed. Then nothing is committed."""
        with refused_writes(), database_errors():
            if await scope_row.holds(self._connection, self._scope_version):
                # `eligible` returned no repo with buffered events, and each row is written only at that version.
                applied = await apply(self._connection, batch, buffers_empty=True)
                self.finished = not applied.skipped
                crash_point("new-repos.finished")
        return self.finished
