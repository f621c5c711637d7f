"""From the inbox to committed rows: rows and keys, plans, one transaction, cursor included."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from time import monotonic, time

import structlog

from indexer.errors import UnavailableError
from indexer.identity import Identities
from indexer.metrics import Metrics
from indexer.reasons import Desync, Rejection
from indexer.service.inbox import Inbox
from indexer.service.keys import KeyDesk
from indexer.service.reader import Place
from indexer.store import Store
from indexer.sync.batch import BatchPlan, Received, Settled, plan_batch
from indexer.sync.plan import Batch, Cursor
from indexer.sync.planning import Ground, Policy
from indexer.sync.repo import Outcome
from indexer.sync.shard import Shard

# With these, a `Desync` says why the repo is desynchronized from now on; with others, why the event changed nothing.
BREAKING = frozenset({Outcome.DESYNCHRONIZED, Outcome.APPLIED})

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Pace:
    """How batches are cut: by count, or by seconds since the first message; the pause while Postgres is away; and how
    long no message comes until we count as caught up.
    """

    events: int = 500
    linger: float = 0.05
    pause: float = 1.0
    quiet: float = 5.0


class Writer:
    """The live path's only writer, as long as `held` is set. `run` ends only with an error that is ours."""

    def __init__(
        self,
        store: Store,
        identities: Identities,
        keys: KeyDesk,
        inbox: Inbox,
        place: Place,
        policy: Policy,
        shard: Shard,
        held: asyncio.Event,
        metrics: Metrics,
        pace: Pace | None = None,
    ) -> None:
        self._store = store
        self._identities = identities
        self._keys = keys
        self._inbox = inbox
        self._place = place
        self._policy = policy
        self._shard = shard
        self._held = held
        self._metrics = metrics
        self._pace = pace or Pace()
        self.trouble: str | None = None
        self.lag: float | None = None
        self.progress = monotonic()

    async def run(self) -> None:
        while True:
            taken = await self._inbox.take(self._pace.events, self._pace.linger, self._pace.quiet)
            messages = self._keys.hold_back(taken)
            await self._held.wait()
            self.progress = monotonic()
            try:
                if messages:
                    await self._write(messages)
                elif not taken:
                    await self._save_place()
                self.trouble = None
                self.progress = monotonic()
            except UnavailableError as error:  # nothing is settled, or was and will be seen as replayed
                self.trouble = str(error)
                log.warning("database.unavailable", error=self.trouble)
                self._inbox.put_back(messages)
                await asyncio.sleep(self._pace.pause)

    async def _write(self, messages: Sequence[Received]) -> None:
        dids = list({message.did for message in messages if message.did})
        with self._metrics.stage("load"):
            repos = await self._store.repos(dids)
            await self._identities.warm(dids)
        with self._metrics.stage("plan"):
            ground = Ground(self._policy, self._place.relay, time(), self._place.host)
            plan = await asyncio.to_thread(plan_batch, messages, repos, self._keys.signer, ground)
        with self._metrics.stage("apply"):
            moved = await self._store.apply(
                Batch(plan.writes, tuple(plan.dead_letters), frozenset(plan.stale_identities), self._cursor(plan))
            )
        await self._settle(messages, plan, moved)

    async def _save_place(self) -> None:
        """Nothing comes: messages that were not ours may have moved us, and who asks shall see that we are here."""
        position = self._place.watermark.position
        if position is None or not self._place.open() or self._inbox.held:
            return
        now = time()
        await self._store.apply(Batch(cursor=Cursor(self._place.relay, str(self._shard), position, caught_up_at=now)))
        self._metrics.cursor(self._place.relay, position)
        self.lag = 0.0

    def _cursor(self, plan: BatchPlan) -> Cursor | None:
        seqs = [settled.received.seq for settled in plan.settled if settled.received.seq is not None]
        position = self._place.watermark.if_done(seqs)
        if position is None:
            return None
        newest = next((item.received for item in reversed(plan.settled) if item.received.seq == position), None)
        event_time = getattr(newest.event, "time", None) if newest else None
        self.lag = _age(event_time) if event_time else self.lag
        return Cursor(self._place.relay, str(self._shard), position, event_time)

    async def _settle(self, messages: Sequence[Received], plan: BatchPlan, moved: frozenset[str]) -> None:
        """Repos in `moved` changed under us: all their messages are planned again, in their order."""
        self._identities.mark_stale(plan.stale_identities)
        settled = [item for item in plan.settled if item.received.did not in moved]
        done = [item.received for item in settled]
        self._place.watermark.done(message.seq for message in done if message.seq is not None)
        self._keys.answered(did for did in (message.did for message in done) if did)
        self._count(settled, plan, moved)
        for did, need in plan.needs.items():
            if did not in moved:
                self._keys.wait(need, [message for message in plan.waiting if message.did == did])
        if moved:
            self._inbox.put_back([message for message in messages if message.did in moved])
        self._inbox.finished(done)

    def _count(self, settled: Sequence[Settled], plan: BatchPlan, moved: frozenset[str]) -> None:
        for (kind, outcome, why), count in Counter(
            [(item.received.event.kind, item.outcome, item.why) for item in settled]
        ).items():
            self._metrics.outcome(kind, outcome, count)
            if isinstance(why, Rejection):
                self._metrics.rejected(why, count)
            elif isinstance(why, Desync) and outcome in BREAKING:
                self._metrics.desynchronized(why, count)
        written = [write for write in plan.writes if write.repo.did not in moved]
        for action, count in Counter([change.action for write in written for change in write.changes]).items():
            self._metrics.record_changes(action, live=True, count=count)
        if self._place.watermark.position is not None:
            self._metrics.cursor(self._place.relay, self._place.watermark.position)


def _age(event_time: str) -> float | None:
    """Seconds since then. The time is the relay's word and of any form, so for people only."""
    try:
        return max(0.0, time() - datetime.fromisoformat(event_time).timestamp())
    except ValueError:
        return None
