"""Which shards a gap affects, also after their number has changed."""

from itertools import product

from indexer.reasons import GapReason
from indexer.sync.shard import Shard
from indexer.sync.stream import Gap, OpenGap


def test_gap_affects_the_shards_that_share_a_position_with_it_until_that_is_reconciled() -> None:
    for count, former in product((1, 2, 3), [Shard(0, 2), Shard(1, 2)]):
        gap = Gap("wss://relay.test", str(former), GapReason.NO_CURSOR)
        for shard in [Shard(index, count) for index in range(count)]:
            shared = {*shard.positions} & {*former.positions}
            for reconciled in (frozenset[int](), frozenset([*shared][1:]), frozenset(shared), frozenset(range(256))):
                assert OpenGap(1, gap, 0.0, reconciled).affects(shard) == bool(shared - reconciled)
