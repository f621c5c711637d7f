"""Read the progress of links: their state, and how far the backfill is."""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

from indexer.db.columns import Connection

MAX_OPEN = 100_000
"""Recounts that are counted at most."""

LinkProgressState = Literal["off", "backfill", "complete"]

_READER = """
    select did, repos, date_part('epoch', enabled_at) as enabled_at, done_at is not null as done
    from indexer.link_reader
"""
_OPEN_RECOUNTS = "select count(*) from (select 1 from indexer.links_to_recount limit $1) found"
_PLC = "did:plc:"
_BASE32 = "234567abcdefghijklmnopqrstuvwxyz"
_SIGNIFICANT = 6
"""Characters of a DID that decide its place among all others: a billion places."""


@dataclass(frozen=True, slots=True)
class LinkProgress:
    """The progress of links. How far they are behind is in the status of the consumer `links`.

    Attributes:
        progress: The share of the DIDs whose links are stored, by their order; 0 if no links are kept.
        repos_done: Repos that the backfill has visited.
        enabled_at: When links were turned on, in Unix seconds; None if they are off.
        open_recounts: Repos whose visibility changed and whose links are not recounted yet, at most `MAX_OPEN`.
    """

    state: LinkProgressState = "off"
    progress: float = 0.0
    repos_done: int = 0
    enabled_at: float | None = None
    open_recounts: int = 0


async def load_progress(connection: Connection) -> LinkProgress:
    """Return the progress. The cost does not depend on the number of links."""
    row = await connection.fetchrow(_READER)
    if row is None:
        return LinkProgress()
    return LinkProgress(
        state="complete" if row["done"] else "backfill",
        progress=1.0 if row["done"] else share_before(row["did"]),
        repos_done=row["repos"],
        enabled_at=row["enabled_at"],
        open_recounts=await connection.fetchval(_OPEN_RECOUNTS, MAX_OPEN),
    )


def share_before(did: str) -> float:
    """Return the estimated share of all DIDs up to this one. Nearly all are hashes (did:plc), so they are spread."""
    if not did.startswith(_PLC):
        return 0.0 if did < _PLC else 1.0
    share = 0.0
    for character in reversed(did[len(_PLC) :][:_SIGNIFICANT]):
        share = (bisect_left(_BASE32, character) + share) / len(_BASE32)
    return min(share, 1.0)
