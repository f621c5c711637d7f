"""Messages that wait for a signing key, while the rest of the stream goes on."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import NoReturn

import structlog

from indexer.errors import UnavailableError
from indexer.identity import METHODS, Identities, Known, Method, method_of
from indexer.reasons import FetchFailure
from indexer.service.inbox import Inbox
from indexer.sync.batch import Received
from indexer.sync.plan import NeedsKey
from indexer.sync.planning import UNAVAILABLE, Signer
from indexer.tasks import Tasks

QUEUED = 4  # times the places

log = structlog.get_logger(__name__)


class KeyDesk:
    """Fetches keys, and sends messages back.

    `at_once` keys of each DID method are fetched at a time, each within `patience` seconds, and four times as many
    wait for a place; beyond that a key can't be had. All messages of a DID behind a waiting one wait with it, so that
    their order stays the stream's.
    """

    def __init__(self, identities: Identities, inbox: Inbox, *, patience: float, at_once: int) -> None:
        self._identities = identities
        self._inbox = inbox
        self._patience = patience
        self._at_once = at_once
        self._places = {method: asyncio.Semaphore(at_once) for method in METHODS}
        self._present = Counter[Method]()
        self._waiting: dict[str, list[Received]] = {}
        self._answers: dict[str, Signer] = {}
        self._tasks = Tasks()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def hold_back(self, messages: Iterable[Received]) -> list[Received]:
        """Those that needn't wait; the others join their DID's earlier ones."""
        free = []
        for message in messages:
            held = self._waiting.get(message.did) if message.did else None
            if held is None:
                free.append(message)
            else:
                held.append(message)
        return free

    def signer(self, did: str) -> Signer | None:
        """What is known of the key without waiting: the answer fetched for this DID's messages, or the cache's."""
        answer = self._answers.get(did)
        if answer is not None:
            return answer
        known = self._identities.peek(did)
        return None if known is None else Signer(known.key, stale=known.stale, host=known.host)

    def answered(self, dids: Iterable[str]) -> None:
        """The messages that these answers were fetched for are settled."""
        for did in dids:
            self._answers.pop(did, None)

    def wait(self, need: NeedsKey, messages: Sequence[Received]) -> None:
        """Fetches the key that `messages`, all of one DID, wait for; then they are in the inbox again."""
        self._waiting[need.did] = list(messages)
        self._tasks.start(self._fetch(need), f"key of {need.did}")

    async def run(self) -> NoReturn:
        """Ends only with an error that is ours: the messages that waited for that key would wait for ever."""
        await self._tasks.run()

    async def close(self) -> None:
        await self._tasks.close()

    async def _fetch(self, need: NeedsKey) -> None:
        try:
            known = await self._lookup(need)
            self._answers[need.did] = Signer(known.key, final=need.refresh, stale=known.stale, host=known.host)
        except (UnavailableError, TimeoutError) as error:
            log.info("key.unavailable", did=need.did, error=str(error) or type(error).__name__)
            self._answers[need.did] = UNAVAILABLE
        self._inbox.put_back(self._waiting.pop(need.did))

    async def _lookup(self, need: NeedsKey) -> Known:
        did, refresh = need.did, need.refresh
        await asyncio.sleep(self._identities.pause(did, refresh=refresh))  # before it takes anybody's place
        async with self._place(method_of(did)), asyncio.timeout(self._patience):
            return await self._identities.lookup(did, refresh=refresh)

    @asynccontextmanager
    async def _place(self, method: Method) -> AsyncIterator[None]:
        """The methods don't share their places: a did:web's host may be made to hang."""
        if self._present[method] >= self._at_once * (1 + QUEUED):
            raise UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE, "too many keys are waited for")
        self._present[method] += 1
        try:
            async with self._places[method]:
                yield
        finally:
            self._present[method] -= 1
