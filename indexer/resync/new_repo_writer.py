"""Write small repos of which nothing is stored: those that wait at the same time share a transaction.

There is no fixed wait. While one transaction runs, repos that become ready wait until it ends, and the next one writes
all of them. So the transactions become larger with the load.

On a distributed database, only repos of the same shard share a transaction, so that it writes one node besides the
change log. Those of two shards run side by side, and repos of the other shards wait.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from time import time

import structlog

from indexer.concurrency.shared_calls import SharedCalls
from indexer.db import DatabaseError, NewRepoRecords, NewReposTransaction, RecordsExistError, Store
from indexer.db.placement import shard_of
from indexer.errors import RefusedWriteError
from indexer.sync.changes import Batch
from indexer.sync.export import RecordChunk
from indexer.sync.policy import KeyState, PlanContext, Policy
from indexer.sync.repo import Head, Repo
from indexer.sync.resync import Completion
from indexer.sync.shard import bucket_of
from indexer.telemetry.metrics import Metrics

MAX_RECORDS = 5_000
"""Records of one transaction, unless its first repo has more."""
MAX_BYTES = 4 << 20
"""Bytes of records of one transaction, unless its first repo has more."""
MAX_SIDE_BY_SIDE = 2
"""Transactions that run side by side on a distributed database. More of them would have fewer repos each, and each
transaction costs some milliseconds of CPU besides those of its records."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class NewRepo:
    """A claimed repo whose whole export is verified and converted.

    Attributes:
        chunk: All its selected records; None if there are none.
    """

    claimed: Repo
    head: Head
    key: KeyState
    policy: Policy
    chunk: RecordChunk | None

    @property
    def records(self) -> NewRepoRecords | None:
        """The records with their DID."""
        return None if self.chunk is None else NewRepoRecords(self.claimed.did, self.chunk)


class NewRepoWriter:
    """Writes repos in shared transactions. The attempt of one of the repos runs the transaction for all of them."""

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics
        self._shards = store.shards
        running = asyncio.Semaphore(MAX_SIDE_BY_SIDE)
        self._calls = [SharedCalls(self._write_group, _may_share, running) for _ in range(store.shards)]

    async def write(self, repo: NewRepo) -> Batch | None:
        """Write the repo; return its batch, or None if it has to be written in a transaction of its own."""
        calls = self._calls[shard_of(bucket_of(repo.claimed.did), self._shards)]
        return (await calls.add([repo])).get(repo)

    async def _write_group(self, group: list[NewRepo]) -> dict[NewRepo, Batch]:
        """Write the repos in one transaction; return the batches of those that are written."""
        try:
            async with self._store.write_new_repos(group[0].policy.scope.version) as transaction:
                with self._metrics.stage("apply-export"):  # once for all of them, without the time that they waited
                    return await _write(transaction, group)
        except (RefusedWriteError, RecordsExistError, DatabaseError) as error:
            # One repo may be the cause, for example if another session has locked its rows. In transactions of their
            # own, the others succeed, and each repo has the error that is its own.
            log.debug("resync.group-failed", repos=len(group), error=str(error))
            return {}


def _may_share(repos: Sequence[NewRepo]) -> bool:
    """Return True if the repos have the same scope and are within the limits of one transaction."""
    chunks = [repo.chunk for repo in repos if repo.chunk]
    return (
        len({repo.policy.scope.version for repo in repos}) == 1
        and sum(chunk.count for chunk in chunks) <= MAX_RECORDS
        and sum(chunk.size for chunk in chunks) <= MAX_BYTES
    )


async def _write(transaction: NewReposTransaction, group: Sequence[NewRepo]) -> dict[NewRepo, Batch]:
    """Write those repos of the group that can share a transaction; return their batches."""
    rows = await transaction.eligible([repo.claimed for repo in group])
    # A late attempt may share the group with the worker that claimed its repo again: only the lease tells them apart.
    claims = [(repo, rows.get(repo.claimed.did)) for repo in group]
    written = {repo: _complete(repo, row) for repo, row in claims if row and row.lease == repo.claimed.lease}
    if not written:
        return {}
    await transaction.create([repo.records for repo in written if repo.records])
    batch = Batch(tuple([write for completed in written.values() for write in completed.writes]))
    return written if await transaction.finish(batch) else {}


def _complete(repo: NewRepo, row: Repo) -> Batch:
    """Return the end of the resync of a repo for which no event is buffered."""
    completion = Completion(repo.claimed, repo.head, repo.key, PlanContext(repo.policy, "", time()))
    completion.lock(row)
    return completion.end()
