"""Replay of dead letters: process a rejected message again, by the rules of the live path, as if it had just arrived.

A replay works with or without a running daemon. Like all writes, its writes apply only to an unchanged version of the
repo's row, so it needs no shard lock. It changes no cursor, because the stream position was advanced when the message
was rejected.
"""

import asyncio
from dataclasses import dataclass, field, replace
from functools import partial
from time import time
from typing import Literal

from indexer.db import Database, DatabaseError
from indexer.db.dead_letters import DeadLetterGoneError, StoredDeadLetter
from indexer.errors import RefusedWriteError, UnavailableError
from indexer.live.key_lookups import cached_key, fetch_key
from indexer.net.http.http_client import host_of
from indexer.net.identity.identity_cache import IdentityCache
from indexer.reasons import Desync, FetchFailure, Rejection
from indexer.sync.batch import BatchPlan, ReceivedMessage, plan_batch
from indexer.sync.changes import Batch, DeadLetter
from indexer.sync.events import InfoEvent, OtherShardEvent, StreamError, UnknownEvent, decode_frame
from indexer.sync.policy import PlanContext, Policy
from indexer.sync.repo import Outcome
from indexer.sync.stream import Origin

MAX_ATTEMPTS = 5
"""Attempts to replay one dead letter while other writes change its repo."""

UNTRIED: Literal["untried"] = "untried"
UNKNOWN: Literal["unknown"] = "unknown"


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of one replay."""

    id: int
    outcome: Outcome | Literal["untried", "unknown"]  # `UNTRIED`: not possible now. `UNKNOWN`: no such dead letter
    reason: Rejection | Desync | None = None  # of a rejection, or of the desynchronization; None for other outcomes
    detail: str = ""  # more about the reason, or why the dead letter is untried
    previous_reason: Rejection | None = None  # the reason of the earlier rejection, if the message was rejected again


@dataclass(eq=False)
class DeadLetterReplay:
    """Replays dead letters one at a time.

    Unlike on the live path, a missing key does not desynchronize the repo: the message is not lost, because the dead
    letter stays and can be replayed later.
    """

    db: Database
    identities: IdentityCache
    policy: Policy
    key_timeout: float = field(kw_only=True)

    async def replay(self, dead_letter_id: int) -> ReplayResult:
        """Process the message again; delete the dead letter unless it is rejected again or cannot be processed.

        Raises:
            DatabaseError: The database is unavailable. Either nothing has changed or the replay is complete.
        """
        found = await self.db.dead_letters.load(dead_letter_id)
        if found is None:
            return ReplayResult(dead_letter_id, UNKNOWN)
        dead_letter, frame = found
        if not dead_letter.complete:
            detail = "the stored frame is incomplete; a resync of the repo fetches the same changes"
            return ReplayResult(dead_letter_id, UNTRIED, detail=detail)
        try:
            return await self._replay(dead_letter, frame)
        except DeadLetterGoneError:
            return ReplayResult(dead_letter_id, UNKNOWN)
        except DatabaseError:
            raise
        except (UnavailableError, RefusedWriteError) as error:
            return ReplayResult(dead_letter_id, UNTRIED, detail=str(error))

    async def _replay(self, dead_letter: StoredDeadLetter, frame: bytes) -> ReplayResult:
        event = decode_frame(frame, self.policy.limits)
        if isinstance(event, InfoEvent | StreamError | OtherShardEvent):
            event = UnknownEvent(event.kind, None)  # it concerns no repo, and its effect on the stream is over
        is_host = self.policy.upstream_is_pds or dead_letter.relay.startswith("http")  # URLs of relays begin with ws
        host = host_of(dead_letter.relay) if is_host else None
        received = ReceivedMessage(Origin(dead_letter.relay, dead_letter.epoch, host), event.seq, frame, event)
        for _ in range(MAX_ATTEMPTS):
            plan = await self._plan(received)
            [settled] = plan.settled
            if plan.dead_letters:
                return await self._reject_again(dead_letter, plan.dead_letters[0])
            stale = frozenset(plan.stale_identities)
            written = await self.db.write(Batch(plan.writes, stale_identities=stale, resolved=dead_letter.id))
            if not written.skipped:
                return ReplayResult(dead_letter.id, settled.outcome, settled.why)
        return ReplayResult(dead_letter.id, UNTRIED, detail=f"the repo changed during each of {MAX_ATTEMPTS} attempts")

    async def _plan(self, received: ReceivedMessage) -> BatchPlan:
        """Return a plan in which no message waits for a key.

        Raises:
            UnavailableError: The plan needs a key that cannot be looked up now.
        """
        dids = [received.did] if received.did else []
        repos = await self.db.repos.load(dids)
        await self.identities.preload(dids)
        # After the row: if that is complete for a later scope, what an earlier one omits would be missing.
        scope = await self.db.scope.load() or self.policy.scope
        context = PlanContext(replace(self.policy, scope=scope), time())
        plan = plan_batch([received], repos, partial(cached_key, self.identities), context)
        while plan.needed_keys:
            [need] = plan.needed_keys.values()
            await asyncio.sleep(self.identities.refresh_delay(need.did, refresh=need.refresh))
            key_state = await fetch_key(self.identities, need, self.key_timeout)
            if need.refresh and key_state.stale:
                detail = "the cached identity is stale, and a newer one could not be fetched"
                raise UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE, detail)
            plan = plan_batch([received], repos, {need.did: key_state}.get, context)
        return plan

    async def _reject_again(self, dead_letter: StoredDeadLetter, rejected: DeadLetter) -> ReplayResult:
        """Keep the dead letter, with the reason of the newest rejection."""
        if (dead_letter.reason, dead_letter.detail) != (rejected.reason, rejected.detail):
            await self.db.dead_letters.update(dead_letter.id, rejected)
        return ReplayResult(
            dead_letter.id, Outcome.REJECTED, rejected.reason, rejected.detail, previous_reason=dead_letter.reason
        )
