"""Read a Jetstream, and make the repos due that its events name (docs/protocol.md#hints).

The rows and the cursor are written in one transaction. The cursor is a time, so it is valid at every Jetstream. Their
clocks differ, so a connection begins a little before it: an event that is received again changes nothing.
"""

import asyncio
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
from indexer.db.periodic import DatabaseAttempt, when_available
from indexer.db.scope import CurrentScope
from indexer.live.batch_writer import SettledTotals, WriterSettings
from indexer.live.stream_position import StreamPosition
from indexer.net.identity.identity_cache import IdentityCache
from indexer.net.new_accounts import NewAccounts
from indexer.net.relay.stream_socket import SUBSCRIBE_PATH
from indexer.net.relay.subscription import Subscription
from indexer.reasons import Desync
from indexer.sync.changes import Batch, RepoWrite
from indexer.sync.hints import JETSTREAM, Hint, HintPlan, decode_hint, plan_hint, wanted_patterns
from indexer.sync.policy import PlanContext
from indexer.sync.repo import Outcome, Repo
from indexer.sync.stream import Cursor, Watermark, resume_point
from indexer.telemetry.conditions import NEW_ACCOUNTS_LIMITED, Conditions
from indexer.telemetry.metrics import Metrics

MAX_PATHS = 10_000
"""Maximum number of changed paths in memory. A resync requests the path of its repo first."""
OVERLAP_MICROS = 10_000_000
"""How far before the cursor a connection begins, in microseconds."""


@dataclass(eq=False)
class HintReader:
    """Follows the hints about the accounts of one shard. `run` ends only with an exception that is a bug.

    `last_error`, `failing_since` and `last_message` are as in `FirehoseConsumer`.
    """

    db: Database
    subscription: Subscription
    scope: CurrentScope
    identities: IdentityCache
    settings: WriterSettings
    metrics: Metrics
    conditions: Conditions
    new_accounts: NewAccounts  # the limit on unknown accounts, of all hosts together
    paths: BoundedDict[str, str]  # the last changed path of each repo that is due, by DID
    wake: Callable[[], None]  # called when repos have become due
    ask: Callable[[str], None]  # called with the DID of an account, to ask its host for status and rev
    totals: SettledTotals = field(default_factory=SettledTotals)

    def __post_init__(self) -> None:
        self.stage = StageProgress("hint reader", needs_shard=True)
        self.position = StreamPosition(lambda: False)  # the batch writer only reads it
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
        """Return the cursor for a new connection. Wait until the scope names collections."""
        while not (path := self._path()):
            self.last_error = "the scope has all collections; name some, with `indexer scope set --collections`"
            self.failing_since = self.failing_since or monotonic()
            await asyncio.sleep(self.settings.retry_interval)
        self.subscription.path, self.last_error, self.failing_since = path, None, None
        cursors = await when_available(self.db.gaps.cursors, self.settings.retry_interval)
        epoch, stored = resume_point(cursors, JETSTREAM, self.settings.shard)
        self.position.begin(relay, epoch, Watermark(*stored) if stored else Watermark())
        seq = stored.seq if stored and relay not in self.subscription.oversized else None
        self.subscription.oversized.discard(relay)  # with the cursor, it would send the same message again
        return max(1, min(seq, _now_micros()) - OVERLAP_MICROS) if seq else None

    def _path(self) -> str:
        """Return the path of the stream, with the collections; "" if the scope has all collections."""
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
                kind = "unknown" if hint is None else hint.kind
                self.metrics.events_received[kind].inc()
                if hint is not None and self.settings.shard.owns(hint.did):
                    await self._queue.put(hint)
                else:
                    self.metrics.events[kind, Outcome.IGNORED].inc()

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
        """Write the effects of the hints; try again until the database accepts them."""
        reached = min(max(hint.time for hint in hints), _now_micros())
        while True:
            with DatabaseAttempt(self.stage) as attempt:
                while skipped := await self._write_once(hints, reached):
                    hints = [hint for hint in hints if hint.did in skipped]
            if attempt.error is None:
                break
            await asyncio.sleep(self.settings.retry_interval)
        if reached:
            self.position.clock.advance(reached / 1_000_000, time())

    async def _write_once(self, hints: Sequence[Hint], reached: int) -> AbstractSet[str]:
        """Write hints and the cursor; return the DIDs whose rows changed meanwhile: then the cursor stays."""
        dids, origin = {hint.did for hint in hints}, self.position.origin
        stored = await self.db.repos.load(list(dids))
        if self.scope.is_behind(stored.values()):
            await self.scope.refresh()
        with self.scope.in_use() as policy:
            version = policy.scope.version
            before = {did: stored.get(did) or Repo(did, from_stream=True, wanted_in=version) for did in dids}
            plans = self._plan(hints, before, PlanContext(policy, time()))
            after = {hint.did: plan.repo for hint, plan in plans}
            writes = [RepoWrite(before[did], repo) for did, repo in after.items() if repo is not before[did]]
            stale = frozenset([hint.did for hint, plan in plans if plan.refresh_identity])
            event_time = datetime.fromtimestamp(reached / 1_000_000, UTC).isoformat()
            cursor = Cursor(JETSTREAM, str(self.settings.shard), reached, event_time, epoch=origin.epoch)
            moves = reached > (self.position.watermark.position or 0)
            batch = Batch(tuple(writes), stale_identities=stale, cursors=(cursor,) if moves else ())
            skipped = (await self.db.write(batch)).skipped
        crash_point("hints.written")
        if moves and not skipped:
            self.position.begin(origin.relay, origin.epoch, Watermark(reached, event_time))
        self.identities.mark_stale(stale - skipped)
        self._settle([one for one in plans if one[0].did not in skipped], before)
        return skipped

    def _plan(
        self, hints: Iterable[Hint], before: Mapping[str, Repo], context: PlanContext
    ) -> list[tuple[Hint, HintPlan]]:
        """Plan each hint on the row that the hints before it leave."""
        rows, plans = dict(before), list[tuple[Hint, HintPlan]]()
        for hint in hints:
            repo = rows[hint.did]
            plan = plan_hint(repo, hint, context)
            changed = plan.repo is not repo
            if changed and _is_new(repo) and not self._may_add(hint.did, context.now):
                plan = HintPlan(repo)
            elif changed and hint.path:
                self.paths[hint.did] = hint.path
            rows[hint.did] = plan.repo
            plans.append((hint, plan))
        return plans

    def _may_add(self, did: str, now: float) -> bool:
        """Count an unknown account; return False if the hints have added too many."""
        if not self.new_accounts.is_limited(JETSTREAM, now):
            self.new_accounts.add(JETSTREAM, now)
            return True
        message = f"{did} and other unknown accounts are ignored; later events may add them"
        self.conditions.report(NEW_ACCOUNTS_LIMITED, JETSTREAM, message=message)
        return False

    def _settle(self, plans: Sequence[tuple[Hint, HintPlan]], before: Mapping[str, Repo]) -> None:
        """Count hints that were written, and start the resyncs and requests that they cause."""
        self.totals.settled += len(plans)
        for hint, plan in plans:
            self.metrics.events[hint.kind, plan.outcome].inc()
        for did in {hint.did for hint, plan in plans if plan.ask}:
            self.ask(did)
        due = [before[did] for did in {hint.did for hint, plan in plans if plan.outcome is Outcome.DESYNCHRONIZED}]
        for repo in due:
            self.metrics.desynchronized[Desync.NEW if _is_new(repo) else Desync.HINTED].inc()
        if due:
            self.wake()


def _is_new(repo: Repo) -> bool:
    return not (repo.known and repo.tracked)


def _now_micros() -> int:
    return int(time() * 1_000_000)
