"""Dead letters taken up once more, as if their messages had just arrived, by the rules of the live path.

Beside a daemon or without one: the effects are compared and set by the repo's version, as all writes are, so that no
bucket needs to be held; and no cursor is touched, as the message's place was passed when it was refused.
"""

import asyncio
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from time import time
from typing import Literal

from indexer.errors import UnavailableError
from indexer.identity import Identities, Known
from indexer.outbound import host_of
from indexer.reasons import Desync, FetchFailure, Rejection
from indexer.store import DatabaseError, Letter, LetterGoneError, Store
from indexer.sync.batch import BatchPlan, Received, plan_batch
from indexer.sync.events import ForeignEvent, InfoEvent, StreamError, UnknownEvent
from indexer.sync.frames import decode_frame
from indexer.sync.plan import Batch, DeadLetter, NeedsKey
from indexer.sync.planning import Ground, Policy, Signer
from indexer.sync.repo import Outcome

TRIES = 5  # at one letter whose repo changes under it

UNTRIED: Literal["untried"] = "untried"
UNKNOWN: Literal["unknown"] = "unknown"


@dataclass(frozen=True, slots=True)
class Replayed:
    """What became of a letter: it stays if it was refused again, or is `UNTRIED`; `UNKNOWN` is one that isn't there.

    `before` is the reason for which it had been refused.
    """

    number: int
    outcome: Outcome | Literal["untried", "unknown"]
    why: Rejection | Desync | None = None
    detail: str = ""
    before: Rejection | None = None

    @property
    def stays(self) -> bool:
        return self.outcome in {Outcome.REJECTED, UNTRIED}

    @property
    def known(self) -> bool:
        return self.outcome != UNKNOWN


class Replay:
    """Takes up letters one after the other. With `of_pds`, what is called a relay is a PDS, see `Place`.

    A key is waited for `patience` seconds. Unlike on the stream, nothing is lost if it can't be had, so nobody is
    desynchronized for it: the letter waits for another try.
    """

    def __init__(
        self, store: Store, identities: Identities, policy: Policy, *, of_pds: bool = False, patience: float
    ) -> None:
        self._store = store
        self._identities = identities
        self._policy = policy
        self._of_pds = of_pds
        self._patience = patience

    async def take(self, number: int) -> Replayed:
        """Raises `DatabaseError`; then nothing has changed, or all of it."""
        found = await self._store.letter(number)
        if found is None:
            return Replayed(number, UNKNOWN)
        letter, frame = found
        if not letter.whole:
            return Replayed(number, UNTRIED, detail="the frame is not kept whole; a resync of the repo has its effect")
        try:
            return await self._replay(letter, frame)
        except LetterGoneError:
            return Replayed(number, UNKNOWN)
        except DatabaseError:
            raise
        except UnavailableError as error:
            return Replayed(number, UNTRIED, detail=str(error))

    async def _replay(self, letter: Letter, frame: bytes) -> Replayed:
        event = decode_frame(frame, self._policy.limits)
        if isinstance(event, InfoEvent | StreamError | ForeignEvent):
            event = UnknownEvent(event.kind, None)  # of no repo, and over
        received = Received(event.seq, frame, event)
        for _ in range(TRIES):
            plan = await self._plan(letter, received)
            [settled] = plan.settled
            if plan.dead_letters:
                return await self._refuse(letter, plan.dead_letters[0])
            batch = Batch(plan.writes, stale_identities=frozenset(plan.stale_identities))
            if await self._store.settle_letter(letter.id, batch):
                await self._renew(plan.stale_identities)
                return Replayed(letter.id, settled.outcome, settled.why)
        return Replayed(letter.id, UNTRIED, detail=f"the repo changed under each of {TRIES} tries")

    async def _plan(self, letter: Letter, received: Received) -> BatchPlan:
        """A plan that waits for nothing. Raises `UnavailableError` if there is none without a key that can't be had."""
        dids = [received.did] if received.did else []
        repos = await self._store.repos(dids)
        await self._identities.warm(dids)
        ground = Ground(self._policy, letter.relay, time(), host_of(letter.relay) if self._of_pds else None)
        plan = plan_batch([received], repos, self._known_signer, ground)
        while plan.needs:
            [need] = plan.needs.values()
            plan = plan_batch([received], repos, {need.did: await self._fetched_signer(need)}.get, ground)
        return plan

    def _known_signer(self, did: str) -> Signer | None:
        known = self._identities.peek(did)
        return None if known is None else Signer(known.key, stale=known.stale, host=known.host)

    async def _fetched_signer(self, need: NeedsKey) -> Signer:
        known = await self._lookup(need.did, refresh=need.refresh)
        if need.refresh and known.stale:
            raise UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE, "no newer identity than the one that doesn't fit")
        return Signer(known.key, final=need.refresh, stale=known.stale, host=known.host)

    async def _lookup(self, did: str, *, refresh: bool = False) -> Known:
        await asyncio.sleep(self._identities.pause(did, refresh=refresh))
        try:
            async with asyncio.timeout(self._patience):
                return await self._identities.lookup(did, refresh=refresh)
        except TimeoutError:
            raise UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE, "no answer in time") from None

    async def _refuse(self, letter: Letter, refused: DeadLetter) -> Replayed:
        """The letter stays, and tells of the last time that it was refused."""
        if (letter.reason, letter.detail) != (refused.reason, refused.detail):
            await self._store.amend_letter(letter.id, refused)
        return Replayed(letter.id, Outcome.REJECTED, refused.reason, refused.detail, before=letter.reason)

    async def _renew(self, dids: Collection[str]) -> None:
        """A daemon beside us doesn't know that these have changed; what is looked up here is there for it as well."""
        self._identities.mark_stale(dids)
        for did in dids:
            with suppress(UnavailableError):
                await self._lookup(did)
