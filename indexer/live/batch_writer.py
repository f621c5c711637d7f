"""The batch writer: take messages from the inbox, plan them, and write the plan and the cursors in one transaction."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from math import inf
from time import monotonic, time

import structlog

from indexer.concurrency.stage_progress import StageProgress
from indexer.core.core import Core
from indexer.crash_points import crash_point
from indexer.db import Database, DatabaseError
from indexer.db.periodic import DatabaseAttempt
from indexer.db.scope import CurrentScope
from indexer.errors import RefusedWriteError
from indexer.live.account_limits import AccountLimits
from indexer.live.copies import Copies
from indexer.live.held_messages import HOLD_SECONDS, HeldMessages
from indexer.live.inbox import Inbox
from indexer.live.key_lookups import KeyLookups
from indexer.live.repo_row_cache import RepoRowCache
from indexer.live.stream_position import StreamPosition
from indexer.live.verification_ahead import VerificationAhead
from indexer.reasons import Desync, Rejection
from indexer.sync.batch import BatchPlan, ReceivedMessage, SettledMessage, is_quick, plan_batch, plan_refusal
from indexer.sync.changes import Batch
from indexer.sync.events import MalformedEvent, UnknownEvent
from indexer.sync.policy import KeyStateOf, PlanContext
from indexer.sync.repo import Outcome, Repo
from indexer.sync.shard import Shard
from indexer.sync.stream import Cursor, Origin, Position
from indexer.telemetry.conditions import MESSAGES_REFUSED, Conditions
from indexer.telemetry.metrics import Metrics

BATCH_SIZE = 500
"""The maximum number of messages in a batch."""

MAX_FAILURES = 5
"""Failures of a single message in a row, each followed by a write that succeeds, after which it is rejected."""

# With these outcomes, a `Desync` reason says why the repo is desynchronized now. With others, it says why the event
# changed nothing.
_DESYNCHRONIZING = frozenset({Outcome.DESYNCHRONIZED, Outcome.APPLIED})

_WITHOUT_TIME = (UnknownEvent, MalformedEvent)

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WriterSettings:
    """Settings of the writer; times are seconds.

    Attributes:
        batch_window: The time from the beginning of one batch to that of the next, unless `batch_size` messages wait,
            or more bytes than are read at a time.
        retry_interval: Pause after a database error.
        idle_after: The shard counts as caught up after this time without a message.
        hold: The time in which another stream must bring what an early commit lacks.
    """

    shard: Shard = Shard()  # noqa: RUF009 - immutable
    batch_size: int = BATCH_SIZE
    batch_window: float = 0.03
    retry_interval: float = 1.0
    idle_after: float = 5.0
    hold: float = HOLD_SECONDS


class BatchSize:
    """The maximum number of messages in the next batch.

    A batch that fails is halved. Each batch that is written doubles the size again. A message that fails alone several
    times is the cause.
    """

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._failures = 0
        self.current = max_size

    def add_success(self) -> None:
        """Note a batch that was written."""
        self._failures = 0
        self.current = min(self._max_size, 2 * self.current)

    def add_failure(self, count: int) -> bool:
        """Note that a batch of `count` messages failed, although the database stores an empty one.

        Returns:
            True if the batch is a single message, and it is the cause: also at each further failure, because the
            message could not be rejected.
        """
        self.current = max(1, count // 2)
        self._failures = self._failures + 1 if count == 1 else 0
        return self._failures >= MAX_FAILURES


@dataclass(slots=True)
class SettledTotals:
    """Totals since the start of the process, with the newest rejected message of each reason as text for people."""

    settled: int = 0
    rejected: Counter[Rejection] = field(default_factory=Counter)
    examples: dict[Rejection, str] = field(default_factory=dict)


@dataclass(eq=False)
class BatchWriter:
    """Writes the batches of one shard, as long as the event `owned` is set.

    Attributes:
        positions: The positions in the streams from which the messages come. `HostStreams` adds and removes some.
        compare: Takes the messages that are settled, and then copies of messages that are settled.
    """

    db: Database
    inbox: Inbox
    keys: KeyLookups
    positions: Sequence[StreamPosition]
    owned: asyncio.Event
    settings: WriterSettings
    metrics: Metrics
    conditions: Conditions
    account_limits: AccountLimits
    scope: CurrentScope
    core: Core
    compare: Callable[[Iterable[SettledMessage], Iterable[ReceivedMessage]], None]
    totals: SettledTotals = field(default_factory=SettledTotals)

    def __post_init__(self) -> None:
        self._batch_size = BatchSize(self.settings.batch_size)
        self._batch_began_at = -inf
        self._rows = RepoRowCache()
        self.stage = StageProgress("batch writer", needs_shard=True)
        self._copies = Copies(self.inbox)
        self._held = HeldMessages(self.inbox, self.settings.hold)
        self._ahead = VerificationAhead(self.core, self.inbox, self._copies, self._rows, self.keys.key_state)

    @property
    def lag(self) -> float | None:
        """The least lag of the streams, each of which has all messages; None if none is known."""
        return min([one.lag for one in self._counted if one.lag is not None], default=None)

    @property
    def cursor_age(self) -> float | None:
        """The least age of the cursors; None if none is known."""
        return min([one.cursor_age for one in self._counted if one.cursor_age is not None], default=None)

    @property
    def _counted(self) -> list[StreamPosition]:
        return [position for position in self.positions if not position.beside_relays]

    async def run(self) -> None:
        """Write batches forever. Only an exception that is a bug ends it."""
        try:
            while True:
                await self._write_next()
        finally:
            self._ahead.clear()

    async def _write_next(self) -> None:
        """Take the next batch and write it; or, after some time without a message, save the cursors."""
        # A message that arrives when no batch has begun for a while is taken at once, and so is a full batch.
        taken = await self.inbox.take(
            self._batch_size.current * self.inbox.streams,  # of each message, all other streams may have a copy
            not_before=self._batch_began_at + self.settings.batch_window,
            idle_timeout=self.settings.idle_after,
        )
        messages = self._held.hold_back(self.keys.hold_back(self._without_copies(taken)))
        if messages:
            self._batch_began_at = monotonic()
        crash_point("batch.taken")
        if not self.owned.is_set():
            self._rows.clear()
            self._ahead.clear()
            await self.owned.wait()
        with DatabaseAttempt(self.stage) as attempt:
            if messages:
                await self._write_or_halve(messages)
            elif not taken:
                await self._save_positions()
        if attempt.error is not None:
            # If the transaction was committed all the same, the messages count as replayed the next time.
            self._rows.clear()
            self.inbox.put_back(messages)
            await asyncio.sleep(self.settings.retry_interval)

    def _without_copies(self, taken: Sequence[ReceivedMessage]) -> Sequence[ReceivedMessage]:
        """Return the messages of a batch, and put the rest back. Copies are dropped, or wait."""
        first, copies = self._copies.hold_back(taken)
        self._finish(copies)
        self._count_copies(copies)
        self.compare((), copies)
        self.inbox.put_back(first[self._batch_size.current :])
        return first[: self._batch_size.current]

    async def _write_or_halve(self, messages: Sequence[ReceivedMessage]) -> None:
        """Write a batch. If its content makes the database fail, continue with half of it, or reject a single message.

        Raises:
            DatabaseError: The messages are to be put back. Those that were written although the answer was lost are
                then recognized as replayed.
        """
        try:
            await self._write(messages)
        except (RefusedWriteError, DatabaseError) as error:
            refused = isinstance(error, RefusedWriteError)
            if isinstance(error, DatabaseError) and not await self.db.answers_after(error):
                raise
            if self._batch_size.add_failure(len(messages)):
                await self._reject(messages[0], str(error))
            elif refused:
                log.debug("batch.refused", messages=len(messages), error=str(error))
                self.inbox.put_back(messages)
                return
            else:
                raise
        self._batch_size.add_success()

    async def _write(self, messages: Sequence[ReceivedMessage]) -> None:
        dids = [did for did in {message.event.did for message in messages} if did]
        with self.metrics.batch_seconds["load"].time():
            cached = self._rows.rows(dids)
            others = [did for did in dids if did not in cached]
            loaded = await self.db.repos.load(others) if others else {}
            if self.scope.is_behind(loaded.values()):
                await self.scope.refresh()
            await self.keys.identities.preload(dids)
        repos = cached | loaded
        with self.metrics.batch_seconds["verify-ahead"].time():
            await self._ahead.finish()
        with self.scope.in_use() as policy:
            with self.metrics.batch_seconds["plan"].time():
                key_state_of = self.keys.key_states(dids).get
                # Also one that is not connected now: after a start, the first stream is some seconds ahead.
                several = len(self.positions) > 1
                context = PlanContext(policy, time(), other_streams=several, overdue=self._held.overdue)
                context = self.account_limits.apply(dids, repos, key_state_of, context)
                plan = await self._plan(messages, repos, key_state_of, context)
            crash_point("batch.planned")
            await self._apply(messages, plan, plan.unchanged & cached.keys())

    async def _plan(
        self,
        messages: Sequence[ReceivedMessage],
        repos: Mapping[str, Repo],
        key_state_of: KeyStateOf,
        context: PlanContext,
    ) -> BatchPlan:
        """Plan a batch: on the event loop if it is quick, else in a thread.

        A thread that plans and the event loop wait for each other's interpreter lock, for up to 5 ms each time.
        """
        prepared = await self._ahead.prepare(messages, repos, key_state_of, context)
        self._ahead.begin(repos, context, self._batch_size.current)
        if is_quick(messages, repos, key_state_of, context.policy, prepared):
            return plan_batch(messages, repos, key_state_of, context, prepared)
        return await asyncio.to_thread(plan_batch, messages, repos, key_state_of, context, prepared)

    async def _reject(self, message: ReceivedMessage, detail: str) -> None:
        """Write the dead letter of a message whose effects the database cannot store, and desynchronize its repo."""
        log.debug("message.refused", did=message.did, seq=message.seq, error=detail)
        text = f"{message.did or 'a message without a DID'}, seq {message.seq}: {detail}; it becomes a dead letter"
        self.conditions.report(MESSAGES_REFUSED, message=text)
        context, repo = PlanContext(self.scope.policy, time()), None
        if message.did is not None:
            repo = (await self.db.repos.load([message.did])).get(message.did)
        try:
            await self._apply([message], plan_refusal(message, repo, detail, context))
        except RefusedWriteError:  # the row of the repo is the cause
            await self._apply([message], plan_refusal(message, None, detail, context))

    async def _apply(
        self, messages: Sequence[ReceivedMessage], whole: BatchPlan, unconfirmed: AbstractSet[str] = frozenset()
    ) -> None:
        """Write a plan and settle its messages.

        The plan of `unconfirmed` accounts used a cached row and writes nothing. Without a write, nobody compares the
        cached row with the stored one. So their messages are planned again on the stored row.
        """
        plan = whole.without(unconfirmed)
        with self.metrics.batch_seconds["apply"].time():
            done = [*(item.received for item in plan.settled), *self._copies.of(plan.settled)]
            reached = self._positions_if_done(done)
            cursors = tuple([self._cursor(*one) for one in reached])
            batch = Batch(plan.writes, tuple(plan.dead_letters), frozenset(plan.stale_identities), cursors)
            applied = await self.db.write(batch)
        for position, saved in () if applied.skipped else reached:
            position.saved = saved
        self._rows.put([write.repo for write in batch.writes])
        self._rows.drop(applied.skipped | unconfirmed)
        for action, count in applied.changes.items():
            self.metrics.record_changes[action, "true"].inc(count)
        self.account_limits.count(plan, applied.skipped, self.keys.key_state)
        await self._settle(messages, plan, applied.skipped | unconfirmed)

    async def _save_positions(self) -> None:
        """Save the cursors and the current time when no message is waiting."""
        if self.inbox.unsettled:
            return
        now, known = time(), [position for position in self.positions if position.is_known()]
        reached = [(position, position.watermark.position_if_done(())) for position in known]
        if cursors := tuple([self._cursor(*one, caught_up_at=now) for one in reached if one[1].seq is not None]):
            await self.db.write(Batch(cursors=cursors))
        for position, saved in reached:
            position.saved = saved
            position.clock.advance(now, now)
            self._show_cursor(position)

    def _positions_if_done(self, messages: Iterable[ReceivedMessage]) -> list[tuple[StreamPosition, Position]]:
        """Return the positions in the streams once these messages are done, of those that have moved.

        Where a stream begins is not saved before it has sent a message: the relay may refuse to begin there.
        """
        seqs = defaultdict[Origin, list[int]](list)
        for message in messages:
            if message.seq is not None:
                seqs[message.origin].append(message.seq)
        reached = [(one, one.watermark.position_if_done(seqs.get(one.origin, ()))) for one in self.positions]
        return [(one, position) for one, position in reached if position.seq is not None and position != one.saved]

    def _cursor(self, stream: StreamPosition, reached: Position, caught_up_at: float | None = None) -> Cursor:
        return Cursor(
            relay=stream.origin.relay,
            shard=str(self.settings.shard),
            seq=reached.seq or 0,
            event_time=reached.event_time,
            caught_up_at=stream.clock.reached if caught_up_at is None else caught_up_at,
            epoch=stream.origin.epoch,
        )

    def _finish(self, messages: Sequence[ReceivedMessage]) -> None:
        """Mark messages as done, whose effects are durable. Their times count up to the new position of the stream."""
        of_streams = defaultdict[Origin, list[ReceivedMessage]](list)
        for message in messages:
            of_streams[message.origin].append(message)
        for position in self.positions:
            if not (done := of_streams.get(position.origin)):
                continue
            position.watermark.mark_done([message.seq for message in done if message.seq is not None])
            reached = position.watermark.position or 0
            stored = [message.event for message in done if (message.seq or reached) <= reached]
            times = [(event.did, event.time) for event in stored if not isinstance(event, _WITHOUT_TIME)]
            position.clock.observe(times, time())
            self._show_cursor(position)
        self.inbox.settle(messages)

    def _show_cursor(self, position: StreamPosition) -> None:
        if (seq := position.watermark.position) is not None and not position.beside_relays:
            self.metrics.cursor_seq.labels(position.origin.relay).set(seq)

    async def _settle(self, messages: Sequence[ReceivedMessage], plan: BatchPlan, conflicts: frozenset[str]) -> None:
        """Settle the messages that were written, and start key lookups for the messages that wait for a key.

        The rows of the DIDs in `conflicts` have changed meanwhile, or may have. Their messages are planned again.
        """
        self.keys.identities.mark_stale(plan.stale_identities)
        written = plan.without(conflicts)
        copies, rejected_copies = self._copies.settle(written.settled)
        done = [item.received for item in written.settled]
        settled_dids = [message.event.did for message in done if message.event.did]
        self.keys.discard_results(settled_dids)
        self._held.discard_overdue(settled_dids)
        self._count(written)
        self._count_copies(copies)
        self.compare(written.settled, copies)
        planned = messages[: len(messages) - len(plan.postponed)]
        self._ahead.drop(planned)
        again = [message for message in planned if message.did in conflicts] if conflicts else []
        self.inbox.put_back([*again, *plan.postponed, *rejected_copies])
        waiting = defaultdict[str | None, list[ReceivedMessage]](list)
        for message in written.waiting:
            waiting[message.did].append(message)
        # Last, because a wait may end at once, and its messages come before these.
        for did, need in written.needed_keys.items():
            self.keys.start(need, waiting[did])
        for did, rev in written.early.items():
            if did in written.unchanged:
                self._held.hold(did, rev, waiting[did])
            else:
                self.inbox.put_back(waiting[did])
        self.keys.limit_waiting_bytes()
        self._finish([*done, *copies])
        crash_point("batch.settled")

    def _count(self, written: BatchPlan) -> None:
        """Count outcomes. The totals decide readiness, so those of hosts beside the relays do not count in them."""
        beside = {position.origin.relay for position in self.positions if position.beside_relays}
        counted = [item for item in written.settled if item.received.origin.relay not in beside]
        self.totals.settled += len(counted)
        self.totals.rejected.update([item.why for item in counted if isinstance(item.why, Rejection)])
        results = Counter([(received.event.kind, outcome, why) for received, outcome, why, _ in written.settled])
        for (kind, outcome, why), count in results.items():
            self.metrics.events[kind, outcome].inc(count)
            if isinstance(why, Rejection):
                self.metrics.rejected[why].inc(count)
            elif isinstance(why, Desync) and outcome in _DESYNCHRONIZING:
                self.metrics.desynchronized[why].inc(count)
        for letter in written.dead_letters:
            text = f"{letter.did or 'a message without a DID'}, seq {letter.seq}: {letter.detail or letter.reason.text}"
            if letter.relay not in beside:
                self.totals.examples[letter.reason] = text

    def _count_copies(self, copies: Sequence[ReceivedMessage]) -> None:
        self.totals.settled += len(copies)
        for (kind, origin), count in Counter([(copy.event.kind, copy.origin) for copy in copies]).items():
            self.metrics.events[kind, Outcome.REPLAYED].inc(count)
            if origin.host is None:  # metrics do not name hosts
                self.metrics.duplicate_events.labels(origin.relay).inc(count)
