"""Identities at hand: in memory with their keys parsed, in the database behind it, from the network behind that."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from indexer.atproto.crypto import PublicKey, parse_did_key
from indexer.errors import UnavailableError
from indexer.sync.identity import StoredIdentity

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Known:
    """An identity with its key parsed. `key` or `pds` is None where the identity definitely has none."""

    key: PublicKey | None
    pds: str | None
    handle: str | None
    problem: str | None
    fetched_at: float
    stale: bool


class IdentityStore(Protocol):
    """The identities' table."""

    async def load(self, dids: Sequence[str]) -> Mapping[str, StoredIdentity]: ...
    async def save(self, identities: Sequence[StoredIdentity]) -> None: ...


class IdentitySource(Protocol):
    """Where identities come from; see `Resolver`."""

    async def resolve(self, did: str) -> StoredIdentity: ...


@dataclass(frozen=True, slots=True)
class Freshness:
    """Seconds: how long an answer holds, how long "there is none" holds, how soon one may ask again unprompted."""

    found: float = 86_400.0
    missing: float = 120.0
    refresh: float = 60.0


class Identities:
    """What the daemon knows of identities; at most `most` of them in memory, one look-up at a time for each DID.

    `on_lookup(method, result)` hears of each look-up over the network.
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
    ) -> None:
        self._source = source
        self._store = store
        self._clock = clock
        self._freshness = freshness or Freshness()
        self._most = most
        self._on_lookup = on_lookup
        self._memory: OrderedDict[str, Known] = OrderedDict()
        self._flights: dict[str, asyncio.Task[Known]] = {}

    def peek(self, did: str) -> Known | None:
        """What is in memory and still holds."""
        known = self._memory.get(did)
        return known if known is not None and self._holds(known) else None

    async def warm(self, dids: Iterable[str]) -> None:
        """Brings into memory what the database has of these, in one query."""
        missing = [did for did in dids if did not in self._memory]
        if missing:
            for did, stored in (await self._store.load(missing)).items():
                self._remember(did, _known(stored))

    async def lookup(self, did: str, *, refresh: bool = False) -> Known:
        """The identity, from the network if nothing at hand holds, or if `refresh` asks for a newer one.

        A refresh soon after a fetch answers with what was fetched. When the network has no answer, an older
        identity serves as well; raises `UnavailableError` if there is none.
        """
        await self.warm([did])
        known = self._memory.get(did)
        if known is not None and self._holds(known) and not (refresh and self._refreshable(known)):
            return known
        flight = self._flights.get(did)
        if flight is None:
            flight = self._flights[did] = asyncio.create_task(self._fetch(did), name=f"identity of {did}")
            flight.add_done_callback(lambda done: self._landed(did, done))
        try:
            return await asyncio.shield(flight)
        except UnavailableError as error:
            if known is None or known.key is None:
                raise
            log.info("identity.kept", did=did, error=str(error))
            return known

    def _landed(self, did: str, flight: asyncio.Task[Known]) -> None:
        del self._flights[did]
        if not flight.cancelled():
            flight.exception()  # whoever waited has it; if nobody did any more, nobody needs to hear of it

    def mark_stale(self, dids: Iterable[str]) -> None:
        """These have changed: the next look-up goes to the network. The database is told by the batch."""
        for did in dids:
            if (known := self._memory.get(did)) is not None:
                self._memory[did] = replace(known, stale=True)

    async def _fetch(self, did: str) -> Known:
        method = "web" if did.startswith("did:web:") else "plc"
        try:
            stored = await self._source.resolve(did)
        except UnavailableError as error:
            self._on_lookup(method, error.reason)
            raise
        self._on_lookup(method, "found" if stored.problem is None else "missing")
        known = _known(stored)
        self._remember(did, known)
        try:
            await self._store.save([stored])
        except UnavailableError as error:
            log.warning("identity.not-saved", did=did, error=str(error))
        return known

    def _remember(self, did: str, known: Known) -> None:
        self._memory[did] = known
        self._memory.move_to_end(did)
        while len(self._memory) > self._most:
            self._memory.popitem(last=False)

    def _holds(self, known: Known) -> bool:
        lasts = self._freshness.found if known.problem is None else self._freshness.missing
        return not known.stale and self._clock() - known.fetched_at < lasts

    def _refreshable(self, known: Known) -> bool:
        return self._clock() - known.fetched_at >= self._freshness.refresh


def _known(stored: StoredIdentity) -> Known:
    key = parse_did_key(stored.signing_key) if stored.signing_key else None
    return Known(key, stored.pds, stored.handle, stored.problem, stored.fetched_at, stored.stale)
