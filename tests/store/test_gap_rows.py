"""Open gaps when the number of shards changes."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from random import Random

import asyncpg
import pytest

from indexer.reasons import GapReason
from indexer.store import Store
from indexer.sync.gap import Gap, OpenGap
from indexer.sync.shard import Placement, Shard

COUNTS = (1, 3, 2, 7, 16, 5, 1)


def covered(gaps: Sequence[OpenGap]) -> set[tuple[int, int | None]]:
    """Return the positions of open gaps, with the first number of the gap."""
    return {(position, gap.gap.first_seq) for gap in gaps for position in Shard.parse(gap.gap.shard).positions}


@pytest.mark.parametrize("placement", Placement)
async def test_gaps_stay_open_and_belong_to_present_shards_when_the_number_of_shards_changes(
    store: Store, sql: asyncpg.Connection, placement: Placement
) -> None:
    """The processes of the new shards start one after the other, or at once."""
    random = Random(5)
    gaps = [Gap("wss://relay.test", f"{number % 3}/3", GapReason.NO_CURSOR, number, 9) for number in range(5)]
    opened = [await store.open_gap(gap) for gap in gaps]
    await sql.execute("update indexer.gap set closed_at = now(), closed_by = 'relay' where id = $1", opened[2].id)
    before = covered(await store.open_gaps())
    for _, count in pairwise(COUNTS):
        shards = [Shard(index, count, placement) for index in range(count)]
        random.shuffle(shards)
        if count % 2:
            await asyncio.gather(*map(store.take_over_gaps, shards))
        else:
            for shard in shards:
                await store.take_over_gaps(shard)
        after = await store.open_gaps()
        assert before <= covered(after)
        assert all(before & covered([gap]) for gap in after), "a shard without a gap got one"
        assert {gap.gap.shard for gap in after} <= {str(shard) for shard in shards}
        assert {gap.opened_at for gap in after} <= {gap.opened_at for gap in opened}
        before = covered(after)
    closed = await sql.fetch("select shard from atproto.gaps where closed_at is not null")
    assert [row["shard"] for row in closed] == ["2/3"]


async def test_gaps_of_other_shards_stay_as_they_are(store: Store) -> None:
    for shard in ("0/2", "3/4"):
        await store.open_gap(Gap("wss://relay.test", shard, GapReason.NO_CURSOR))
    before = await store.open_gaps()
    await store.take_over_gaps(Shard(2, 4))
    await store.take_over_gaps(Shard(0, 2))
    assert await store.open_gaps() == before
