"""The methods of the store for accounts: deletions, identities and handles."""

from collections.abc import Mapping, Sequence

from indexer.db import erase_records, identities
from indexer.db.connections import Connections
from indexer.db.erase_records import ErasedBatch
from indexer.sync.identity import DueIdentity, HandleCheck, HandleClaim, StoredIdentity


class AccountMethods(Connections):
    """Deleted accounts, identities and handles."""

    async def erase_batch(self, buckets: Sequence[int], now: float, *, did: str | None = None) -> ErasedBatch | None:
        """Erase records of one account whose grace period is over; return None if there is no such account.

        An account whose DID is gone is erased only if its `did` is given.
        """
        async with self._transaction() as connection:
            return await erase_records.erase_batch(connection, buckets, now, did)

    async def due_gone(self, buckets: Sequence[int], limit: int, now: float) -> list[str]:
        """Return DIDs that are gone from their directory and whose grace period is over."""
        async with self._connection() as connection:
            return await erase_records.due_gone(connection, buckets, limit, now)

    async def load_identities(self, dids: Sequence[str]) -> Mapping[str, StoredIdentity]:
        """Return the stored identities by DID; unknown DIDs are left out."""
        async with self._connection() as connection:
            return await identities.load_identities(connection, dids)

    async def save_identities(self, stored: Sequence[StoredIdentity]) -> None:
        """Store identities, unless a later reading is stored."""
        async with self._transaction() as connection:
            await identities.save_identities(connection, stored, distributed=self.shards > 1)

    async def due_identities(self, buckets: Sequence[int], limit: int, now: float, *, web: bool) -> list[DueIdentity]:
        """Return identities to refresh: at most `limit` that became due first, and `limit` that became due last."""
        async with self._connection() as connection:
            return await identities.due_identities(connection, buckets, limit, now, web=web)

    async def postpone_refresh(self, did: str, until: float, failures: int) -> None:
        """Set the time of the next refresh and the number of failures, unless the identity was refreshed meanwhile."""
        async with self._connection() as connection:
            await identities.postpone_refresh(connection, did, until, failures)

    async def did_of_handle(self, handle: str) -> str | None:
        """Return the DID for which the handle was verified; None if there is none."""
        async with self._connection() as connection:
            return await identities.did_of_handle(connection, handle)

    async def claim_handles(
        self, count: int, buckets: Sequence[int], lease_seconds: float, now: float
    ) -> list[HandleClaim]:
        """Claim at most `count` handles that are due to be checked; those that became due last come first."""
        async with self._connection() as connection:
            return await identities.claim_handles(connection, count, buckets, now + lease_seconds, now)

    async def postpone_handles(self, claims: Sequence[HandleClaim], due: Sequence[float], lease_until: float) -> None:
        """Give claims back that end at `lease_until`, each with the time from which it is due again."""
        async with self._connection() as connection:
            await identities.postpone_handles(connection, claims, due, lease_until)

    async def save_handle_check(self, check: HandleCheck) -> None:
        """Store the result of a check, unless the account claims another handle now."""
        async with self._transaction() as connection:
            await identities.save_handle_check(connection, check)
