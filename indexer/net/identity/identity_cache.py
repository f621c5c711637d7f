"""Cache of identities: in memory with parsed keys, then in the database, then from the network.

An identity that reached its maximum age is used while a newer one is fetched, so that no stream waits for a directory.
One that is known to have changed is looked up first (docs/protocol.md#identity).

Attackers can cause lookups with forged messages and announced changes. So refreshes of known identities have an
interval per DID, and a budget, of which a host or a registered domain gets only a share.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import lru_cache
from math import inf
from typing import NoReturn, Protocol

import structlog

from indexer.atproto.crypto import PublicKey, parse_did_key
from indexer.concurrency.background_tasks import BackgroundTasks
from indexer.concurrency.bounded_dict import BoundedDict
from indexer.concurrency.shared_calls import SharedCalls
from indexer.crash_points import crash_point
from indexer.errors import UnavailableError
from indexer.net.http.host_limits import registered_domain
from indexer.net.http.http_client import host_of
from indexer.net.identity.did_resolver import METHODS, DidResolver, Method, method_of
from indexer.reasons import FetchFailure
from indexer.sync.identity import StoredIdentity, add_denial
from indexer.sync.policy import MAX_IDENTITY_AGE
from indexer.telemetry.metrics import Metrics, RefreshCause

MAX_LOOKUPS = 128
"""Maximum in-flight lookups per DID method, of known identities and again of new DIDs."""
MAX_LOOKUPS_IN_BACKGROUND = 16
"""In-flight lookups up to which a background refresh may start another one."""
BACKGROUND_SHARE = 0.5
"""The budget of background refreshes, as a share of the rate of other refreshes. It is in addition to that rate."""
MAX_SHARED = 500
"""Identities that are saved in one transaction, or loaded in one query."""
BURST_SECONDS = 10.0
SHARES = 5
"""The number of equal shares of the rate. A host gets at most one of them."""
SHARES_OF_DOMAIN = 4
"""The shares that all hosts of one registered domain get together: its owner can give any account a host of its own."""
MAX_IDLE_USERS = 16_384
"""Above this number of hosts and domains, those whose share is unused are forgotten."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CachedIdentity:
    """An identity with its key parsed. `problem` says why it has no key or no PDS."""

    key: PublicKey | None  # None if the identity definitely has no key, or the directory denies the DID
    pds: str | None  # the base URL; None if the identity definitely has none
    problem: str | None
    fetched_at: float  # Unix seconds
    stale: bool  # the identity is known to have changed, or a refresh failed
    denied: bool = False  # the directory denies the DID
    gone: bool = False  # it has denied the DID often enough to be certain (`identity.CERTAIN_DENIALS`)

    @property
    def doubtful(self) -> bool:
        """True if the directory denies the DID, and may be wrong. It is asked again, hours apart."""
        return self.denied and not self.gone

    def is_recent(self, now: float) -> bool:
        """Return True if the identity was fetched so recently that what its PDS says about the account counts."""
        return not self.stale and 0 <= now - self.fetched_at <= MAX_IDENTITY_AGE

    @property
    def host(self) -> str | None:
        """The name of the PDS in limits and states of hosts, see `host_of`."""
        return host_of(self.pds) if self.pds else None


class IdentityTable(Protocol):
    """The table of identities. Its methods raise `UnavailableError` if the database is unavailable."""

    async def load(self, dids: Sequence[str]) -> Mapping[str, StoredIdentity]:
        """Return the stored identities by DID."""

    async def save(self, identities: Sequence[StoredIdentity]) -> None:
        """Write identities, unless newer ones are stored."""


@dataclass(frozen=True, slots=True)
class IdentityLifetimes:
    """Ages and intervals of identities, in seconds."""

    max_age: float = 86_400.0  # from which an identity is refreshed in the background
    missing_max_age: float = 120.0  # from which an identity without key or PDS is looked up again
    refresh_interval: float = 60.0  # from one lookup of a DID to the next
    changed_interval: float = 5.0  # the same after an announced change
    timeout: float = 5.0  # to wait for a lookup if an older identity is known


@dataclass(slots=True)
class LookupTotals:
    """Lookups over the network since the start of the process: with a definite result, and without one."""

    answered: int = 0
    failed: int = 0
    last_error: str | None = None


@dataclass(slots=True)
class _Lookup:
    """A lookup in flight."""

    task: asyncio.Task[CachedIdentity | UnavailableError]
    known: bool  # the identity was known when the lookup began
    changed: bool = False  # a change was announced since then, so the result may be from before the change


@dataclass(slots=True)
class _Entry:
    """An identity in memory. It is not looked up before `next_lookup` (Unix seconds)."""

    identity: CachedIdentity
    next_lookup: float
    unsaved: bool = False  # the database failed


@dataclass(slots=True)
class RefreshBudget:
    """Allows `rate` actions per second in total, a fifth of that to each host, and four fifths to each domain.

    The unused budget of the last ten seconds can be spent at once.
    """

    rate: float
    full_at: dict[str, float] = field(default_factory=dict)  # when the unused share is complete again

    def spend(self, host: str, domain: str, now: float) -> bool:
        """Count one action for a host at `now` (seconds) and return True; return False if the budget is spent."""
        share = self.rate / SHARES
        rates = {"total": self.rate, f"host {host}": share, f"domain {domain}": share * SHARES_OF_DOMAIN}
        full_at = {name: _after_spending(self.full_at.get(name, 0.0), rate, now) for name, rate in rates.items()}
        if inf in full_at.values():
            return False
        self.full_at |= full_at
        if len(self.full_at) > MAX_IDLE_USERS:
            self.full_at = {name: at for name, at in self.full_at.items() if at > now}
        return True


def _after_spending(full_at: float, rate: float, now: float) -> float:
    """Return when the budget is complete again after one more action at `now`; infinity if it is spent."""
    limit = now + max(BURST_SECONDS, 1 / rate)
    # A later time was computed before the clock was set back.
    after = (full_at if now < full_at <= limit else now) + 1 / rate
    return after if after <= limit else inf


@dataclass(eq=False)
class IdentityCache:
    """Identities of the accounts on the stream, with at most one in-flight lookup per DID."""

    resolver: DidResolver
    table: IdentityTable
    metrics: Metrics
    _: KW_ONLY
    clock: Callable[[], float]  # returns Unix seconds
    refresh_rate: float  # maximum lookups of known identities per second
    lifetimes: IdentityLifetimes = IdentityLifetimes()
    max_entries: int = 200_000

    def __post_init__(self) -> None:
        self._loads = SharedCalls(self.table.load, lambda dids: len(dids) <= MAX_SHARED)
        self._saves = SharedCalls(self.table.save, lambda identities: len(identities) <= MAX_SHARED)
        self._refresh_budget = RefreshBudget(self.refresh_rate)
        self._background_budget = RefreshBudget(self.refresh_rate * BACKGROUND_SHARE)
        self._memory = BoundedDict[str, _Entry](self.max_entries)
        self._in_flight: dict[str, _Lookup] = {}
        # For each load from the database that runs: its DIDs, and the DIDs that have changed since it began. Keys are
        # the object identities of the second part, because two loads may be equal.
        self._running_loads: dict[int, tuple[Sequence[str], set[str]]] = {}
        self._tasks = BackgroundTasks()
        self.lookups: dict[Method, LookupTotals] = {method: LookupTotals() for method in METHODS}

    async def run(self) -> NoReturn:
        """Wait until a lookup fails because of a bug in this program, and raise its exception."""
        await self._tasks.run()

    async def close(self) -> None:
        """Cancel the lookups in flight."""
        await self._tasks.close()

    def peek(self, did: str) -> CachedIdentity | None:
        """Return the identity in memory; None if there is none or it must be looked up first."""
        entry = self._memory.get(did)
        return None if entry is None or self._cause(entry) else entry.identity

    def knows(self, did: str) -> bool:
        """Return True if a document of this DID is in memory, so that it is not a made-up DID."""
        entry = self._memory.get(did)
        return entry is not None and (entry.identity.key is not None or entry.identity.pds is not None)

    def refresh_delay(self, did: str, *, refresh: bool = False) -> float:
        """Return the seconds to wait until `lookup` can fetch a newer identity; 0 if waiting has no use."""
        entry = self._memory.get(did)
        if entry is None or did in self._in_flight or self._cause(entry, refresh=refresh) is None:
            return 0.0
        left = self._wait(entry)
        return left if left <= self.lifetimes.changed_interval else 0.0

    async def preload(self, dids: Iterable[str]) -> None:
        """Load identities from the database into memory, in one query, and refresh old ones in the background.

        One in memory is loaded again when it is old: meanwhile, an export may have confirmed or changed it.

        Raises:
            UnavailableError: The database is unavailable.
        """
        dids, oldest = list(dids), self.clock() - self.lifetimes.max_age
        missing = [did for did in dids if self._fetched_at(did) <= oldest]
        loaded = await self._load(missing) if missing else {}
        stored = {did: loaded[did] for did in missing if did in loaded}
        for did, identity in stored.items():
            if self._fetched_at(did) < identity.fetched_at:  # otherwise it was fetched meanwhile and is newer
                self._memory[did] = _Entry(_cached(identity), self.clock())
        self.metrics.identity_cache["memory"].inc(len(dids) - len(missing))
        self.metrics.identity_cache["database"].inc(len(stored))
        self.metrics.identity_cache["nowhere"].inc(len(missing) - len(stored))
        for did in dids:
            if (entry := self._memory.get(did)) is not None:
                self._memory.move_to_end(did)
                if entry.unsaved or entry.identity.fetched_at <= oldest:
                    self._refresh_in_background(did, entry)

    async def _load(self, dids: Sequence[str]) -> Mapping[str, StoredIdentity]:
        """Load identities. Those that change in the database meanwhile are stale: the old row may have been read."""
        changed = set[str]()
        self._running_loads[id(changed)] = dids, changed
        try:
            loaded = await self._loads.add(dids)
        finally:
            del self._running_loads[id(changed)]
        return {**loaded, **{did: replace(loaded[did], stale=True) for did in loaded.keys() & changed}}

    def _note_changed(self, dids: Iterable[str] | None) -> None:
        """Note for the loads that run that identities have changed in the database; None: all."""
        for loading, changed in self._running_loads.values():
            changed.update(loading if dids is None else dids)

    async def lookup(self, did: str, *, refresh: bool = False, preloaded: bool = False) -> CachedIdentity:
        """Return the identity, from the network if none is known, or if `refresh` and the limits allow it.

        If the network gives no result, a known identity with a key is returned with `stale`.

        Raises:
            UnavailableError: The network gives no result, and no identity with a key is known.
        """
        try:
            await self.preload([] if preloaded else [did])
        except UnavailableError as error:  # the network can replace the database
            log.debug("identity.load-failed", did=did, error=str(error))
        entry = self._memory.get(did)
        if entry is None:
            return await _result(self._start_lookup(did))
        cause = self._cause(entry, refresh=refresh)
        if cause is None or not self._may_refresh(did, entry, cause):
            if entry.identity.key is None and entry.identity.stale:  # it had no key before the change, and may have one
                detail = "the identity changed, and the limits do not allow another lookup yet"
                raise UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE, detail)
            return entry.identity
        in_flight = self._start_lookup(did)
        if entry.identity.key is None:
            return await _result(in_flight)
        if in_flight is None:
            return entry.identity  # not marked as stale: the cause is the load, not this identity
        try:
            async with asyncio.timeout(self.lifetimes.timeout):
                return await _result(in_flight)
        except (UnavailableError, TimeoutError) as error:
            log.debug("identity.refresh-failed", did=did, error=str(error) or "no response in time")
            return replace(entry.identity, stale=True)

    async def refresh(self, did: str) -> CachedIdentity | None:
        """Look the identity up in the network; return None if the limits do not allow that now.

        Raises:
            UnavailableError: The lookup failed, or the database is unavailable.
        """
        await self.preload([did])
        entry = self._memory.get(did)
        if entry is not None and not self._may_refresh(did, entry, "change"):
            return None
        in_flight = self._start_lookup(did)
        return None if in_flight is None else await _result(in_flight)

    def forget(self, dids: Sequence[str] | None) -> None:
        """Drop identities that have changed in the database from memory; None: all."""
        if dids is None:
            self._memory.clear()
        self._note_changed(dids)
        for did in dids or ():
            if (lookup := self._in_flight.get(did)) is not None:
                lookup.changed = True
            self._memory.pop(did, None)

    def mark_stale(self, dids: Iterable[str]) -> None:
        """Record that these identities changed, so that the next `lookup` fetches them again.

        This changes only the memory; the batch that applies the change also marks the rows in the database.
        """
        next_lookup, dids = self.clock() + self.lifetimes.changed_interval, list(dids)
        self._note_changed(dids)
        for did in dids:
            if (lookup := self._in_flight.get(did)) is not None:
                lookup.changed = True
            if (entry := self._memory.get(did)) is not None:
                entry.identity = replace(entry.identity, stale=True)
                entry.next_lookup = min(entry.next_lookup, next_lookup)

    def _fetched_at(self, did: str) -> float:
        """Return when the identity in memory was fetched; -infinity if there is none."""
        entry = self._memory.get(did)
        return -inf if entry is None else entry.identity.fetched_at

    def _wait(self, entry: _Entry) -> float:
        """Return the seconds until the identity may be looked up again, or 0.

        A wait longer than any interval began before the clock was set back, and is over.
        """
        left = entry.next_lookup - self.clock()
        return left if 0 < left <= max(self.lifetimes.refresh_interval, self.lifetimes.changed_interval) else 0.0

    def _cause(self, entry: _Entry, *, refresh: bool = False) -> RefreshCause | None:
        """Return why the identity must be looked up before it is used; None if it need not."""
        identity = entry.identity
        if identity.stale:
            return "change"
        if refresh:
            return "signature"
        is_recent = 0 <= self.clock() - identity.fetched_at < self.lifetimes.missing_max_age
        return None if identity.problem is None or is_recent or self._wait(entry) else "age"

    def _may_refresh(self, did: str, entry: _Entry, cause: RefreshCause) -> bool:
        """Return True if a lookup is in flight or the limits allow one."""
        if did in self._in_flight:
            return True
        now = self.clock()
        if self._wait(entry):
            result = "too-soon"
        elif not _spend(self._refresh_budget, entry.identity, now):
            result = "over-budget"
        else:
            result = "asked"
        self.metrics.identity_refreshes[cause, result].inc()
        return result == "asked"

    def _refresh_in_background(self, did: str, entry: _Entry) -> None:
        """Look up an identity that reached its maximum age or was not saved, if few other lookups are in flight."""
        in_flight = sum(method_of(other) == method_of(did) for other in self._in_flight)
        if self._wait(entry) or did in self._in_flight or in_flight >= MAX_LOOKUPS_IN_BACKGROUND:
            return
        if _spend(self._background_budget, entry.identity, self.clock()):
            self.metrics.identity_refreshes["age", "asked"].inc()
            self._start_lookup(did)

    def _start_lookup(self, did: str) -> asyncio.Task[CachedIdentity | UnavailableError] | None:
        """Return the in-flight lookup of this DID, or a new one; None if there are too many others of its kind."""
        if (lookup := self._in_flight.get(did)) is not None:
            return lookup.task
        known, lookups = self.knows(did), self._in_flight.items()
        if sum(one.known is known and method_of(other) == method_of(did) for other, one in lookups) >= MAX_LOOKUPS:
            return None
        task = self._tasks.start(self._fetch(did, known=known), f"identity of {did}")
        self._in_flight[did] = _Lookup(task, known)
        task.add_done_callback(lambda _done: self._in_flight.pop(did))
        return task

    async def _fetch(self, did: str, *, known: bool) -> CachedIdentity | UnavailableError:
        totals, lookups = self.lookups[method_of(did)], self.metrics.identity_lookups
        before: StoredIdentity | None = None
        try:
            found = await self.resolver.resolve(did, known=known)
            has_content = found.signing_key is not None or found.pds is not None
            if not has_content:
                before = (await self._loads.add([did])).get(did)
        except UnavailableError as error:
            totals.failed, totals.last_error = totals.failed + 1, str(error)
            lookups[method_of(did), error.reason].inc()
            if (entry := self._memory.get(did)) is not None:
                entry.next_lookup = self.clock() + self._interval(entry)
            return error
        totals.answered += 1
        lookups[method_of(did), "found" if found.problem is None else "missing"].inc()
        stored = replace(found, stale=self._in_flight[did].changed)
        if before is not None and found.denials:
            stored = add_denial(before, stored)
        identity = _cached(stored)
        self._memory[did] = _Entry(identity, self.clock() + self._interval(self._memory.get(did)))
        if has_content or before is not None:  # nothing is stored about a DID that may be made up
            crash_point("identity.resolved")
            await self._save(stored)
        return identity

    async def _save(self, identity: StoredIdentity) -> None:
        """Save an identity together with others, or alone if that fails: another one may be the cause.

        If it is not saved, a later message of the account causes a refresh in the background, which saves it.
        """
        for save in (self._saves.add, self.table.save):
            try:
                await save([identity])
            except UnavailableError as error:
                log.debug("identity.save-failed", did=identity.did, error=str(error))
            else:
                return
        if (entry := self._memory.get(identity.did)) is not None:
            entry.unsaved = True

    def _interval(self, entry: _Entry | None) -> float:
        """Return the seconds until the next lookup is allowed, after a lookup that replaces `entry`."""
        if entry is None:
            return 0.0  # the identity may change right after the first lookup
        # A directory may respond before it knows the change. If a signature shows that, one early retry is allowed.
        return self.lifetimes.changed_interval if entry.identity.stale else self.lifetimes.refresh_interval


def _spend(budget: RefreshBudget, identity: CachedIdentity, now: float) -> bool:
    return budget.spend(identity.host or "", _domain_of(identity.pds) if identity.pds else "", now)


async def _result(in_flight: asyncio.Task[CachedIdentity | UnavailableError] | None) -> CachedIdentity:
    """Wait for a lookup. If the caller is cancelled, the lookup continues for other callers."""
    if in_flight is None:
        raise UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE, "too many lookups are in flight")
    result = await asyncio.shield(in_flight)
    if isinstance(result, UnavailableError):
        raise UnavailableError(result.reason, result.detail, retry_after=result.retry_after)
    return result


def _cached(stored: StoredIdentity) -> CachedIdentity:
    denied = stored.denials > 0
    key = parse_did_key(stored.signing_key) if stored.signing_key and not denied else None
    pds = stored.pds and _interned(stored.pds)
    return CachedIdentity(key, pds, stored.problem, stored.fetched_at, stored.stale, denied, stored.gone)


@lru_cache(maxsize=4_096)  # called for each event
def _domain_of(pds: str) -> str:
    return registered_domain(host_of(pds))


@lru_cache(maxsize=4_096)
def _interned(pds: str) -> str:
    """Return one string object for all accounts of a PDS, to save memory."""
    return pds
