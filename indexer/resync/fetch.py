"""The first step of a resync: fetch the export of a claimed repo from its sources, until one of them has a usable one.

While it downloads, it holds no database connection. The second step (`apply.Applies`) verifies and writes the export.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from time import time

import structlog

from indexer.crash_points import crash_point
from indexer.db import DatabaseError
from indexer.errors import RefusedWriteError, UnavailableError, UpstreamError
from indexer.net.identity.identity_cache import CachedIdentity, IdentityCache
from indexer.net.pds.pds_client import LARGE_BYTES, PdsClient
from indexer.reasons import Desync, FetchFailure, Rejection
from indexer.resync.apply import Applies
from indexer.resync.shares import Phase, PostponedError, Resync, Shares
from indexer.resync.sparse import SparseDownload, SparseFetch, Stored
from indexer.sync.export import ExportReader, Snapshot
from indexer.sync.policy import Policy, is_future
from indexer.sync.repo import Head, Repo, is_follow_up, needs_export
from indexer.telemetry.conditions import EQUIVOCATIONS, Conditions
from indexer.telemetry.metrics import Metrics

Attempt = Callable[[Resync, Shares, CachedIdentity], Awaitable[str | None]]
"""Returns the result of a resync; None if another way has to be tried."""
Blocks = ExportReader | SparseDownload

log = structlog.get_logger(__name__)


class _PerhapsMovedError(UnavailableError):
    """A newer rev than that of the PDS was reported, and it is not certain now that the account has this PDS."""

    def __init__(self) -> None:
        super().__init__(FetchFailure.EXPORT_STALE, "a newer rev was reported, and the account may have moved")


@dataclass(eq=False)
class ResyncAttempts:
    """Brings claimed repos to the state of the network, one attempt per call of `attempt`.

    `sources` are asked for an export in this order: the base URL of a relay, or None for the repo's own PDS. If the PDS
    is among them, it is asked for the chosen records alone first. `policy` returns the policy with the present scope.
    """

    applies: Applies
    identities: IdentityCache
    pds: PdsClient
    policy: Callable[[], Policy]
    metrics: Metrics
    sources: Sequence[str | None]
    conditions: Conditions
    sparse: SparseFetch

    async def attempt(self, resync: Resync, shares: Shares, identity: CachedIdentity) -> str:
        """Resync one repo; return "synchronized", "unchanged", or the reason why the repo is still desynchronized.

        `identity` has a key and a PDS.

        Raises:
            PostponedError: The repo is to be claimed again: its export would exceed a share, the scope has changed, or
                the account has another PDS than the identity.
            UnavailableError: No source has a usable export.
            UpstreamError: The last export was rejected.
            DatabaseError: The database is unavailable.
            ClaimLostError: The claim is lost. As with the other errors, nothing has changed, except that a
                DatabaseError at COMMIT may hide a success.
        """
        claimed = resync.claimed
        resync.enter(Phase.LATEST_COMMIT)
        policy = self.policy()
        if await self._is_unchanged(claimed, identity, policy):
            return await self.applies.write(resync, policy, identity.key, None)
        failure: UpstreamError | UnavailableError = UnavailableError(FetchFailure.UNREACHABLE, "no source configured")
        # Another source may lack what the stream of the host has sent before.
        sources = self.sources if resync.subscribed is None else (None,)
        attempts: list[tuple[str | None, Attempt]] = [("records", self._attempt_sparse)] if None in sources else []
        attempts += [(source or identity.pds, partial(self._attempt_from, source)) for source in sources]
        for name, attempt in attempts:
            try:
                if result := await attempt(resync, shares, identity):
                    return result
            except DatabaseError:
                raise
            except (UpstreamError, UnavailableError) as error:
                failure = error
                log.debug("resync.source-failed", did=claimed.did, source=name, error=str(error))
                if isinstance(error, _PerhapsMovedError):
                    break  # an export would have the same rev
        permanent = isinstance(failure, UnavailableError) and failure.reason.is_permanent
        if permanent and None in self.sources and not await self._is_host(claimed.did, identity):
            raise UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE, f"the account may have moved: {failure}")
        raise failure

    async def keep_stored(self, resync: Resync) -> bool:
        """Make a repo that only a request has desynchronized follow its stream again, after its fetch has failed.

        Return False if it has to be fetched. Its buffered events are drained, and `attempts` delays the next request.
        """
        claimed, policy, identity = resync.claimed, self.policy(), self.identities.peek(resync.claimed.did)
        if not is_follow_up(claimed, policy.scope) or claimed.newer_is_verified:
            return False
        key = identity.key if identity and not identity.doubtful else None
        with suppress(PostponedError, RefusedWriteError):
            await self.applies.write(resync, policy, key, None, failed=True)
            return True
        return False

    async def _attempt_from(self, source: str | None, resync: Resync, shares: Shares, identity: CachedIdentity) -> str:
        claimed = resync.claimed
        async with AsyncExitStack() as stack:
            resync.enter(Phase.DOWNLOAD)
            with self.metrics.batch_seconds["fetch"].time():
                opened = self.pds.open_export(claimed.did, source or identity.pds or "")
                download = await stack.enter_async_context(opened)
                shares.opened(resync, download, time())
                while not await download.fetch(resync.reserved or LARGE_BYTES):
                    shares.reserve(resync, time())
            resync.enter(Phase.VERIFY)
            export, verified_by = await self._verify(claimed, download.reader, identity)
            crash_point("export.verified")
            last = source is self.sources[-1]
            if last and source is None and export.head.rev < _newest_known(claimed):
                last = await self._is_host(claimed.did, identity)
            self._check_rev(claimed, export.head, last=last)
            return await self.applies.write(resync, self.policy(), verified_by.key, export)

    async def _attempt_sparse(self, resync: Resync, shares: Shares, identity: CachedIdentity) -> str | None:
        """Resync with only the chosen records; return None if the export is to be fetched.

        If the rev is old, or the repo has another state with the same rev, it raises: the sources of exports are asked.
        """
        policy, claimed, pds = self.policy(), resync.claimed, identity.pds or ""
        resync.enter(Phase.DOWNLOAD)
        opened = partial(shares.opened, resync, now=time())
        stored, is_possible = Stored(), self.sparse.is_possible(claimed.did, pds, policy)
        if claimed.head and not needs_export(claimed, policy.scope) and is_possible:
            stored = Stored(claimed.head.commit, await self.applies.stored(claimed.did))
        with self.metrics.batch_seconds["fetch"].time():
            download = await self.sparse.fetch(claimed.did, pds, policy, opened, stored)
        if download is None:
            return None
        if download.root == stored.commit:
            if claimed.newer_is_verified or not await self._is_current(claimed, identity):
                if not claimed.newer_is_verified and not await self._is_newer_elsewhere(claimed):
                    raise _PerhapsMovedError
                raise UnavailableError(FetchFailure.EXPORT_STALE, "the host lacks the newer rev that is known")
            return await self.applies.write(resync, policy, identity.key, None)
        resync.enter(Phase.VERIFY)
        export, verified_by = await self._verify(claimed, download, identity)
        self._check_rev(claimed, export.head, last=await self._is_latest(claimed, export.head.rev, identity))
        return await self.applies.write(resync, policy, verified_by.key, export)

    async def _is_latest(self, claimed: Repo, rev: str, identity: CachedIdentity) -> bool:
        """Return True if only unverified revs above `rev` are known, but no other source and no PDS reports one.

        Raises:
            PostponedError: The account has another PDS.
            UnavailableError: It is not certain now that the account has this PDS.
        """
        stored = claimed.head.rev if claimed.head else ""
        if not stored < rev < _newest_known(claimed) or rev < (claimed.latest_verified_rev or ""):
            return False
        if await self._is_newer_elsewhere(claimed, rev):
            return False
        if not await self._is_host(claimed.did, identity):
            raise _PerhapsMovedError
        return True

    async def _is_newer_elsewhere(self, claimed: Repo, rev: str = "") -> bool:
        """Return True if another source than the PDS reports a rev above `rev` and the stored one."""
        known = max(rev, claimed.head.rev if claimed.head else "")
        for source in filter(None, self.sources):
            with suppress(UnavailableError):
                if (await self.pds.fetch_latest_commit(claimed.did, source))[1] > known:
                    return True
        return False

    async def _is_unchanged(self, claimed: Repo, identity: CachedIdentity, policy: Policy) -> bool:
        """Return True if the PDS reports the stored head as its latest commit, so that no export is needed.

        It is not asked if a newer rev or a changed path is known and the records are requested next, with the commit.
        """
        if claimed.head is None or identity.pds is None or needs_export(claimed, policy.scope):
            return False
        newer = claimed.head.rev < _newest_known(claimed) or claimed.did in self.sparse.hints
        if newer and None in self.sources and self.sparse.is_possible(claimed.did, identity.pds, policy):
            return False
        try:
            latest = await self.pds.fetch_latest_commit(claimed.did, identity.pds)
        except UnavailableError as error:
            if not error.reason.counts_as_attempt:
                raise
            return False
        return latest == (claimed.head.commit, claimed.head.rev) and await self._is_current(claimed, identity)

    async def _is_current(self, claimed: Repo, identity: CachedIdentity) -> bool:
        """Return True if the stored head, which this PDS reports as the latest, is certainly that of the account.

        If a newer rev is known, this may be a former PDS of the account.
        """
        doubtful = identity.stale or (claimed.head.rev if claimed.head else "") < _newest_known(claimed)
        return not doubtful or await self._is_host(claimed.did, identity)

    async def _is_host(self, did: str, identity: CachedIdentity) -> bool:
        """Return True if it is certain that the account has the PDS of this identity: the directory said so just now.

        Raises:
            PostponedError: The account has another PDS.
            UnavailableError: As `IdentityCache.lookup` raises it.
        """
        if not identity.is_recent(time()):
            before, identity = identity, await self.identities.lookup(did, refresh=True)
            if identity.pds != before.pds:
                raise PostponedError
        return identity.is_recent(time())

    async def _verify(self, claimed: Repo, blocks: Blocks, identity: CachedIdentity) -> tuple[Snapshot, CachedIdentity]:
        """Verify the export or the chosen records, with a newer key if the cached one does not verify its signature."""
        try:
            return await self._verify_with(claimed, blocks, identity), identity
        except UpstreamError as error:
            if error.reason is not Rejection.SIGNATURE_INVALID:
                raise
        identity = await self.identities.lookup(claimed.did, refresh=True)
        return await self._verify_with(claimed, blocks, identity), identity

    async def _verify_with(self, claimed: Repo, blocks: Blocks, identity: CachedIdentity) -> Snapshot:
        if identity.key is None:
            raise UnavailableError(FetchFailure.IDENTITY_MISSING, identity.problem or "no key")
        return await self.applies.verify(claimed.did, blocks, identity.key, self.policy().limits)

    def _check_rev(self, claimed: Repo, exported: Head, *, last: bool) -> None:
        """Reject a verified export because of its rev. Of two states with one rev, the last source's is accepted."""
        rev = exported.rev
        if is_future(rev, time(), self.policy().limits):
            raise UpstreamError(Rejection.FUTURE_REV, rev)
        oldest = max("" if last else _newest_known(claimed), claimed.head.rev if claimed.head else "")
        if rev < oldest:  # another source may be newer than this mirror
            raise UnavailableError(FetchFailure.EXPORT_STALE, f"{rev} < {oldest}")
        if claimed.head is not None and rev == claimed.head.rev and exported.data != claimed.head.data:
            if not last:
                raise UnavailableError(FetchFailure.EXPORT_STALE, f"differs from the stored state at {rev}")
            log.debug("resync.equivocation", did=claimed.did, rev=rev)
            message = f"{claimed.did} has another tree at {rev} than before; it was applied"
            self.conditions.report(EQUIVOCATIONS, message=message)
            self.metrics.desynchronized[Desync.EQUIVOCATION].inc()


def _newest_known(claimed: Repo) -> str:
    """Return the newest rev that was received or listed, or "". An unverified one may be made up."""
    return max(claimed.latest_verified_rev or "", claimed.latest_unverified_rev or "")
