"""Open gaps when the number of shards changes: each stays one gap, which the new shards close together."""

import asyncio
from random import Random
from time import time

import asyncpg
import pytest

from indexer.db import Database
from indexer.db.crawls import CrawlProgress
from indexer.db.gaps import OpenGaps
from indexer.reasons import Desync, GapReason
from indexer.sync.changes import Batch
from indexer.sync.hints import JETSTREAM
from indexer.sync.repo import SyncStatus
from indexer.sync.shard import BUCKETS, Shard
from indexer.sync.stream import Cursor, Gap, OpenGap
from indexer.telemetry.metrics import Metrics
from tests.background import changed_before
from tests.db.repo_rows import did, insert, synchronized

RELAY = "wss://relay.test"
CLOSED = "select closed_at is not null from indexer.gap order by id"


def shards_of(count: int) -> list[Shard]:
    return [Shard(index, count) for index in range(count)]


async def open_gap(db: Database, shard: Shard) -> OpenGap:
    return await db.gaps.open(Gap(RELAY, str(shard), GapReason.NO_CURSOR, 1, 9))


async def reconcile(db: Database, shard: Shard, last_gap: int) -> None:
    """Store the end of a reconciliation that began when `last_gap` was the newest gap."""
    progress = CrawlProgress("sweep", RELAY, began_at=time(), shard=str(shard), last_gap=last_gap)
    await db.crawls.add_listed([], progress.after_page(None, 0, 0, time()), close_gaps=True)


async def test_gaps_in_memory_are_those_of_the_last_change_if_two_tasks_load_them(db: Database) -> None:
    gaps = OpenGaps(db.gaps, Shard(), Metrics())
    async with changed_before(db.gaps, "open", lambda _: gaps.refresh()):
        gap = await gaps.open(Gap(RELAY, str(Shard()), GapReason.NO_CURSOR))
    assert gaps.gaps == [gap]
    async with changed_before(db.gaps, "load_open", lambda _: gaps.close_covered(gap, "wss://one.test")):
        await gaps.refresh()
    assert gaps.gaps == []


async def test_covered_gap_is_closed_alone_by_all_shards_that_it_concerns(
    db: Database, sql: asyncpg.Connection
) -> None:
    before, covered, after = [await open_gap(db, Shard(0, 1)) for _ in range(3)]
    await db.gaps.close_covered(covered.id, Shard(0, 2).positions, "wss://one.test")
    assert await affected(db, Shard(1, 2)) == [before.id, covered.id, after.id]
    assert await affected(db, Shard(0, 2)) == [before.id, after.id]
    await db.gaps.close_covered(covered.id, Shard(1, 2).positions, "wss://two.test")
    assert await affected(db, Shard(0, 1)) == [before.id, after.id]
    rows = await sql.fetch("select closed_by from atproto.gaps order by opened_at")
    assert [row["closed_by"] for row in rows] == [None, "wss://two.test", None]


async def affected(db: Database, shard: Shard) -> list[int]:
    return [gap.id for gap in await db.gaps.load_open() if gap.affects(shard)]


async def test_gap_is_closed_when_each_of_its_repos_was_compared_by_some_shard(db: Database) -> None:
    gap = await open_gap(db, Shard(0, 1))
    await reconcile(db, Shard(0, 2), gap.id)
    assert await affected(db, Shard(0, 2)) == []
    assert await affected(db, Shard(1, 2)) == await affected(db, Shard(1, 3)) == [gap.id]
    await reconcile(db, Shard(0, 3), gap.id)
    await reconcile(db, Shard(2, 3), gap.id)
    assert [(left.id, left.gap) for left in await db.gaps.load_open()] == [(gap.id, gap.gap)]
    await reconcile(db, Shard(1, 3), gap.id)
    assert await db.gaps.load_open() == []


async def test_gap_that_was_opened_during_a_reconciliation_stays_open(db: Database) -> None:
    before, other, after = [await open_gap(db, shard) for shard in (Shard(0, 2), Shard(1, 2), Shard(0, 2))]
    await reconcile(db, Shard(0, 2), other.id)
    assert await affected(db, Shard(0, 1)) == [other.id, after.id]
    assert await affected(db, Shard(0, 2)) == [after.id], f"{before} is closed"


@pytest.mark.slow
async def test_gaps_do_not_multiply_while_the_number_of_shards_changes_again_and_again(
    db: Database, sql: asyncpg.Connection
) -> None:
    """A gap is closed by the reconciliation with which all of its positions have been compared, also concurrently."""
    random = Random(3)
    former = [random.choice(shards_of(random.randint(1, 7))) for _ in range(8)]
    opened = [await open_gap(db, shard) for shard in former]
    uncovered = [set(shard.positions) for shard in former]
    while any(uncovered):
        shards = random.sample(shards := shards_of(random.randint(1, 9)), random.randint(1, len(shards)))
        await asyncio.gather(*(reconcile(db, shard, opened[-1].id) for shard in shards))
        for left in uncovered:
            left.difference_update(*(shard.positions for shard in shards))
        assert [row[0] for row in await sql.fetch(CLOSED)] == [not left for left in uncovered]


async def test_positions_of_a_gap_are_those_of_its_shard(db: Database, sql: asyncpg.Connection) -> None:
    for count in (*range(1, 20), 255, BUCKETS):
        for shard in (Shard(0, count), Shard(count // 2, count), Shard(count - 1, count)):
            gap = await open_gap(db, shard)
            positions = await sql.fetchval("select positions from indexer.gap where id = $1", gap.id)
            assert range(positions.lower, positions.upper) == shard.positions


async def test_repo_is_complete_until_all_shards_are_caught_up(db: Database, sql: asyncpg.Connection) -> None:
    """Cursors of hosts are about some repos only, and withheld repos are not on the stream of the relay.

    When the last resync ended says nothing: it does not have what was written after its fetch.
    """
    await insert(
        db, synchronized("old", synchronized_at=1_000.0), synchronized("new", synchronized_at=3_000.0),
        synchronized("due", sync_status=SyncStatus.DESYNCHRONIZED, sync_reason=Desync.BEHIND),
        synchronized("withheld", synchronized_at=1_000.0, withheld_since=500.0, hosting_status="throttled"),
    )  # fmt: skip

    async def complete(*cursors: tuple[str, str, float]) -> list[float | None]:
        stored = [Cursor(relay, shard, 1, caught_up_at=at) for relay, shard, at in cursors]
        await db.write(Batch(cursors=tuple(stored)))
        query = """
            select date_part('epoch', complete_at) from atproto.repos where withheld_since is null
            order by position(did in $1)
        """
        return [at for (at,) in await sql.fetch(query, did("old") + did("new") + did("due"))]

    assert await complete() == [None, None, None]
    assert await complete((RELAY, "0/2", 2_500.0), ("https://host.test", "1/2", 2_900.0)) == [None, None, None]
    assert await complete((RELAY, "1/2", 2_000.0)) == [2_000.0, 2_000.0, None], "the least of the shards"
    assert await complete((RELAY, "0/1", 1_500.0), (JETSTREAM, "0/1", 2_200.0)) == [2_200.0, 2_200.0, None]
    assert await sql.fetchval("select complete_at from atproto.repos where withheld_since is not null") is None
    gap = await open_gap(db, Shard(1, 2))
    assert await complete() == [None, None, None]
    await reconcile(db, Shard(1, 2), gap.id)
    assert await complete() == [2_200.0, 2_200.0, None]


async def test_query_without_completeness_does_not_read_the_cursors(sql: asyncpg.Connection) -> None:
    assert "cursor" in str(await sql.fetch("explain select complete_at from atproto.repos where did = 'did:plc:a'"))
    assert "cursor" not in str(await sql.fetch("explain select rev from atproto.repos where did = 'did:plc:a'"))
