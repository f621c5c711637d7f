"""Read a Jetstream, and let the repos be fetched that its events name (docs/protocol.md#hints).

The rows and the cursor are written in one transaction. The cursor is a time, so it counts for each instance. The clocks
of two instances differ, so a connection begins a little before it: an event that is received again changes nothing.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from time import monotonic, time
from urllib.parse import urlencode

from indexer.concurrency.bounded_dict import BoundedDict
from indexer.concurrency.stage_progress import StageProgress
from indexer.crash_points import crash_point
from indexer.db import Database
from indexer.db.periodic import DatabaseAttempt
from indexer.db.scope import CurrentScope
from indexer.live.batch_writer import SettledTotals, WriterSettings
from indexer.live.stream_position import StreamPosition
from indexer.net.identity.identity_cache import IdentityCache
from indexer.net.new_accounts import NewAccounts
from indexer.net.relay.stream_socket import SUBSCRIBE_PATH
from indexer.net.relay.subscription import Subscription
from indexer.reasons import Desync
from indexer.sync.changes import Batch, RepoWrite
from indexer.sync.hints import JETSTREAM, Hint, HintKind, decode_hint, plan_hint, wanted_patterns
from indexer.sync.policy import PlanContext
from indexer.sync.repo import Outcome, Repo, SyncStatus
from indexer.sync.stream import Cursor, Watermark, resume_point
from indexer.telemetry.conditions import NEW_ACCOUNTS_LIMITED, Conditions
from indexer.telemetry.metrics import Metrics

MAX_PATHS = 10_000
"""Changed paths that are remembered for the resyncs of their repos."""
OVERLAP_MICROS = 10_000_000
"""How far before the cursor a connection begins, in microseconds."""


@dataclass(slots=True)
class _Plans:
    """The plans of some hints, by DID: the row before, the row after, and what else follows."""

    drafts: dict[str, tuple[Repo, Repo]] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    stale: set[str] = field(default_factory=set)
    outcomes: list[tuple[str, HintKind, Outcome]] = field(default_factory=list)


@dataclass(eq=False)
class HintReader:
    """Follows the hints about the accounts of one shard. `run` ends only with an exception that is a bug.

    Attributes:
        paths: The last changed path of repos that are to be fetched, by DID.
        new_accounts: The limit on unknown accounts, of all hosts together.
        wake: Called when repos have become due.
        ask: Called with the DID of an account whose host is to be asked about it.
        totals: Counts the events.
        stage: Its progress. To write hints is work.
        position: The stored position. The batch writer, which has none of its messages, only reads it.
        last_error, failing_since, last_message: As those of a `FirehoseConsumer`.
    """

    db: Database
    subscription: Subscription
    scope: CurrentScope
    identities: IdentityCache
    settings: WriterSettings
    metrics: Metrics
    conditions: Conditions
    new_accounts: NewAccounts
    paths: BoundedDict[str, str]
    wake: Callable[[], None]
    ask: Callable[[str], None]
    totals: SettledTotals = field(default_factory=SettledTotals)

    def __post_init__(self) -> None:
        self.stage = StageProgress("hint reader", needs_shard=True)
        self.position = StreamPosition(lambda: False)
        self.last_error: str | None = None
        self.failing_since: float | None = None
        self.last_message: dict[str, float] = {}
        self._queue = asyncio.Queue[Hint](self.settings.batch_size)

    async def run(self) -> None:
        """Read and write hints forever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._receive(), name="hints")
            while True:
                if hints := await self._take():
                    await self._write(hints)
                elif self.subscription.connection is not None:
                    self.position.clock.advance(time(), time())
                if self.subscription.path != self._path():
                    self.subscription.reconnect()

    async def begin_connection(self, relay: str) -> int | None:
        """Return the cursor for a new connection, as soon as the scope has a filter."""
        while not (path := self._path()):
            self.last_error = "the scope has all collections, and a Jetstream is no source for them; name collections"
            self.failing_since = self.failing_since or monotonic()
            await asyncio.sleep(self.settings.retry_interval)
        self.subscription.path, self.last_error, self.failing_since = path, None, None
        while True:
            with DatabaseAttempt():
                cursors = await self.db.gaps.cursors()
                break
            await asyncio.sleep(self.settings.retry_interval)
        epoch, stored = resume_point(cursors, JETSTREAM, self.settings.shard)
        self.position.begin(relay, epoch, Watermark(*stored) if stored else Watermark())
        seq = stored.seq if stored and relay not in self.subscription.oversized else None
        self.subscription.oversized.discard(relay)  # it would send the same message again
        return max(1, min(seq, _now_micros()) - OVERLAP_MICROS) if seq else None

    def _path(self) -> str:
        """Return the path with the filter; "" if the scope has all collections."""
        scope = self.scope.scope
        if scope.collections.matches_all:
            return ""
        query = urlencode([("wantedCollections", pattern) for pattern in wanted_patterns(scope)], safe="*")
        return f"{SUBSCRIBE_PATH}?{query}".rstrip("?")

    async def _receive(self) -> None:
        async with aclosing(self.subscription.frames(self.begin_connection)) as frames:
            async for frame in frames:
                self.last_message[self.position.origin.relay] = monotonic()
                hint = decode_hint(frame)
                self.metrics.events_received[hint.kind if hint else "unknown"].inc()
                if hint is None:
                    self.metrics.events["unknown", Outcome.IGNORED].inc()
                else:
                    await self._queue.put(hint)

    async def _take(self) -> list[Hint]:
        """Return the hints of the next batch; none after `idle_after` without one."""
        try:
            async with asyncio.timeout(self.settings.idle_after):
                hints = [await self._queue.get()]
        except TimeoutError:
            return []
        await asyncio.sleep(self.settings.batch_window)
        while len(hints) < self.settings.batch_size and not self._queue.empty():
            hints.append(self._queue.get_nowait())
        return hints

    async def _write(self, hints: Sequence[Hint]) -> None:
        """Write what follows from the hints, however often the database fails."""
        reached = min(max(hint.time for hint in hints), _now_micros())
        owned: AbstractSet[str] = {hint.did for hint in hints if self.settings.shard.owns(hint.did)}
        self._count(Counter([(hint.kind, Outcome.IGNORED) for hint in hints if hint.did not in owned]))
        while True:
            with DatabaseAttempt(self.stage) as attempt:
                while skipped := await self._write_once([hint for hint in hints if hint.did in owned], reached):
                    owned = skipped
            if attempt.error is None:
                break
            await asyncio.sleep(self.settings.retry_interval)
        if reached:
            self.position.clock.advance(reached / 1_000_000, time())

    async def _write_once(self, hints: Sequence[Hint], reached: int) -> AbstractSet[str]:
        """Write hints and the cursor; return the DIDs whose rows changed meanwhile: then the cursor stays."""
        repos = await self.db.repos.load(list({hint.did for hint in hints}))
        if self.scope.is_behind(repos.values()):
            await self.scope.refresh()
        with self.scope.in_use() as policy:
            plans = self._plan(hints, repos, PlanContext(policy, time()))
            writes = [RepoWrite(before, after) for before, after in plans.drafts.values() if after is not before]
            cursors = [self._cursor(reached)] if reached > (self.position.watermark.position or 0) else []
            batch = Batch(tuple(writes), stale_identities=frozenset(plans.stale), cursors=tuple(cursors))
            skipped = (await self.db.write(batch)).skipped
        crash_point("hints.written")
        if cursors and not skipped:
            origin = self.position.origin
            self.position.begin(origin.relay, origin.epoch, Watermark(reached, cursors[0].event_time))
        self._settle(plans, [write for write in writes if write.repo.did not in skipped], skipped)
        return skipped

    def _plan(self, hints: Iterable[Hint], repos: Mapping[str, Repo], context: PlanContext) -> _Plans:
        plans, version = _Plans(), context.policy.scope.version
        for hint in hints:
            did = hint.did
            repo = repos.get(did) or Repo(did, from_stream=True, wanted_in=version)
            before, now = plans.drafts.get(did, (repo, repo))
            plan = plan_hint(now, hint, context)
            adds = plan.repo is not now and not (now.known and now.tracked)
            if adds and self.new_accounts.is_limited(JETSTREAM, context.now):
                message = f"{did} and other unknown accounts are ignored; a later event adds them"
                self.conditions.report(NEW_ACCOUNTS_LIMITED, JETSTREAM, message=message)
                plans.outcomes.append((did, hint.kind, Outcome.IGNORED))
                continue
            if adds:
                self.new_accounts.add(JETSTREAM, context.now)
            if hint.path and plan.repo is not now:
                self.paths[did] = hint.path
            plans.drafts[did] = before, plan.repo
            plans.outcomes.append((did, hint.kind, plan.outcome))
            if plan.ask:
                plans.asked.add(did)
            if plan.refresh_identity:
                plans.stale.add(did)
        return plans

    def _settle(self, plans: _Plans, written: Sequence[RepoWrite], skipped: frozenset[str]) -> None:
        """Let follow what a transaction makes possible."""
        broken = [write.before for write in written if write.before.sync_status is SyncStatus.SYNCHRONIZED]
        new = [write.before for write in written if not (write.before.known and write.before.tracked)]
        self.metrics.desynchronized[Desync.HINTED].inc(len(broken))
        self.metrics.desynchronized[Desync.NEW].inc(len(new))
        if broken or new:
            self.wake()
        self.identities.mark_stale(plans.stale - skipped)
        for did in plans.asked - skipped:
            self.ask(did)
        self._count(Counter([(kind, outcome) for did, kind, outcome in plans.outcomes if did not in skipped]))

    def _count(self, outcomes: Mapping[tuple[HintKind, Outcome], int]) -> None:
        for (kind, outcome), count in outcomes.items():
            self.metrics.events[kind, outcome].inc(count)
            self.totals.settled += count

    def _cursor(self, reached: int) -> Cursor:
        event_time = datetime.fromtimestamp(reached / 1_000_000, UTC).isoformat()
        return Cursor(JETSTREAM, str(self.settings.shard), reached, event_time, epoch=self.position.origin.epoch)


def _now_micros() -> int:
    return int(time() * 1_000_000)
