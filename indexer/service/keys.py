"""Messages that wait for a signing key, while the rest of the stream goes on."""

import asyncio
from collections.abc import Iterable, Sequence

import structlog

from indexer.errors import UnavailableError
from indexer.identity import Identities
from indexer.service.inbox import Inbox
from indexer.sync.batch import Received
from indexer.sync.plan import NeedsKey
from indexer.sync.planning import UNAVAILABLE, Signer

log = structlog.get_logger(__name__)


class KeyDesk:
    """Fetches keys, a bounded number at a time and each within `patience` seconds, and sends messages back.

    All messages of a DID behind a waiting one wait with it, so that their order stays the stream's.
    """

    def __init__(self, identities: Identities, inbox: Inbox, *, patience: float, at_once: int) -> None:
        self._identities = identities
        self._inbox = inbox
        self._patience = patience
        self._slots = asyncio.Semaphore(at_once)
        self._waiting: dict[str, list[Received]] = {}
        self._answers: dict[str, Signer] = {}
        self._tasks: set[asyncio.Task[None]] = set()

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
        return None if known is None else Signer(known.key, stale=known.stale)

    def answered(self, dids: Iterable[str]) -> None:
        """The messages that these answers were fetched for are settled."""
        for did in dids:
            self._answers.pop(did, None)

    def wait(self, need: NeedsKey, messages: Sequence[Received]) -> None:
        """Fetches the key that `messages`, all of one DID, wait for; then they are in the inbox again."""
        self._waiting[need.did] = list(messages)
        task = asyncio.create_task(self._fetch(need), name=f"key of {need.did}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _fetch(self, need: NeedsKey) -> None:
        try:
            async with asyncio.timeout(self._patience), self._slots:
                known = await self._identities.lookup(need.did, refresh=need.refresh)
            self._answers[need.did] = Signer(known.key, final=need.refresh, stale=known.stale)
        except (UnavailableError, TimeoutError) as error:
            log.info("key.unavailable", did=need.did, error=str(error) or type(error).__name__)
            self._answers[need.did] = UNAVAILABLE
        await self._inbox.put_back(self._waiting.pop(need.did))
