"""Identities at hand: in memory with their keys parsed, in the database behind it, from the network behind that.

An identity past its time still serves while a newer one is fetched: a signature that its key doesn't verify asks for
a refresh anyhow, and no stream should wait for a directory. One that is known to have changed is asked for first.

Strangers can cause look-ups, by messages that they forge or by changes that they announce. So looking up again what
is known is rationed twice: for each DID, and by a budget of its own, of which the accounts of one host have no more
than their share. What is left of the directory's rate is for DIDs that are new.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NoReturn, Protocol

import structlog

from indexer.atproto.crypto import PublicKey, parse_did_key
from indexer.errors import UnavailableError
from indexer.identity.budget import Budget
from indexer.identity.resolver import GONE, METHODS, Method, method_of
from indexer.outbound import host_of
from indexer.reasons import FetchFailure
from indexer.sync.identity import StoredIdentity
from indexer.tasks import Tasks

MOST_FLIGHTS = 128  # look-ups under way, of each method; the directory's rate makes a queue of them
MOST_RENEWALS = 16  # of those, how many may be under way when one is added that nobody waits for
RENEWALS = 0.5  # of the rate of refreshes, beside it

Cause = Literal["signature", "change", "age"]
CAUSES: tuple[Cause, ...] = ("signature", "change", "age")
"""Why something newer than what is known is wanted: a signature that its key doesn't verify, a change that was
announced, or its age."""
REFRESHES = ("asked", "too-soon", "over-budget")
"""What becomes of that."""
FOUND_IN = ("memory", "database", "nowhere")

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Known:
    """An identity with its key parsed. `key` or `pds` is None where the identity definitely has none: see `problem`.

    `stale` says that a newer one was wanted and could not be had, or not yet.
    """

    key: PublicKey | None
    pds: str | None
    problem: str | None
    fetched_at: float
    stale: bool

    @property
    def gone(self) -> bool:
        """Whether its directory definitely knows nothing of the DID, any more perhaps."""
        return self.problem == GONE

    @property
    def host(self) -> str | None:
        """The PDS's name, and its port if it isn't the usual one: what its requests are counted by."""
        return host_of(self.pds) if self.pds else None


class IdentityStore(Protocol):
    """The identities' table. Raises `UnavailableError`."""

    async def load(self, dids: Sequence[str]) -> Mapping[str, StoredIdentity]: ...
    async def save(self, identities: Sequence[StoredIdentity]) -> None: ...


class IdentitySource(Protocol):
    """Where identities come from; see `Resolver`."""

    async def resolve(self, did: str) -> StoredIdentity: ...


class Observer(Protocol):
    """Who counts; see `Metrics`."""

    def identity_lookup(self, method: str, result: str) -> None: ...
    def identity_cache(self, found_in: str, count: int) -> None: ...
    def identity_refresh(self, cause: str, result: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Freshness:
    """Seconds: how old an identity grows before it is renewed, how long "there is none" holds, how soon after a
    look-up of a DID there may be another, or because of a change that was announced, and how long to wait for one
    where an older identity would do.
    """

    found: float = 86_400.0
    missing: float = 120.0
    refresh: float = 60.0
    changed: float = 5.0
    patience: float = 5.0


Flight = asyncio.Task[Known | UnavailableError]


@dataclass(slots=True)
class _Entry:
    """`asks_from`: Unix seconds from which on the network may be asked again."""

    known: Known
    asks_from: float


class Identities:
    """What the daemon knows of identities; at most `most` of them in memory, one look-up at a time for each DID.

    `clock` gives Unix seconds; `refresh_rate` is how often a second identities that are known may be looked up again.
    """

    def __init__(
        self,
        source: IdentitySource,
        store: IdentityStore,
        observer: Observer,
        *,
        clock: Callable[[], float],
        refresh_rate: float,
        freshness: Freshness | None = None,
        most: int = 200_000,
    ) -> None:
        self._source = source
        self._store = store
        self._observer = observer
        self._clock = clock
        self._refreshes = Budget(refresh_rate)
        self._renewals = Budget(refresh_rate * RENEWALS)
        self._freshness = freshness or Freshness()
        self._most = most
        self._memory: OrderedDict[str, _Entry] = OrderedDict()
        self._flights: dict[Method, dict[str, Flight]] = {method: {} for method in METHODS}
        self._outrun: set[str] = set()
        self._tasks = Tasks()

    async def run(self) -> NoReturn:
        """Ends only with an error that is ours, in a look-up that perhaps nobody waits for."""
        await self._tasks.run()

    async def close(self) -> None:
        """Ends the look-ups under way."""
        await self._tasks.close()

    def peek(self, did: str) -> Known | None:
        """What is in memory, unless the network has to be asked first."""
        entry = self._memory.get(did)
        return None if entry is None or self._must_ask(entry) else entry.known

    def pause(self, did: str, *, refresh: bool = False) -> float:
        """Seconds after which `lookup` can ask for something newer, if it is worth waiting for them."""
        entry = self._memory.get(did)
        if entry is None or self._cause(entry, refresh=refresh) is None or did in self._flights[method_of(did)]:
            return 0.0
        left = entry.asks_from - self._clock()
        return left if 0 < left <= self._freshness.changed else 0.0

    async def warm(self, dids: Iterable[str]) -> None:
        """Brings into memory what the database has of these, in one query, and has some renewed that are past their
        time. Raises `UnavailableError` if the database can't be asked.
        """
        dids = list(dids)
        missing = [did for did in dids if did not in self._memory]
        stored = await self._store.load(missing) if missing else {}
        for did, identity in stored.items():
            if did not in self._memory:  # or it was fetched meanwhile, and is newer
                self._remember(did, _known(identity), self._clock())
        self._observer.identity_cache("memory", len(dids) - len(missing))
        self._observer.identity_cache("database", len(stored))
        self._observer.identity_cache("nowhere", len(missing) - len(stored))
        for did in dids:
            if (entry := self._memory.get(did)) is not None:
                self._memory.move_to_end(did)
                self._renew(did, entry)

    async def lookup(self, did: str, *, refresh: bool = False) -> Known:
        """The identity, from the network if nothing at hand holds, or if `refresh` asks for a newer one.

        A newer one wanted too soon, or beyond the budget, is not asked for: the answer is what is at hand. When the
        network has no answer, an older identity with a key serves as well, marked as stale. Raises `UnavailableError`
        if there is neither.
        """
        try:
            await self.warm([did])
        except UnavailableError as error:  # the network knows as much as the database
            log.warning("identity.not-loaded", did=did, error=str(error))
        entry = self._memory.get(did)
        if entry is None:
            return await _arrival(self._flight(did, MOST_FLIGHTS))
        cause = self._cause(entry, refresh=refresh)
        if cause is None or not self._may_ask(did, entry, cause):
            return _at_hand(entry.known)
        flight = self._flight(did, MOST_FLIGHTS)
        if entry.known.key is None:
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
        """These have changed: the next look-up goes to the network, soon. The database is told by the batch."""
        soon = self._clock() + self._freshness.changed
        for did in dids:
            if did in self._flights[method_of(did)]:
                self._outrun.add(did)  # its answer may be from before the change
            if (entry := self._memory.get(did)) is not None:
                entry.known = replace(entry.known, stale=True)
                entry.asks_from = min(entry.asks_from, soon)

    def _cause(self, entry: _Entry, *, refresh: bool) -> Cause | None:
        if entry.known.stale:
            return "change"
        if refresh:
            return "signature"
        return "age" if self._must_ask(entry) else None

    def _may_ask(self, did: str, entry: _Entry, cause: Cause) -> bool:
        """Whether the network may be asked again, or is being asked."""
        if did in self._flights[method_of(did)]:
            return True
        now = self._clock()
        if entry.asks_from > now:
            result = "too-soon"
        elif not self._refreshes.spend(entry.known.pds or "", now):
            result = "over-budget"
        else:
            result = "asked"
        self._observer.identity_refresh(cause, result)
        return result == "asked"

    def _renew(self, did: str, entry: _Entry) -> None:
        """Looks up what is past its time, if there is nothing better to do."""
        now, flights = self._clock(), self._flights[method_of(did)]
        if now - entry.known.fetched_at < self._freshness.found or entry.asks_from > now:
            return
        if did not in flights and len(flights) < MOST_RENEWALS and self._renewals.spend(entry.known.pds or "", now):
            self._observer.identity_refresh("age", "asked")
            self._flight(did, MOST_RENEWALS)

    def _flight(self, did: str, most: int) -> Flight | None:
        """The look-up of this DID, a new one if none is under way; None if there are too many others."""
        flights = self._flights[method_of(did)]
        if did not in flights and len(flights) < most:
            flights[did] = self._tasks.start(self._fetch(did), f"identity of {did}")
            flights[did].add_done_callback(lambda _done: self._land(did))
        return flights.get(did)

    def _land(self, did: str) -> None:
        del self._flights[method_of(did)][did]
        self._outrun.discard(did)

    async def _fetch(self, did: str) -> Known | UnavailableError:
        try:
            stored = await self._source.resolve(did)
        except UnavailableError as error:
            self._observer.identity_lookup(method_of(did), error.reason)
            if (entry := self._memory.get(did)) is not None:
                entry.asks_from = self._clock() + self._rest(entry)
            return error
        self._observer.identity_lookup(method_of(did), "found" if stored.problem is None else "missing")
        stored = replace(stored, stale=did in self._outrun)
        known = _known(stored)
        self._remember(did, known, self._clock() + self._rest(self._memory.get(did)))
        try:
            await self._store.save([stored])
        except UnavailableError as error:
            log.warning("identity.not-saved", did=did, error=str(error))
        return known

    def _rest(self, entry: _Entry | None) -> float:
        """Seconds until the network may be asked again for what was `entry` before."""
        if entry is None:
            return 0.0  # it may change right after we first ask
        # A directory may be behind the change that it is asked for: if a signature says so, it is asked once more.
        return self._freshness.changed if entry.known.stale else self._freshness.refresh

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


def _at_hand(known: Known) -> Known:
    """That there was no key says nothing once something has changed."""
    if known.key is None and known.stale:
        raise UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE, "it has changed, and it is too soon to look it up")
    return known


async def _arrival(flight: Flight | None) -> Known:
    """What the look-up brings; it goes on for others when this wait is given up."""
    if flight is None:
        raise UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE, "too many look-ups are under way")
    answer = await asyncio.shield(flight)
    if isinstance(answer, UnavailableError):
        raise UnavailableError(answer.reason, answer.detail, retry_after=answer.retry_after)
    return answer


def _known(stored: StoredIdentity) -> Known:
    key = parse_did_key(stored.signing_key) if stored.signing_key else None
    return Known(key, stored.pds and _shared(stored.pds), stored.problem, stored.fetched_at, stored.stale)


@lru_cache(maxsize=4_096)
def _shared(pds: str) -> str:
    """One and the same text for all accounts of a PDS."""
    return pds
