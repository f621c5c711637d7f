"""Signing keys for planning, from the identity cache or by a lookup; shared by the live path and the replay."""

import asyncio
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager, nullcontext

from indexer.errors import UnavailableError
from indexer.net.identity import CachedIdentity, IdentityCache
from indexer.reasons import FetchFailure
from indexer.sync.policy import KeyState


class KeyStates:
    """Returns the key state of a DID; a lookup may take `timeout` seconds."""

    def __init__(self, identities: IdentityCache, *, timeout: float) -> None:
        self._identities = identities
        self._timeout = timeout

    async def load(self, dids: Iterable[str]) -> None:
        """Load identities from the database into the cache, with one query.

        Raises:
            DatabaseError: The query failed.
        """
        await self._identities.preload(dids)

    def mark_stale(self, dids: Iterable[str]) -> None:
        """Mark these identities as changed, so that the next lookup asks the network."""
        self._identities.mark_stale(dids)

    def cached(self, did: str) -> KeyState | None:
        """Return the key state from the cache; None if only a lookup can tell."""
        identity = self._identities.peek(did)
        return None if identity is None else _key_state(identity, final=False)

    def known(self, did: str) -> bool:
        """Return True if a document of the DID is in memory, so that it is not a made-up DID."""
        return self._identities.knows(did)

    async def fetch(
        self, did: str, *, refresh: bool = False, slot: AbstractAsyncContextManager[None] | None = None
    ) -> KeyState:
        """Look up the key state; the result is final for the event if it is a `refresh`.

        Args:
            did: The DID.
            refresh: Ask for a newer identity than the cached one.
            slot: Limits concurrency. It is entered when the network may be asked, and before the timeout begins.

        Raises:
            UnavailableError: The lookup failed or took too long.
        """
        await asyncio.sleep(self._identities.refresh_delay(did, refresh=refresh))
        try:
            async with slot or nullcontext(), asyncio.timeout(self._timeout):
                identity = await self._identities.lookup(did, refresh=refresh)
        except TimeoutError:
            raise UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE, "no answer in time") from None
        return _key_state(identity, final=refresh)


def _key_state(identity: CachedIdentity, *, final: bool) -> KeyState:
    return KeyState(identity.key, True, final, identity.stale, identity.host, identity.doubtful, identity.fetched_at)
