"""A scripted clock, directory and database for the tests of the identity cache."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import cast

from indexer.atproto.crypto import PrivateKey, PublicKey
from indexer.errors import UnavailableError
from indexer.net.identity.did_resolver import DidResolver
from indexer.net.identity.identity_cache import IdentityCache, IdentityLifetimes
from indexer.reasons import FetchFailure
from indexer.sync.identity import StoredIdentity
from indexer.telemetry.metrics import Metrics

DID = "did:plc:ewvi7nxzyoun6zhxrhs64oiz"
KEYS = [PrivateKey.from_seed("k256", bytes([n])).public for n in range(3)]


def dids(count: int) -> list[str]:
    base32 = "abcdefghijklmnopqrstuvwxyz234567"
    return [f"did:plc:{'x' * 22}{base32[number // 32]}{base32[number % 32]}" for number in range(count)]


def cached_key(identities: IdentityCache) -> PublicKey | None:
    identity = identities.peek(DID)
    return None if identity is None else identity.key


class World:
    """A clock, a directory, a table of identities and the metrics.

    Attributes:
        key: Index of the key in the documents of the directory.
        host: The PDS in the documents of the directory.
        problem: If set, the directory has no key for any DID, for this reason.
        requests: Number of requests to the directory.
        known_requests: Number of those that were made for known identities.
        request_received: Set when the directory receives a request.
        directory_gate: The directory responds only while it is set.
        directory_down: The directory fails.
        bug: The directory raises an exception that is no `UnavailableError`.
        queries: Number of queries to the table.
        saves: Number of saves in the table, with those that failed.
        table_gate: The table responds only while it is set.
        database_down: The table fails.
        refused: A save that contains one of these DIDs fails.
    """

    def __init__(self) -> None:
        self.now = 1_000.0
        self.requests = 0
        self.known_requests = 0
        self.directory_down = False
        self.key = 0
        self.host = "pds.test"
        self.bug = False
        self.problem: str | None = None
        self.directory_gate = asyncio.Event()
        self.directory_gate.set()
        self.request_received = asyncio.Event()
        self.table: dict[str, StoredIdentity] = {}
        self.database_down = False
        self.refused: set[str] = set()
        self.table_gate = asyncio.Event()
        self.table_gate.set()
        self.queries = 0
        self.saves = 0
        self.metrics = Metrics()
        self.caches: list[IdentityCache] = []

    async def resolve(self, did: str, *, known: bool) -> StoredIdentity:
        self.requests += 1
        self.known_requests += known
        self.request_received.set()
        await self.directory_gate.wait()
        if self.bug:
            raise ZeroDivisionError
        if self.directory_down:
            raise UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE, "down")
        key = None if self.problem else KEYS[self.key].did_key()
        pds = f"https://{self.host}" if self.host else None
        return StoredIdentity(did, "alice.test", pds, key, self.now, problem=self.problem)

    async def load(self, dids: Sequence[str]) -> dict[str, StoredIdentity]:
        self.queries += 1
        found = {did: self.table[did] for did in dids if did in self.table}
        await self.table_gate.wait()
        if self.database_down:
            raise UnavailableError(FetchFailure.UNREACHABLE, "the database")
        return found

    async def save(self, stored: Sequence[StoredIdentity]) -> None:
        self.saves += 1
        await self.table_gate.wait()
        if self.database_down or not self.refused.isdisjoint(identity.did for identity in stored):
            raise UnavailableError(FetchFailure.UNREACHABLE, "the database")
        self.table |= {identity.did: identity for identity in stored}

    def counted(self, name: str) -> Counter[tuple[str, ...]]:
        """Return the values of a counter that are not 0, by the values of its labels."""
        return Counter(
            {
                tuple(sample.labels.values()): int(sample.value)
                for family in self.metrics.registry.collect()
                for sample in family.samples
                if sample.name == f"indexer_{name}_total" and sample.value
            }
        )

    async def settle(self) -> None:
        """Let all tasks run until they wait for something."""
        for _ in range(20):
            await asyncio.sleep(0)

    def identities(self, max_entries: int = 10, timeout: float = 5.0, refresh_rate: float = 10_000.0) -> IdentityCache:
        cache = IdentityCache(
            cast(DidResolver, self),
            self,
            self.metrics,
            clock=lambda: self.now,
            refresh_rate=refresh_rate,
            lifetimes=IdentityLifetimes(timeout=timeout),
            max_entries=max_entries,
        )
        self.caches.append(cache)
        return cache
