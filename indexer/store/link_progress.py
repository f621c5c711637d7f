"""Read the progress of links: their state, how far the backfill is, and how many changes of counts are open."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import asyncpg

from indexer.store.columns import Connection
from indexer.sync.shard import BUCKETS

MAX_OPEN = 100_000
"""Open deltas and recounts that are counted at most."""

LinkProgressState = Literal["off", "backfill", "complete", "outdated"]

_BUCKETS = """
    select backfilled_to, backfilled_repos, date_part('epoch', enabled_at) as enabled_at, done_at is not null as done,
        off_at is not null as off
    from indexer.link_bucket
"""
_OPEN_DELTAS = "select count(*) from (select 1 from indexer.link_delta limit $1) found"
_OPEN_RECOUNTS = "select count(*) from (select 1 from indexer.link_recount limit $1) found"
_PLC = "did:plc:"
_BASE32 = "234567abcdefghijklmnopqrstuvwxyz"
_SIGNIFICANT = 6
"""Characters of a DID that decide its place among all others: a billion places."""


@dataclass(frozen=True, slots=True)
class LinkProgress:
    """The progress of the links of all shards.

    Attributes:
        state: `outdated` if some shards keep links and others were turned off, so that nothing is counted.
        progress: The share of the DIDs whose links are stored, by their order; 0 if no links are kept.
        repos_done: Repos that the backfill has visited.
        enabled_at: When links were turned on, in Unix seconds; None if they are off.
        open_deltas: Changes of counts that are not added to the counts yet, at most `MAX_OPEN`.
        open_recounts: Changes of the visibility of repos whose links are not recounted yet, at most `MAX_OPEN`.
    """

    state: LinkProgressState = "off"
    progress: float = 0.0
    repos_done: int = 0
    enabled_at: float | None = None
    open_deltas: int = 0
    open_recounts: int = 0


async def load_progress(connection: Connection) -> LinkProgress:
    """Return the progress. The cost does not depend on the number of links."""
    rows = await connection.fetch(_BUCKETS)
    if not rows:
        return LinkProgress()
    return LinkProgress(
        state=_state(rows),
        progress=sum(1.0 if row["done"] else share_before(row["backfilled_to"]) for row in rows) / BUCKETS,
        repos_done=sum(row["backfilled_repos"] for row in rows),
        enabled_at=min(row["enabled_at"] for row in rows),
        open_deltas=await connection.fetchval(_OPEN_DELTAS, MAX_OPEN),
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


def _state(rows: Sequence[asyncpg.Record]) -> LinkProgressState:
    if any(row["off"] for row in rows):
        return "outdated"
    return "complete" if len(rows) == BUCKETS and all(row["done"] for row in rows) else "backfill"
