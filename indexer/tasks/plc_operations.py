"""Read the operations of a PLC directory, and store what they prove (docs/protocol.md#exports-of-operations).

The import and the daemon share the position: one of them continues where the other one has stopped.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from time import time

from indexer.atproto.did_document import parse_did_document
from indexer.atproto.plc import LogEntry, PlcChain, document_of
from indexer.concurrency.stage_progress import StageProgress
from indexer.db import Database, DatabaseError
from indexer.db.crawls import CrawlProgress
from indexer.db.periodic import run_periodically
from indexer.db.shard_lock import OPERATIONS
from indexer.errors import PlcLogError, UnavailableError
from indexer.net.identity.did_resolver import denied_identity, identity_of
from indexer.net.identity.plc_export import PlcExport, ReadOperations, UnknownPositionError, position_of
from indexer.reasons import LogFlaw
from indexer.sync.identity import CERTAIN_DENIALS, FINGERPRINT_BYTES, StoredIdentity, add_denial
from indexer.telemetry.conditions import PLC_EXPORT_FAILING, PLC_OPERATIONS_UNPROVEN, PLC_POSITION_UNKNOWN, Conditions
from indexer.telemetry.metrics import Metrics

ALL = "*"
"""The collection of a crawl that stores the identities of all DIDs."""
RECENT_SECONDS = 3_600.0
"""A lookup may still give the identity from before an operation, if it is up to so much later. If they differ, the
identity is looked up again. A lookup that is later than this is right: it includes operations that are not read yet."""

Known = Mapping[str, StoredIdentity]
"""Stored identities by DID."""


@dataclass(slots=True)
class _Judged:
    """The result of the verification of operations.

    Attributes:
        stored: Identities to store, with their chains.
        stale: DIDs to look up again.
        changed: DIDs that all processes drop from memory.
        results: The number of operations by result.
        flaw: The reason why the last operation that should have proven something did not; None if all did.
    """

    stored: list[StoredIdentity] = field(default_factory=list)
    stale: set[str] = field(default_factory=set)
    changed: list[str] = field(default_factory=list)
    results: Counter[str] = field(default_factory=Counter)
    flaw: PlcLogError | None = None


def _judge(
    operations: Sequence[LogEntry], wanted: set[str], tracked: set[str], known: Known, *, allow_http: bool
) -> _Judged:
    """Verify operations with the chains of the `known` identities; skip operations of DIDs that are not `wanted`."""
    judged, now = _Judged(), time()
    chains, last = dict[str, PlcChain](), dict[str, float]()
    for one in operations:
        did, before = one.did, known.get(one.did)
        if did not in wanted:
            judged.results["skipped"] += 1
            continue
        if (chain := chains.get(did)) is None:
            packed = before and before.chain
            chain = PlcChain.from_bytes(did, packed[FINGERPRINT_BYTES:]) if packed else PlcChain(did)
            chains[did] = chain
        newest, accepted_at = chain.accepted_at, min(now, one.accepted_at.timestamp())
        if newest is not None and (one.accepted_at < newest or one.cid in chain):
            judged.results["repeated"] += 1
            continue
        try:
            chain.append(one.parse(), one.accepted_at)
        except PlcLogError as error:
            judged.results["unproven"] += 1
            if before is None or before.fetched_at < accepted_at + RECENT_SECONDS:
                judged.stale.add(did)
            if newest is not None or error.reason is not LogFlaw.BROKEN_CHAIN:
                judged.flaw = error
        else:
            judged.results["proven"] += 1
            last[did] = accepted_at
    for did, accepted_at in last.items():
        before = known.get(did)
        identity = _identity(chains[did], before, accepted_at, tracked=did in tracked, allow_http=allow_http)
        chain_bytes = identity.fingerprint + chains[did].to_bytes()
        if before is not None and before.fetched_at > accepted_at:
            differs = identity.fingerprint != before.fingerprint and before.fetched_at < accepted_at + RECENT_SECONDS
            identity = replace(before, stale=before.stale or identity.stale or differs)
        judged.stored.append(replace(identity, chain=chain_bytes))
        is_recent = did in tracked and accepted_at > now - RECENT_SECONDS  # a lookup may have given the state before
        if is_recent if before is None else _remembered(identity) != _remembered(before):
            judged.changed.append(did)
    judged.changed += judged.stale
    return judged


def _remembered(identity: StoredIdentity) -> tuple[bytes, bool, int]:
    """Return the parts of an identity that processes keep in memory."""
    return identity.fingerprint, identity.stale, identity.denials


def _identity(
    chain: PlcChain, before: StoredIdentity | None, read_at: float, *, tracked: bool, allow_http: bool
) -> StoredIdentity:
    """Return the identity after the last operation of a chain.

    After a tombstone, or an operation that undoes one, the identity of a tracked repo is stale: the lookup that follows
    changes the repo.
    """
    did, state = chain.did, chain.head.state if chain.head else None
    if state is None:
        denied = denied_identity(did, CERTAIN_DENIALS, read_at)
        identity = add_denial(before or denied, denied)
    else:
        identity = identity_of(parse_did_document(document_of(did, state), did, allow_http=allow_http), read_at)
    stale = tracked and identity.denials != (before.denials if before else 0)
    return replace(identity, stale=stale, handle_wanted=tracked or (before is not None and before.handle_wanted))


@dataclass(eq=False)
class PlcOperations:
    """Stores what the operations of a directory prove, and the position, in one transaction for each page.

    An operation that cannot be verified changes nothing: the identity of its repo is looked up again.

    Attributes:
        allow_http: Accept PDSes with http:// URLs.
        interval: Seconds between two calls of `follow`.
        stage: Its progress. Each page is work.
    """

    db: Database
    export: PlcExport
    conditions: Conditions
    metrics: Metrics
    allow_http: bool
    interval: float = 5.0

    def __post_init__(self) -> None:
        self.stage = StageProgress("PLC operations")

    async def begin(self, *, everything: bool = False) -> CrawlProgress:
        """Return the stored progress, or a new one. With `everything`, identities of all DIDs are stored."""
        for collection in (ALL,) if everything else (ALL, ""):
            stored = await self.db.crawls.progress("identities", self.export.url, collection)
            if stored is not None:
                return stored
        return CrawlProgress("identities", self.export.url, ALL if everything else "", began_at=time())

    async def read(
        self,
        progress: CrawlProgress,
        source: AsyncGenerator[ReadOperations],
        on_page: Callable[[CrawlProgress, float], None] = lambda _progress, _read_until: None,
    ) -> CrawlProgress:
        """Store the operations of a source after the stored progress; return the progress after them.

        If another process stores some meanwhile, the rest is not read. `on_page` is called after each page, with the
        time up to which all operations were read.

        Raises:
            UnavailableError: The source or the database is unavailable. The progress so far is stored.
        """
        async with aclosing(source):
            async for read in source:
                with self.stage.busy():
                    after = await self._store(progress, read)
                if after is None:
                    return progress
                progress = after
                on_page(progress, read.read_until)
        return progress

    async def _store(self, progress: CrawlProgress, read: ReadOperations) -> CrawlProgress | None:
        """Store the operations; return the progress after them, or None if another process has changed it."""
        dids = {one.did for one in read.operations}
        tracked = await self.db.repos.tracked(list(dids))
        known = await self.db.identities.stored(list(dids))
        # A chain counts as complete, also that of a repo that is not tracked any more.
        chained = {did for did, identity in known.items() if identity.chain is not None}
        wanted = dids if progress.collection == ALL else tracked | chained
        judged = await asyncio.to_thread(_judge, read.operations, wanted, tracked, known, allow_http=self.allow_http)
        after = replace(
            progress,
            cursor=position_of(read.operations[-1]) if read.operations else progress.cursor,
            listed=progress.listed + len(read.operations),
            found=progress.found + judged.results["proven"],
            finished_at=max(progress.finished_at or 0.0, read.read_until),
        )
        if not await self.db.crawls.save_operations(progress, after, judged.stored, judged.stale, judged.changed):
            return None
        for result, count in judged.results.items():
            self.metrics.plc_operations[result].inc(count)
        if judged.flaw is not None:
            message = f"{self.export.url} has operations that prove nothing: {judged.flaw}; their DIDs are looked up"
            self.conditions.report(PLC_OPERATIONS_UNPROVEN, message=message)
        return after

    async def run(self) -> None:
        """Follow the directory forever, while no other process does. Only an exception that is a bug ends it."""
        await run_periodically(self.follow, self.interval, self.stage)

    async def follow(self) -> None:
        """Read all pages, then the stream until it ends. Without a position, begin with the stream."""
        async with self.db.shard_locks.open(OPERATIONS) as lock:
            if not await lock.claim():
                return
            self.stage.idle()
            try:
                progress = await self.begin()
                if progress.cursor is not None:
                    progress = await self.read(progress, self.export.pages(progress.cursor))
                    self.conditions.end(PLC_EXPORT_FAILING)
                    self.conditions.end(PLC_POSITION_UNKNOWN)
                if progress.cursor is None or progress.cursor.isdigit():
                    progress = await self.read(progress, self.export.stream(progress.cursor))
            except DatabaseError:
                raise
            except UnknownPositionError as error:
                self.conditions.report(PLC_POSITION_UNKNOWN, message=f"{error}; the directory is not followed")
            except UnavailableError as error:
                self.conditions.report(PLC_EXPORT_FAILING, message=f"{error}; retried")
