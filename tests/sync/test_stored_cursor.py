"""The cursor of all buckets that replaces the cursors of several shards."""

from collections.abc import Sequence

import pytest

from indexer.sync.shard import BUCKETS, Shard
from indexer.sync.stream import StoredCursor, merged

Given = Sequence[tuple[str, int, int]]
"""Shard, epoch and seq of each cursor."""


def cursors(given: Given) -> list[StoredCursor]:
    return [StoredCursor("wss://relay.test", Shard.parse(shard), epoch, seq, None, 0.0) for shard, epoch, seq in given]


@pytest.mark.parametrize(
    ("given", "position", "complete"),
    [
        ([("0/1", 0, 5)], (0, 5), True),
        ([("0/2", 0, 9), ("1/2", 0, 5)], (0, 5), True),
        ([("0/1", 0, 3), ("0/2", 0, 9), ("1/2", 0, 5)], (0, 5), True),  # the number of shards has increased
        ([("0/2", 0, 3), ("1/2", 0, 4), ("0/1", 0, 9)], (0, 9), True),  # it has decreased
        ([("0/2", 0, 3), ("1/4", 0, 9)], (0, 3), True),  # some buckets were never processed
        ([("0/2", 1, 3), ("1/2", 0, 90)], (1, 3), False),
        ([("0/1", 0, 90), ("0/2", 1, 3), ("1/2", 1, 7)], (1, 3), True),
    ],
)
def test_every_bucket_was_processed_up_to_the_cursor(given: Given, position: tuple[int, int], complete: bool) -> None:
    cursor, known = merged(cursors(given))
    assert ((cursor.epoch, cursor.seq), known) == (position, complete)
    for bucket in range(BUCKETS):
        latest = max(((c.epoch, c.seq) for c in cursors(given) if bucket in c.shard.positions), default=position)
        assert latest >= position or (not known and latest[0] < position[0])
