"""The batch writer: take messages from the inbox, plan them, and write the plan and the cursor in one transaction."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from time import monotonic, time

from indexer.monitoring.metrics import Metrics
from indexer.reasons import Desync, Rejection
from indexer.service.live.inbox import Inbox
from indexer.service.live.key_lookups import KeyLookups
from indexer.service.live.stream_position import StreamPosition
from indexer.service.periodic import DatabaseAttempt
from indexer.store import Store
from indexer.sync.plan_batch import BatchPlan, ReceivedMessage, SettledMessage, plan_batch
from indexer.sync.plans import Batch, Cursor
from indexer.sync.policy import PlanContext, Policy
from indexer.sync.repo_transitions import Outcome
from indexer.sync.shard import Shard

# With these outcomes, a `Desync` reason says why the repo is desynchronized now. With others, it says why the event
# changed nothing.
_DESYNCHRONIZING = frozenset({Outcome.DESYNCHRONIZED, Outcome.APPLIED})


@dataclass(frozen=True, slots=True)
class WriterSettings:
    """Settings of the writer; times are seconds.

    Attributes:
        batch_size: The maximum number of messages in a batch.
        linger: How long a batch waits for more messages after its first one was queued.
        retry_interval: Pause after a database error.
        idle_after: The shard counts as caught up after this time without a message.
    """

    policy: Policy
    shard: Shard
    batch_size: int = 500
    linger: float = 0.05
    retry_interval: float = 1.0
    idle_after: float = 5.0


class BatchWriter:
    """Writes the batches of one shard, as long as the event `owned` is set.

    Attributes:
        last_error: The database error of the last batch; None if it was written.
        lag: Age of the newest written event in seconds; None before the first event.
        last_progress: When a batch was last started or written (monotonic seconds).
    """

    def __init__(
        self,
        store: Store,
        inbox: Inbox,
        keys: KeyLookups,
        position: StreamPosition,
        owned: asyncio.Event,
        settings: WriterSettings,
        metrics: Metrics,
    ) -> None:
        self._store = store
        self._inbox = inbox
        self._keys = keys
        self._position = position
        self._owned = owned
        self._settings = settings
        self._metrics = metrics
        self.last_error: str | None = None
        self.lag: float | None = None
        self.last_progress = monotonic()

    async def run(self) -> None:
        """Write batches forever. Only an exception that is a bug ends it."""
        settings = self._settings
        while True:
            taken = await self._inbox.take(
                settings.batch_size, linger=settings.linger, idle_timeout=settings.idle_after
            )
            messages = self._keys.hold_back(taken)
            await self._owned.wait()
            self.last_progress = monotonic()
            with DatabaseAttempt() as attempt:
                if messages:
                    await self._write(messages)
                elif not taken:
                    await self._save_position()
                self.last_progress = monotonic()
            self.last_error = attempt.error
            if attempt.error is not None:
                # If the transaction was committed all the same, the messages count as replayed the next time.
                self._inbox.put_back(messages)
                await asyncio.sleep(settings.retry_interval)

    async def _write(self, messages: Sequence[ReceivedMessage]) -> None:
        dids = list({message.did for message in messages if message.did})
        with self._metrics.stage("load"):
            repos = await self._store.repos(dids)
            await self._keys.load(dids)
        with self._metrics.stage("plan"):
            context = PlanContext(self._settings.policy, self._position.relay, time(), self._position.host)
            plan = await asyncio.to_thread(plan_batch, messages, repos, self._keys.key_state, context)
        with self._metrics.stage("apply"):
            cursor = self._cursor_after(plan)
            batch = Batch(plan.writes, tuple(plan.dead_letters), frozenset(plan.stale_identities), cursor)
            conflicts = await self._store.apply(batch)
        await self._settle(messages, plan, conflicts)

    async def _save_position(self) -> None:
        """Save the cursor and the current time when no message is waiting."""
        seq = self._position.watermark.position
        if seq is None or not self._position.is_open() or self._inbox.unsettled:
            return
        cursor = Cursor(self._position.relay, str(self._settings.shard), seq, caught_up_at=time())
        await self._store.apply(Batch(cursor=cursor))
        self._metrics.cursor(self._position.relay, seq)
        self.lag = 0.0

    def _cursor_after(self, plan: BatchPlan) -> Cursor | None:
        """Return the cursor that is valid when the plan is committed; None if there is none yet."""
        seqs = [settled.received.seq for settled in plan.settled if settled.received.seq is not None]
        seq = self._position.watermark.position_if_done(seqs)
        if seq is None:
            return None
        newest = next((item.received for item in reversed(plan.settled) if item.received.seq == seq), None)
        event_time = getattr(newest.event, "time", None) if newest else None
        self.lag = _age(event_time) if event_time else self.lag
        return Cursor(self._position.relay, str(self._settings.shard), seq, event_time)

    async def _settle(self, messages: Sequence[ReceivedMessage], plan: BatchPlan, conflicts: frozenset[str]) -> None:
        """Settle the messages that were written, and start key lookups for the messages that wait for a key.

        Args:
            messages: The messages of the batch.
            plan: The plan that was written.
            conflicts: The DIDs whose rows changed meanwhile, so that their writes were not applied. All their messages
                are planned again.
        """
        self._keys.mark_stale(plan.stale_identities)
        settled = [item for item in plan.settled if item.received.did not in conflicts]
        done = [item.received for item in settled]
        self._position.watermark.mark_done(message.seq for message in done if message.seq is not None)
        self._keys.discard_results(did for did in (message.did for message in done) if did)
        self._count(settled, plan, conflicts)
        for did, need in plan.needed_keys.items():
            if did not in conflicts:
                self._keys.start(need, [message for message in plan.waiting if message.did == did])
        if conflicts:
            self._inbox.put_back([message for message in messages if message.did in conflicts])
        self._inbox.settle(done)

    def _count(self, settled: Sequence[SettledMessage], plan: BatchPlan, conflicts: frozenset[str]) -> None:
        results = Counter([(item.received.event.kind, item.outcome, item.why) for item in settled])
        for (kind, outcome, why), count in results.items():
            self._metrics.outcome(kind, outcome, count)
            if isinstance(why, Rejection):
                self._metrics.rejected(why, count)
            elif isinstance(why, Desync) and outcome in _DESYNCHRONIZING:
                self._metrics.desynchronized(why, count)
        written = [write for write in plan.writes if write.repo.did not in conflicts]
        for action, count in Counter([change.action for write in written for change in write.changes]).items():
            self._metrics.record_changes(action, live=True, count=count)
        if self._position.watermark.position is not None:
            self._metrics.cursor(self._position.relay, self._position.watermark.position)


def _age(event_time: str) -> float | None:
    """Return the age in seconds; None if the relay's time has an unknown format. Only for display."""
    try:
        return max(0.0, time() - datetime.fromisoformat(event_time).timestamp())
    except ValueError:
        return None
