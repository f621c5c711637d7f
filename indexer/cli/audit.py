"""Fetch repos again and compare every record with the database. Nothing is written.

The comparison covers what a resync would write: the head of the repo, and the CID and the value of every record in the
selected collections. Repos change during an audit. An export that is older than the stored rev is fetched again, and
the daemon gets some time to store a rev that is newer.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from time import monotonic, time
from typing import ParamSpec, TypeVar

from indexer.app.clients import make_did_resolver, make_pds_client, open_outbound_client, stored_policy
from indexer.app.settings import Settings
from indexer.atproto.cid import cid_text
from indexer.atproto.crypto import PublicKey, parse_did_key
from indexer.cli.audit_comparison import RepoComparison
from indexer.cli.audit_result import NOT_IN_DATABASE, RepoAudit
from indexer.db import ConsistentRead, Database, DatabaseError
from indexer.errors import BrokenInvariantError, UnavailableError, UpstreamError
from indexer.net.identity import DidResolver
from indexer.net.pds import PdsClient
from indexer.reasons import FetchFailure, Rejection
from indexer.sync.policy import Policy, is_future
from indexer.sync.repo import Head, Repo, SyncStatus
from indexer.sync.verify import Snapshot

MAX_CONCURRENCY = 16
"""Repos at a time. Each may hold a database connection, and one thread compares all of them."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AuditTimeouts:
    """Limits of the wait until database and host have the same rev of a repo.

    Attributes:
        max_fetches: How often an export is fetched that is older than the stored rev.
        catch_up_seconds: How long the daemon may take to store the rev of the export.
        poll_seconds: Interval between two checks of the stored rev.
    """

    max_fetches: int = 5
    catch_up_seconds: float = 10.0
    poll_seconds: float = 0.2


class SkippedRepoError(Exception):
    """The repo cannot be compared in its present state. The message is the reason for `RepoAudit.reason_skipped`."""


class Auditor:
    """Audits several repos at a time."""

    def __init__(
        self,
        db: Database,
        resolver: DidResolver,
        pds: PdsClient,
        policy: Policy,
        *,
        concurrency: int,
        timeouts: AuditTimeouts | None = None,
    ) -> None:
        self._db = db
        self._resolver = resolver
        self._pds = pds
        self._policy = policy
        self._concurrency = concurrency
        self._timeouts = timeouts or AuditTimeouts()
        self._thread = ThreadPoolExecutor(1, "audit")  # keeps the event loop free for the downloads

    async def audit(self, dids: Iterable[str]) -> AsyncGenerator[RepoAudit]:
        """Yield the result of each repo as soon as it is complete.

        Raises:
            DatabaseError: The database does not answer.
        """
        waiting = iter(dids)
        running: set[asyncio.Task[RepoAudit]] = set()
        try:
            while True:
                for did in islice(waiting, self._concurrency - len(running)):
                    running.add(asyncio.create_task(self._audit_repo(did), name=f"audit of {did}"))
                if not running:
                    return
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    running.remove(task)
                    yield task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown()

    async def _audit_repo(self, did: str) -> RepoAudit:
        try:
            return await self._fetch_until_current(did)
        except DatabaseError:
            raise
        except (SkippedRepoError, UnavailableError) as error:
            return RepoAudit(did, reason_skipped=str(error))
        except UpstreamError as error:
            return RepoAudit(did, reason_skipped=f"{FetchFailure.EXPORT_REJECTED}: {error}")
        except BrokenInvariantError as error:  # stored rows that form no valid path, or a damaged index
            result = RepoAudit(did)
            result.add_difference(did, str(error))
            return result

    async def _fetch_until_current(self, did: str) -> RepoAudit:
        """Fetch and compare the repo, again if the export is older than the stored rev."""
        _comparable_head((await self._db.repos.load([did])).get(did))
        identity = await self._resolver.resolve(did)
        if identity.signing_key is None or identity.pds is None:
            raise UnavailableError(FetchFailure.IDENTITY_MISSING, identity.problem or "")
        key = parse_did_key(identity.signing_key)
        fetches = 0
        while True:
            fetches += 1
            try:
                return await self._fetch_and_compare(did, identity.pds, key)
            except UnavailableError as error:
                if error.reason is not FetchFailure.EXPORT_STALE or fetches == self._timeouts.max_fetches:
                    raise

    async def _fetch_and_compare(self, did: str, host: str, key: PublicKey) -> RepoAudit:
        async with self._pds.fetch_export(did, host) as export:
            snapshot = await self._in_thread(export.verify, did, key, self._policy.limits)
            if is_future(snapshot.head.rev, time(), self._policy.limits):
                raise UpstreamError(Rejection.FUTURE_REV, snapshot.head.rev)
            return await self._compare_at_same_rev(snapshot)

    async def _compare_at_same_rev(self, snapshot: Snapshot) -> RepoAudit:
        """Wait until the database has the rev of the snapshot, then compare. If it takes too long, report that."""
        deadline = monotonic() + self._timeouts.catch_up_seconds
        exported = snapshot.head
        while True:
            async with self._db.exports.consistent_read(snapshot.did) as read:
                repo = await read.repo()
                stored = _comparable_head(repo)
                if stored.rev > exported.rev:
                    raise UnavailableError(FetchFailure.EXPORT_STALE, f"{exported.rev} < {stored.rev}")
                if stored.rev == exported.rev:
                    return await self._compare(snapshot, stored, read, repo.scope_version if repo else 0)
            if monotonic() >= deadline:
                result = RepoAudit(snapshot.did)
                result.add_difference(snapshot.did, f"behind: database {stored.rev}, host {exported.rev}")
                return result
            await asyncio.sleep(self._timeouts.poll_seconds)

    async def _compare(self, snapshot: Snapshot, stored: Head, read: ConsistentRead, scope_version: int) -> RepoAudit:
        comparison = RepoComparison(snapshot, self._policy, scope_version)
        if stored.data != snapshot.head.data:
            description = f"different data: database {cid_text(stored.data)}, host {cid_text(snapshot.head.data)}"
            comparison.result.add_difference(snapshot.did, description)
        async for chunk in read.records():
            await self._in_thread(comparison.compare_chunk, chunk)
        await self._in_thread(comparison.finish)
        return comparison.result

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **_: P.kwargs) -> T:
        """Run a function in the thread, with positional arguments only: the type of `args` requires that of `_`."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *args))


@asynccontextmanager
async def open_auditor(
    settings: Settings, db: Database, timeouts: AuditTimeouts | None = None
) -> AsyncIterator[Auditor]:
    """Open an auditor with the clients that the settings describe. It sends no requests to hosts that are paused."""
    async with open_outbound_client(settings) as outbound:
        outbound.hosts.restore(await db.hosts.load())
        auditor = Auditor(
            db,
            make_did_resolver(settings, outbound),
            make_pds_client(settings, outbound),
            await stored_policy(settings, db),
            concurrency=audit_concurrency(settings),
            timeouts=timeouts,
        )
        try:
            yield auditor
        finally:
            auditor.close()


def audit_concurrency(settings: Settings) -> int:
    """Return the number of repos that are audited at a time, each with a database connection."""
    return min(settings.resync_workers, MAX_CONCURRENCY)


def _comparable_head(repo: Repo | None) -> Head:
    """Return the head of a repo that can be compared; raise `SkippedRepoError` otherwise."""
    if repo is None:
        raise SkippedRepoError(NOT_IN_DATABASE)
    if not repo.tracked:
        raise SkippedRepoError("not tracked")
    if not repo.active:
        raise SkippedRepoError(f"inactive: {repo.hosting_status or 'reported by the relay'}")
    if repo.sync_status is not SyncStatus.SYNCHRONIZED or repo.head is None:
        raise SkippedRepoError(f"not synchronized: {repo.sync_reason}")
    return repo.head
