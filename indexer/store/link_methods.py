"""The methods of the store for links."""

from collections.abc import Mapping, Sequence

from indexer.store import link_backfill, link_rows
from indexer.store.connections import Connections
from indexer.store.link_backfill import LinkState, RecordPath, RepoStep
from indexer.store.link_rows import RecountPosition


class LinkMethods(Connections):
    """Links between records, and their counts."""

    async def turn_links_on(self, buckets: Sequence[int]) -> LinkState:
        """Keep the links of these buckets from now on, unless outdated ones are stored; return the state."""
        async with self._transaction() as connection:
            return await link_backfill.turn_on(connection, buckets)

    async def turn_links_off(self, buckets: Sequence[int]) -> bool:
        """Keep the links of these buckets no longer; return True if nothing is left to remove."""
        async with self._transaction() as connection:
            return await link_backfill.turn_off(connection, buckets)

    async def link_state(self, buckets: Sequence[int]) -> LinkState:
        """Return the state of the links of these buckets."""
        async with self._connection() as connection:
            return await link_backfill.load_state(connection, buckets)

    async def fold_link_deltas(self, buckets: Sequence[int], limit: int) -> int:
        """Add at most `limit` deltas to the counts of targets in these buckets; return how many."""
        async with self._transaction() as connection:
            return await link_rows.fold_deltas(connection, buckets, limit)

    async def link_recounts_due(self, buckets: Sequence[int], limit: int) -> list[str]:
        """Return repos whose visibility changed, and whose links are to be counted or not any more."""
        async with self._connection() as connection:
            return await link_rows.recounts_due(connection, buckets, limit)

    async def recount_links(self, did: str, after: RecountPosition, limit: int) -> RecountPosition | None:
        """Change whether links of a repo are counted; return the position to continue from, None at the end."""
        async with self._transaction() as connection:
            return await link_rows.recount(connection, did, after, limit)

    async def link_backfill_position(self, buckets: Sequence[int]) -> str | None:
        """Return the DID up to which the backfill of links is done; None if it is complete."""
        async with self._connection() as connection:
            return await link_backfill.load_position(connection, buckets)

    async def next_link_repos(self, buckets: Sequence[int], after: str, limit: int) -> list[str]:
        """Return the next repos of the backfill of links, in the order of their DIDs."""
        async with self._connection() as connection:
            return await link_backfill.next_repos(connection, buckets, after, limit)

    async def backfill_links(self, repos: Mapping[str, RecordPath]) -> tuple[dict[str, RepoStep], int]:
        """Add the links of a part of the stored records of the first of these repos, those after a path each."""
        async with self._transaction() as connection:
            return await link_backfill.backfill_step(connection, repos)

    async def save_link_backfill(self, buckets: Sequence[int], did: str, repos: Mapping[int, int]) -> None:
        """Store that the backfill is done up to a DID, and how many repos of each bucket since the last time."""
        async with self._transaction() as connection:
            await link_backfill.save_position(connection, buckets, did, repos)

    async def finish_link_backfill(self, buckets: Sequence[int]) -> None:
        """Store that the backfill of links is complete."""
        async with self._connection() as connection:
            await link_backfill.save_done(connection, buckets)
