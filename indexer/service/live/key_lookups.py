"""Look up signing keys. The messages that need them wait; other messages continue."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import NoReturn

import structlog

from indexer.concurrency.background_tasks import BackgroundTasks
from indexer.errors import UnavailableError
from indexer.identity import METHODS, IdentityCache, Method, method_of
from indexer.reasons import FetchFailure
from indexer.service.live.inbox import Inbox
from indexer.service.live.key_states import KeyStates
from indexer.sync.plan_batch import ReceivedMessage
from indexer.sync.plans import NeedsKey
from indexer.sync.policy import UNAVAILABLE, KeyState

MAX_QUEUED_PER_SLOT = 4

log = structlog.get_logger(__name__)


class KeyLookups:
    """Looks up signing keys in background tasks, and puts the waiting messages back into the inbox afterwards.

    For each DID method, at most `concurrency` lookups run at a time, each for at most `timeout` seconds, and
    `MAX_QUEUED_PER_SLOT` times as many are queued. Beyond that, a key counts as unavailable. While a message waits for
    a key, all later messages of its DID wait, too: messages of one DID are planned in stream order.
    """

    def __init__(self, identities: IdentityCache, inbox: Inbox, *, timeout: float, concurrency: int) -> None:
        self._key_states = KeyStates(identities, timeout=timeout)
        self._inbox = inbox
        self._max_queued_or_running = concurrency * (1 + MAX_QUEUED_PER_SLOT)
        # Each method has its own slots: hosts of did:web can be slow on purpose, and must not delay did:plc.
        self._slots = {method: asyncio.Semaphore(concurrency) for method in METHODS}
        self._queued_or_running = Counter[Method]()
        self._waiting: dict[str, list[ReceivedMessage]] = {}
        self._results: dict[str, KeyState] = {}
        self._tasks = BackgroundTasks()

    def __len__(self) -> int:
        """Return the number of waiting messages."""
        return sum(map(len, self._waiting.values()))

    async def load(self, dids: Iterable[str]) -> None:
        """Load identities from the database into the cache, with one query.

        Raises:
            DatabaseError: The query failed.
        """
        await self._key_states.load(dids)

    def mark_stale(self, dids: Iterable[str]) -> None:
        """Mark these identities as changed, so that the next lookup asks the network."""
        self._key_states.mark_stale(dids)

    def hold_back(self, messages: Iterable[ReceivedMessage]) -> list[ReceivedMessage]:
        """Queue the messages of DIDs that wait for a key behind their earlier messages; return the other messages."""
        free = []
        for message in messages:
            waiting = self._waiting.get(message.did) if message.did else None
            if waiting is None:
                free.append(message)
            else:
                waiting.append(message)
        return free

    def key_state(self, did: str) -> KeyState | None:
        """Return the result of the lookup for this DID's messages, else the cached key state, else None."""
        return self._results.get(did) or self._key_states.cached(did)

    def discard_results(self, dids: Iterable[str]) -> None:
        """Discard the results of lookups whose messages are settled."""
        for did in dids:
            self._results.pop(did, None)

    def start(self, need: NeedsKey, messages: Sequence[ReceivedMessage]) -> None:
        """Start the lookup that `messages`, all of one DID, wait for."""
        self._waiting[need.did] = list(messages)
        self._tasks.start(self._look_up(need), f"key of {need.did}")

    async def run(self) -> NoReturn:
        """Raise the first unexpected exception of a lookup: its messages would wait forever."""
        await self._tasks.run()

    async def close(self) -> None:
        """Cancel the running lookups."""
        await self._tasks.close()

    async def _look_up(self, need: NeedsKey) -> None:
        try:
            result = await self._key_states.fetch(need.did, refresh=need.refresh, slot=self._slot(method_of(need.did)))
        except UnavailableError as error:
            log.info("key.unavailable", did=need.did, error=str(error))
            result = UNAVAILABLE
        self._results[need.did] = result
        self._inbox.put_back(self._waiting.pop(need.did))

    @asynccontextmanager
    async def _slot(self, method: Method) -> AsyncIterator[None]:
        if self._queued_or_running[method] >= self._max_queued_or_running:
            raise UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE, "the key lookup queue is full")
        self._queued_or_running[method] += 1
        try:
            async with self._slots[method]:
                yield
        finally:
            self._queued_or_running[method] -= 1
