"""Look up signing keys. The messages that need them wait; other messages continue."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NoReturn

import structlog

from indexer.concurrency.background_tasks import BackgroundTasks
from indexer.concurrency.stage_progress import StageProgress
from indexer.errors import UnavailableError
from indexer.live.inbox import Inbox, message_bytes
from indexer.net.identity.did_resolver import METHODS, Method, method_of
from indexer.net.identity.identity_cache import CachedIdentity, IdentityCache
from indexer.reasons import FetchFailure
from indexer.sync.batch import ReceivedMessage
from indexer.sync.changes import NeedsKey
from indexer.sync.policy import UNAVAILABLE, KeyState

MAX_QUEUED_PER_SLOT = 4
LOOKUP_STALL_SECONDS = 240.0
"""A lookup that takes longer has stalled. The pause before a refresh, a turn in a full queue and the timeout take
less."""
MAX_WAITING_SHARE = 1 / 2
"""Share of the bytes of one stream in the inbox that messages may occupy while they wait for keys."""
MAX_WAITING_SHARE_OF_DID = 1 / 4
"""Share of these bytes that the waiting messages of one DID may occupy."""

log = structlog.get_logger(__name__)


def cached_key(identities: IdentityCache, did: str) -> KeyState | None:
    """Return the key state of a DID from the cache; None if only a lookup can tell."""
    identity = identities.peek(did)
    return None if identity is None else _key_state(identity, final=False)


async def fetch_key(identities: IdentityCache, need: NeedsKey, seconds: float) -> KeyState:
    """Look up the key state of a DID within `seconds`. A refreshed one is final for the event.

    Call it after `IdentityCache.refresh_delay`.

    Raises:
        UnavailableError: The lookup failed or took too long.
    """
    try:
        async with asyncio.timeout(seconds):
            identity = await identities.lookup(need.did, refresh=need.refresh)
    except TimeoutError:
        raise UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE, "no answer in time") from None
    return _key_state(identity, final=need.refresh)


def _key_state(identity: CachedIdentity, *, final: bool) -> KeyState:
    return KeyState(identity.key, True, final, identity.stale, identity.host, identity.doubtful, identity.fetched_at)


@dataclass(slots=True, eq=False)
class _Wait:
    """The messages of one DID that wait for its key, their approximate memory, and the lookup."""

    lookup: asyncio.Task[None]
    messages: list[ReceivedMessage]
    bytes: int

    def add(self, message: ReceivedMessage) -> None:
        self.messages.append(message)
        self.bytes += message_bytes(message)


class KeyLookups:
    """Looks up signing keys in background tasks, and puts the waiting messages back into the inbox afterwards.

    For each DID method, known identities apart from new DIDs, at most `concurrency` lookups run at a time, each for at
    most `timeout` seconds, and `MAX_QUEUED_PER_SLOT` times as many are queued. Beyond that, a key counts as
    unavailable. While a message waits for a key, all later messages of its DID wait, too: messages of one DID are
    planned in stream order. If they exceed their share of the inbox, for each DID or in total, the wait of the DID with
    the most bytes ends, and its key counts as unavailable.
    """

    def __init__(self, identities: IdentityCache, inbox: Inbox, *, timeout: float, concurrency: int) -> None:
        self.stage = StageProgress("key lookups", LOOKUP_STALL_SECONDS)
        self.identities = identities
        self._timeout = timeout
        self._inbox = inbox
        self._max_queued_or_running = concurrency * (1 + MAX_QUEUED_PER_SLOT)
        # Hosts of did:web can be slow on purpose, and must not delay did:plc. Anyone can invent new DIDs, and they must
        # not delay known ones.
        self._slots = {(method, known): asyncio.Semaphore(concurrency) for method in METHODS for known in (True, False)}
        self._queued_or_running = Counter[tuple[Method, bool]]()
        self._waiting: dict[str, _Wait] = {}
        self._results: dict[str, KeyState] = {}
        self._tasks = BackgroundTasks()

    def __len__(self) -> int:
        """Return the number of waiting messages."""
        return sum(len(wait.messages) for wait in self._waiting.values())

    def hold_back(self, messages: Iterable[ReceivedMessage]) -> list[ReceivedMessage]:
        """Queue the messages of DIDs that wait for a key behind their earlier messages; return the other messages."""
        if not self._waiting:
            return list(messages)
        free = []
        for message in messages:
            wait = self._waiting.get(message.did) if message.did else None
            if wait is None:
                free.append(message)
            else:
                wait.add(message)
        self.limit_waiting_bytes()
        return free

    def key_state(self, did: str) -> KeyState | None:
        """Return the result of the lookup for this DID's messages, else the cached key state, else None."""
        return self._results.get(did) or cached_key(self.identities, did)

    def key_states(self, dids: Iterable[str]) -> dict[str, KeyState]:
        """Return what `key_state` returns now for each of these DIDs, without those for which it returns None."""
        found = [(did, self.key_state(did)) for did in dids]
        return {did: state for did, state in found if state is not None}

    def discard_results(self, dids: Iterable[str]) -> None:
        """Discard the results of lookups whose messages are settled."""
        if self._results:
            for did in dids:
                self._results.pop(did, None)

    def start(self, need: NeedsKey, messages: Sequence[ReceivedMessage]) -> None:
        """Start the lookup that `messages`, all of one DID, wait for. Call `limit_waiting_bytes` after the last one."""
        lookup = self._tasks.start(self._look_up(need), f"key of {need.did}")
        self._waiting[need.did] = _Wait(lookup, list(messages), sum(map(message_bytes, messages)))

    def limit_waiting_bytes(self) -> None:
        """End waits, that of the DID with the most bytes first, until the waiting messages are within their shares.

        It looks at every wait, and thousands of them may pause before a refresh: call it once for each batch.
        """
        total = sum(wait.bytes for wait in self._waiting.values())
        for did, wait in sorted(self._waiting.items(), key=lambda item: -item[1].bytes):
            within_share = wait.bytes <= self._inbox.share * MAX_WAITING_SHARE_OF_DID
            if within_share and total <= self._inbox.share * MAX_WAITING_SHARE:
                return
            log.debug("key.unavailable", did=did, error=f"{wait.bytes} bytes of messages wait for the key")
            wait.lookup.cancel()
            self._end_wait(did, UNAVAILABLE)
            total -= wait.bytes

    async def run(self) -> NoReturn:
        """Raise the first unexpected exception of a lookup: its messages would wait forever."""
        await self._tasks.run()

    async def close(self) -> None:
        """Cancel the running lookups."""
        await self._tasks.close()

    async def _look_up(self, need: NeedsKey) -> None:
        try:
            with self.stage.task():
                await asyncio.sleep(self.identities.refresh_delay(need.did, refresh=need.refresh))
                async with self._slot(need.did):
                    result = await fetch_key(self.identities, need, self._timeout)
        except UnavailableError as error:
            log.debug("key.unavailable", did=need.did, error=str(error))
            result = UNAVAILABLE
        self._end_wait(need.did, result)

    def _end_wait(self, did: str, result: KeyState) -> None:
        self._results[did] = result
        self._inbox.put_back(self._waiting.pop(did).messages)

    @asynccontextmanager
    async def _slot(self, did: str) -> AsyncIterator[None]:
        kind = method_of(did), self.identities.knows(did)
        if self._queued_or_running[kind] >= self._max_queued_or_running:
            raise UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE, "the key lookup queue is full")
        self._queued_or_running[kind] += 1
        try:
            async with self._slots[kind]:
                yield
        finally:
            self._queued_or_running[kind] -= 1
