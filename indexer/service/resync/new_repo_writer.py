"""Write small repos of which nothing is stored: those that wait at the same time share a transaction.

There is no fixed wait. While one transaction runs, repos that become ready wait until it ends, and the next one writes
all of them. So the transactions become larger with the load.
"""

import asyncio
from dataclasses import dataclass
from time import time

import structlog

from indexer.errors import RefusedWriteError
from indexer.store import DatabaseError, NewRepoRecords, NewReposTransaction, RecordsExistError, Store
from indexer.sync.export import RecordChunk
from indexer.sync.plan_resync import Completion
from indexer.sync.plans import Batch
from indexer.sync.policy import KeyState, PlanContext, Policy
from indexer.sync.repo_state import Head, Repo

MAX_RECORDS = 5_000
"""Records of one transaction, unless its first repo has more."""
MAX_BYTES = 4 << 20
"""Bytes of records of one transaction, unless its first repo has more."""

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class NewRepo:
    """A claimed repo whose whole export is verified and converted.

    Attributes:
        chunk: All its selected records; None if there are none.
        decided: True when a shared transaction has written the repo or refused it.
        written: Its batch if it is written; None if it has to be written in a transaction of its own.
    """

    claimed: Repo
    head: Head
    key: KeyState
    policy: Policy
    chunk: RecordChunk | None
    decided: bool = False
    written: Batch | None = None

    @property
    def records(self) -> NewRepoRecords | None:
        """The records with their DID."""
        return None if self.chunk is None else NewRepoRecords(self.claimed.did, self.chunk)


class NewRepoWriter:
    """Writes repos in shared transactions. The attempt of one of the repos runs the transaction for all of them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: list[NewRepo] = []
        self._turn = asyncio.Lock()

    async def write(self, repo: NewRepo) -> Batch | None:
        """Write the repo; return its batch, or None if it has to be written in a transaction of its own."""
        self._waiting.append(repo)
        try:
            async with self._turn:
                while not repo.decided:
                    await self._write_group(self._next_group())
        finally:
            if not repo.decided:
                self._waiting.remove(repo)
        return repo.written

    def _next_group(self) -> list[NewRepo]:
        """Return the first repos that wait and have the same scope, up to the limits."""
        version = self._waiting[0].policy.scope.version
        group: list[NewRepo] = []
        count = size = 0
        for repo in self._waiting:
            count += repo.chunk.count if repo.chunk else 0
            size += repo.chunk.size if repo.chunk else 0
            if group and (count > MAX_RECORDS or size > MAX_BYTES or repo.policy.scope.version != version):
                break
            group.append(repo)
        return group

    async def _write_group(self, group: list[NewRepo]) -> None:
        written: dict[str, Batch] = {}
        try:
            async with self._store.write_new_repos(group[0].policy.scope.version) as transaction:
                written = await _write(transaction, group)
        except (RefusedWriteError, RecordsExistError, DatabaseError) as error:
            # One repo may be the cause, for example if another session has locked its rows. In transactions of their
            # own, the others succeed, and each repo has the error that is its own.
            log.debug("resync.group-failed", repos=len(group), error=str(error))
            written = {}
        for repo in group:
            repo.decided, repo.written = True, written.get(repo.claimed.did)
        self._waiting = [repo for repo in self._waiting if not repo.decided]


async def _write(transaction: NewReposTransaction, group: list[NewRepo]) -> dict[str, Batch]:
    """Write those repos of the group that can share a transaction; return their batches by DID."""
    rows = await transaction.eligible([repo.claimed for repo in group])
    eligible = [repo for repo in group if repo.claimed.did in rows]
    if not eligible:
        return {}
    await transaction.create([repo.records for repo in eligible if repo.records])
    written = {repo.claimed.did: _complete(repo, rows[repo.claimed.did]) for repo in eligible}
    batch = Batch(tuple([write for completed in written.values() for write in completed.writes]))
    return written if await transaction.finish(batch) else {}


def _complete(repo: NewRepo, row: Repo) -> Batch:
    """Return the end of the resync of a repo for which no event is buffered."""
    completion = Completion(repo.claimed, repo.head, repo.key, PlanContext(repo.policy, "", time()))
    completion.lock(row)
    return completion.end()
