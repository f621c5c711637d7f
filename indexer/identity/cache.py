"""Identities at hand: in memory with their keys parsed, in the database behind it, from the network behind that.

An identity past its time still serves while a newer one is fetched: a signature that its key doesn't verify asks for
a refresh anyhow, and no stream should wait for a directory. One that is known to have changed is asked for first.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from indexer.atproto.crypto import PublicKey, parse_did_key
from indexer.errors import UnavailableError
from indexer.reasons import FetchFailure
from indexer.sync.identity import StoredIdentity

MOST_FLIGHTS = 128  # look-ups under way; the directory's rate makes a queue of them
MOST_RENEWALS = 16  # of those, how many may be under way when one is added that nobody waits for

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Known:
    """An identity with its key parsed. `key` or `pds` is None where the identity definitely has none: see `problem`.

    `stale` says that a newer one was wanted and could not be had, or not yet.
    """

    key: PublicKey | None
    pds: str | None
    handle: str | None
    problem: str | None
    fetched_at: float
    stale: bool


class IdentityStore(Protocol):
    """The identities' table. Raises `UnavailableError`."""

    async def load(self, dids: Sequence[str]) -> Mapping[str, StoredIdentity]: ...
    async def save(self, identities: Sequence[StoredIdentity]) -> None: ...


class IdentitySource(Protocol):
    """Where identities come from; see `Resolver`."""

    async def resolve(self, did: str) -> StoredIdentity: ...


@dataclass(frozen=True, slots=True)
class Freshness:
    """Seconds: how old an identity grows before it is renewed, how long "there is none" holds, how soon after one
    look-up of a DID there may be another out of turn, or because it is said to have changed, and how long to wait for
    one where an older identity would do.
    """

    found: float = 86_400.0
    missing: float = 120.0
    refresh: float = 60.0
    changed: float = 5.0
    patience: float = 5.0


@dataclass(slots=True)
class _Entry:
    """`asks_from`: Unix seconds from which on the network may be asked again."""

    known: Known
    asks_from: float


class Identities:
    """What the daemon knows of identities; at most `most` of them in memory, one look-up at a time for each DID.

    `clock` gives Unix seconds; `on_lookup(method, result)` hears of each look-up over the network.
    """

    def __init__(
        self,
        source: IdentitySource,
        store: IdentityStore,
        *,
        clock: Callable[[], float],
        freshness: Freshness | None = None,
        most: int = 200_000,
        on_lookup: Callable[[str, str], None] = lambda _method, _result: None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._source = source
        self._store = store
        self._clock = clock
        self._freshness = freshness or Freshness()
        self._most = most
        self._on_lookup = on_lookup
        self._sleep = sleep
        self._memory: OrderedDict[str, _Entry] = OrderedDict()
        self._flights: dict[str, asyncio.Task[Known | UnavailableError]] = {}
        self._outrun: set[str] = set()

    async def close(self) -> None:
        """Ends the look-ups under way."""
        flights = list(self._flights.values())
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)

    def peek(self, did: str) -> Known | None:
        """What is in memory, unless the network has to be asked first."""
        entry = self._memory.get(did)
        return None if entry is None or self._must_ask(entry) else entry.known

    async def warm(self, dids: Iterable[str]) -> None:
        """Brings into memory what the database has of these, in one query, and has some renewed that are past their
        time. Raises `UnavailableError` if the database can't be asked.
        """
        dids = list(dids)
        if missing := [did for did in dids if did not in self._memory]:
            for did, stored in (await self._store.load(missing)).items():
                if did not in self._memory:  # or it was fetched meanwhile, and is newer
                    self._remember(did, _known(stored), self._clock())
        now = self._clock()
        for did in dids:
            if (entry := self._memory.get(did)) is None:
                continue
            self._memory.move_to_end(did)
            if now - entry.known.fetched_at >= self._freshness.found and entry.asks_from <= now:
                self._flight(did, MOST_RENEWALS)

    async def lookup(self, did: str, *, refresh: bool = False) -> Known:
        """The identity, from the network if nothing at hand holds, or if `refresh` asks for a newer one.

        A refresh soon after another look-up, or among too many, answers with what is at hand. When the network has no
        answer, an older identity with a key serves as well, marked as stale; otherwise raises `UnavailableError`.
        """
        try:
            await self.warm([did])
        except UnavailableError as error:  # the network knows as much as the database
            log.warning("identity.not-loaded", did=did, error=str(error))
        entry = self._memory.get(did)
        if entry is not None and not self._must_ask(entry) and not (refresh and entry.asks_from <= self._clock()):
            return entry.known
        if entry is not None and entry.known.stale and did not in self._flights:
            again = entry.asks_from - self._freshness.refresh + self._freshness.changed
            await self._sleep(min(max(0.0, again - self._clock()), self._freshness.changed))
        flight = self._flight(did, MOST_FLIGHTS)
        if entry is None or entry.known.key is None:
            return await _arrival(flight)
        if flight is None:
            return entry.known  # that many ask for others says nothing of this one
        try:
            async with asyncio.timeout(self._freshness.patience):
                return await _arrival(flight)
        except (UnavailableError, TimeoutError) as error:
            log.info("identity.kept", did=did, error=str(error) or "no answer in time")
            return replace(entry.known, stale=True)

    def mark_stale(self, dids: Iterable[str]) -> None:
        """These have changed: the next look-up goes to the network. The database is told by the batch."""
        for did in dids:
            if did in self._flights:
                self._outrun.add(did)  # its answer may be from before the change
            if (entry := self._memory.get(did)) is not None:
                entry.known = replace(entry.known, stale=True)

    def _flight(self, did: str, most: int) -> asyncio.Task[Known | UnavailableError] | None:
        """The look-up of this DID, a new one if none is under way; None if there are too many others."""
        flight = self._flights.get(did)
        if flight is None and len(self._flights) < most:
            flight = self._flights[did] = asyncio.create_task(self._fetch(did), name=f"identity of {did}")
            flight.add_done_callback(lambda _done: self._land(did))
        return flight

    def _land(self, did: str) -> None:
        del self._flights[did]
        self._outrun.discard(did)

    async def _fetch(self, did: str) -> Known | UnavailableError:
        method = "web" if did.startswith("did:web:") else "plc"
        try:
            stored = await self._source.resolve(did)
        except UnavailableError as error:
            self._on_lookup(method, error.reason)
            if (entry := self._memory.get(did)) is not None:
                entry.asks_from = self._clock() + self._freshness.refresh
            return error
        self._on_lookup(method, "found" if stored.problem is None else "missing")
        stored = replace(stored, stale=did in self._outrun)
        known = _known(stored)
        pause = self._freshness.refresh if did in self._memory else 0.0  # it may change right after we first ask
        self._remember(did, known, self._clock() + pause)
        try:
            await self._store.save([stored])
        except UnavailableError as error:
            log.warning("identity.not-saved", did=did, error=str(error))
        return known

    def _remember(self, did: str, known: Known, asks_from: float) -> None:
        self._memory[did] = _Entry(known, asks_from)
        self._memory.move_to_end(did)
        while len(self._memory) > self._most:
            self._memory.popitem(last=False)

    def _must_ask(self, entry: _Entry) -> bool:
        known, now = entry.known, self._clock()
        if known.stale:
            return True
        outworn = known.problem is not None and now - known.fetched_at >= self._freshness.missing
        return outworn and entry.asks_from <= now


async def _arrival(flight: asyncio.Task[Known | UnavailableError] | None) -> Known:
    """What the look-up brings; it goes on for others when this wait is given up."""
    if flight is None:
        raise UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE, "too many look-ups are under way")
    answer = await asyncio.shield(flight)
    if isinstance(answer, UnavailableError):
        raise UnavailableError(answer.reason, answer.detail, retry_after=answer.retry_after)
    return answer


def _known(stored: StoredIdentity) -> Known:
    key = parse_did_key(stored.signing_key) if stored.signing_key else None
    return Known(key, stored.pds, stored.handle, stored.problem, stored.fetched_at, stored.stale)
