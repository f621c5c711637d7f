"""Cache of identities: in memory with parsed keys, then in the database, then from the network.

An identity that reached its maximum age is still used while a newer one is fetched, so that no stream waits for a
directory. If it is outdated, a signature fails to verify, and that requests a refresh. An identity that is known to
have changed is looked up first (docs/protocol.md#identity).

Attackers can cause lookups with forged messages and with announced changes. Therefore refreshes of known identities
have two limits: an interval per DID, and a budget in total, of which the accounts of one host get only a share. The
rest of the directory's rate limit remains for new DIDs.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NoReturn, Protocol

import structlog

from indexer.atproto.crypto import PublicKey, parse_did_key
from indexer.concurrency.background_tasks import BackgroundTasks
from indexer.errors import UnavailableError
from indexer.identity.did_resolver import GONE, METHODS, Method, method_of
from indexer.identity.refresh_budget import RefreshBudget
from indexer.outbound import host_of
from indexer.reasons import FetchFailure
from indexer.sync.stored_identity import StoredIdentity

MAX_LOOKUPS = 128
"""In-flight lookups per DID method. The directory's rate limit makes a queue of them."""

MAX_LOOKUPS_IN_BACKGROUND = 16
"""In-flight lookups up to which a background refresh may start another one."""

BACKGROUND_SHARE = 0.5
"""The budget of background refreshes, as a share of the rate of other refreshes. It is in addition to that rate."""

RefreshCause = Literal["signature", "change", "age"]
REFRESH_CAUSES: tuple[RefreshCause, ...] = ("signature", "change", "age")
"""Why a known identity is looked up again: its key did not verify a signature, a change was announced, or its age."""

REFRESH_RESULTS = ("asked", "too-soon", "over-budget")
FOUND_IN = ("memory", "database", "nowhere")

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CachedIdentity:
    """An identity with its key parsed.

    Attributes:
        key: None if the identity definitely has no key; `problem` says why.
        pds: The base URL of the PDS; None if the identity definitely has none.
        fetched_at: Unix seconds.
        stale: True if the identity is known to have changed, or a refresh failed.
    """

    key: PublicKey | None
    pds: str | None
    problem: str | None
    fetched_at: float
    stale: bool

    @property
    def gone(self) -> bool:
        """True if the directory does not know the DID, or no longer knows it."""
        return self.problem == GONE

    @property
    def host(self) -> str | None:
        """The name of the PDS in limits and states of hosts, see `host_of`."""
        return host_of(self.pds) if self.pds else None


class IdentityStore(Protocol):
    """The table of identities. Its methods raise `UnavailableError` if the database is unavailable."""

    async def load_identities(self, dids: Sequence[str]) -> Mapping[str, StoredIdentity]:
        """Return the stored identities by DID."""
        ...

    async def save_identities(self, identities: Sequence[StoredIdentity]) -> None:
        """Write identities, unless newer ones are stored."""
        ...


class IdentitySource(Protocol):
    """The source of new identities, see `DidResolver`."""

    async def resolve(self, did: str) -> StoredIdentity:
        """Return the identity; raise `UnavailableError` if there is no definite result now."""
        ...


class IdentityObserver(Protocol):
    """Counts lookups, see `Metrics`."""

    def identity_lookup(self, method: str, result: str) -> None:
        """Count one lookup."""

    def identity_cache(self, found_in: str, count: int) -> None:
        """Count identities that were found in the same layer (`FOUND_IN`)."""

    def identity_refresh(self, cause: str, result: str) -> None:
        """Count one request for a refresh (`REFRESH_CAUSES`, `REFRESH_RESULTS`)."""


@dataclass(frozen=True, slots=True)
class IdentityLifetimes:
    """Ages and intervals of identities, in seconds.

    Attributes:
        max_age: Age from which an identity is refreshed in the background.
        missing_max_age: Age from which an identity without key or PDS is looked up again.
        refresh_interval: Time from one lookup of a DID to the next.
        changed_interval: The same after an announced change.
        timeout: Time to wait for a lookup if an older identity is known.
    """

    max_age: float = 86_400.0
    missing_max_age: float = 120.0
    refresh_interval: float = 60.0
    changed_interval: float = 5.0
    timeout: float = 5.0


InFlightLookup = asyncio.Task[CachedIdentity | UnavailableError]


@dataclass(slots=True)
class _Entry:
    """An identity in memory. It is not looked up before `next_lookup` (Unix seconds)."""

    identity: CachedIdentity
    next_lookup: float


class IdentityCache:
    """Identities of the accounts on the stream, with at most one in-flight lookup per DID."""

    def __init__(
        self,
        source: IdentitySource,
        store: IdentityStore,
        observer: IdentityObserver,
        *,
        clock: Callable[[], float],
        refresh_rate: float,
        lifetimes: IdentityLifetimes | None = None,
        max_entries: int = 200_000,
    ) -> None:
        """Keep at most `max_entries` identities in memory.

        `clock` returns Unix seconds. `refresh_rate` limits lookups of known identities per second.
        """
        self._source = source
        self._store = store
        self._observer = observer
        self._clock = clock
        self._refresh_budget = RefreshBudget(refresh_rate)
        self._background_budget = RefreshBudget(refresh_rate * BACKGROUND_SHARE)
        self._lifetimes = lifetimes or IdentityLifetimes()
        self._max_entries = max_entries
        self._memory: OrderedDict[str, _Entry] = OrderedDict()
        self._in_flight: dict[Method, dict[str, InFlightLookup]] = {method: {} for method in METHODS}
        self._changed_in_flight: set[str] = set()
        self._tasks = BackgroundTasks()

    async def run(self) -> NoReturn:
        """Wait until a lookup fails because of a bug in this program, and raise its exception."""
        await self._tasks.run()

    async def close(self) -> None:
        """Cancel the lookups in flight."""
        await self._tasks.close()

    def peek(self, did: str) -> CachedIdentity | None:
        """Return the identity in memory; None if there is none or if it must be looked up first."""
        entry = self._memory.get(did)
        return None if entry is None or self._must_look_up(entry) else entry.identity

    def refresh_delay(self, did: str, *, refresh: bool = False) -> float:
        """Return the seconds to wait until `lookup` can fetch a newer identity; 0 if waiting has no use."""
        entry = self._memory.get(did)
        if entry is None or did in self._in_flight[method_of(did)] or self._cause(entry, refresh=refresh) is None:
            return 0.0
        left = entry.next_lookup - self._clock()
        return left if 0 < left <= self._lifetimes.changed_interval else 0.0

    async def preload(self, dids: Iterable[str]) -> None:
        """Load identities from the database into memory, in one query, and refresh old ones in the background.

        Raises:
            UnavailableError: The database is unavailable.
        """
        dids = list(dids)
        missing = [did for did in dids if did not in self._memory]
        stored = await self._store.load_identities(missing) if missing else {}
        for did, identity in stored.items():
            if did not in self._memory:  # otherwise it was fetched meanwhile and is newer
                self._remember(did, _cached(identity), self._clock())
        self._observer.identity_cache("memory", len(dids) - len(missing))
        self._observer.identity_cache("database", len(stored))
        self._observer.identity_cache("nowhere", len(missing) - len(stored))
        for did in dids:
            if (entry := self._memory.get(did)) is not None:
                self._memory.move_to_end(did)
                self._refresh_in_background(did, entry)

    async def lookup(self, did: str, *, refresh: bool = False) -> CachedIdentity:
        """Return the identity, from the network if none is known, or if `refresh` and the limits allow it.

        If the network gives no result, a known identity with a key is returned with `stale`.

        Raises:
            UnavailableError: The network gives no result, and no identity with a key is known.
        """
        try:
            await self.preload([did])
        except UnavailableError as error:  # the network can replace the database
            log.warning("identity.load-failed", did=did, error=str(error))
        entry = self._memory.get(did)
        if entry is None:
            return await _result(self._start_lookup(did, MAX_LOOKUPS))
        cause = self._cause(entry, refresh=refresh)
        if cause is None or not self._may_refresh(did, entry, cause):
            return _usable(entry.identity)
        in_flight = self._start_lookup(did, MAX_LOOKUPS)
        if entry.identity.key is None:
            return await _result(in_flight)
        if in_flight is None:
            return entry.identity  # not marked as stale: the cause is the load, not this identity
        try:
            async with asyncio.timeout(self._lifetimes.timeout):
                return await _result(in_flight)
        except (UnavailableError, TimeoutError) as error:
            log.info("identity.refresh-failed", did=did, error=str(error) or "no response in time")
            return replace(entry.identity, stale=True)

    def mark_stale(self, dids: Iterable[str]) -> None:
        """Record that these identities changed, so that the next `lookup` fetches them again.

        This changes only the memory; the batch that applies the change also marks the rows in the database.
        """
        next_lookup = self._clock() + self._lifetimes.changed_interval
        for did in dids:
            if did in self._in_flight[method_of(did)]:
                self._changed_in_flight.add(did)  # its result may be from before the change
            if (entry := self._memory.get(did)) is not None:
                entry.identity = replace(entry.identity, stale=True)
                entry.next_lookup = min(entry.next_lookup, next_lookup)

    def _must_look_up(self, entry: _Entry) -> bool:
        identity, now = entry.identity, self._clock()
        if identity.stale:
            return True
        expired = identity.problem is not None and now - identity.fetched_at >= self._lifetimes.missing_max_age
        return expired and entry.next_lookup <= now

    def _cause(self, entry: _Entry, *, refresh: bool) -> RefreshCause | None:
        if entry.identity.stale:
            return "change"
        if refresh:
            return "signature"
        return "age" if self._must_look_up(entry) else None

    def _may_refresh(self, did: str, entry: _Entry, cause: RefreshCause) -> bool:
        """Return True if a lookup is in flight or the limits allow one."""
        if did in self._in_flight[method_of(did)]:
            return True
        now = self._clock()
        if entry.next_lookup > now:
            result = "too-soon"
        elif not self._refresh_budget.spend(entry.identity.pds or "", now):
            result = "over-budget"
        else:
            result = "asked"
        self._observer.identity_refresh(cause, result)
        return result == "asked"

    def _refresh_in_background(self, did: str, entry: _Entry) -> None:
        """Look up an identity that reached its maximum age, if few other lookups are in flight."""
        now, in_flight = self._clock(), self._in_flight[method_of(did)]
        if now - entry.identity.fetched_at < self._lifetimes.max_age or entry.next_lookup > now:
            return
        if did in in_flight or len(in_flight) >= MAX_LOOKUPS_IN_BACKGROUND:
            return
        if self._background_budget.spend(entry.identity.pds or "", now):
            self._observer.identity_refresh("age", "asked")
            self._start_lookup(did, MAX_LOOKUPS_IN_BACKGROUND)

    def _start_lookup(self, did: str, max_lookups: int) -> InFlightLookup | None:
        """Return the in-flight lookup of this DID, or a new one; None if there are `max_lookups` others."""
        in_flight = self._in_flight[method_of(did)]
        if did not in in_flight and len(in_flight) < max_lookups:
            in_flight[did] = self._tasks.start(self._fetch(did), f"identity of {did}")
            in_flight[did].add_done_callback(lambda _done: self._end_lookup(did))
        return in_flight.get(did)

    def _end_lookup(self, did: str) -> None:
        del self._in_flight[method_of(did)][did]
        self._changed_in_flight.discard(did)

    async def _fetch(self, did: str) -> CachedIdentity | UnavailableError:
        try:
            stored = await self._source.resolve(did)
        except UnavailableError as error:
            self._observer.identity_lookup(method_of(did), error.reason)
            if (entry := self._memory.get(did)) is not None:
                entry.next_lookup = self._clock() + self._interval(entry)
            return error
        self._observer.identity_lookup(method_of(did), "found" if stored.problem is None else "missing")
        stored = replace(stored, stale=did in self._changed_in_flight)
        identity = _cached(stored)
        self._remember(did, identity, self._clock() + self._interval(self._memory.get(did)))
        try:
            await self._store.save_identities([stored])
        except UnavailableError as error:
            log.warning("identity.save-failed", did=did, error=str(error))
        return identity

    def _interval(self, entry: _Entry | None) -> float:
        """Return the seconds until the next lookup is allowed, after a lookup that replaces `entry`."""
        if entry is None:
            return 0.0  # the identity may change right after the first lookup
        # A directory may respond before it knows the change. If a signature shows that, one early retry is allowed.
        return self._lifetimes.changed_interval if entry.identity.stale else self._lifetimes.refresh_interval

    def _remember(self, did: str, identity: CachedIdentity, next_lookup: float) -> None:
        self._memory[did] = _Entry(identity, next_lookup)
        self._memory.move_to_end(did)
        while len(self._memory) > self._max_entries:
            self._memory.popitem(last=False)


def _usable(identity: CachedIdentity) -> CachedIdentity:
    """Return the identity, unless it had no key before an announced change: then it may have one now."""
    if identity.key is None and identity.stale:
        detail = "the identity changed, and the limits do not allow another lookup yet"
        raise UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE, detail)
    return identity


async def _result(in_flight: InFlightLookup | None) -> CachedIdentity:
    """Wait for a lookup. If the caller is cancelled, the lookup continues for other callers."""
    if in_flight is None:
        raise UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE, "too many lookups are in flight")
    result = await asyncio.shield(in_flight)
    if isinstance(result, UnavailableError):
        raise UnavailableError(result.reason, result.detail, retry_after=result.retry_after)
    return result


def _cached(stored: StoredIdentity) -> CachedIdentity:
    key = parse_did_key(stored.signing_key) if stored.signing_key else None
    return CachedIdentity(key, stored.pds and _interned(stored.pds), stored.problem, stored.fetched_at, stored.stale)


@lru_cache(maxsize=4_096)
def _interned(pds: str) -> str:
    """Return one string object for all accounts of a PDS, to save memory."""
    return pds
