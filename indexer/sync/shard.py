"""Buckets and shards: the distribution of DIDs over processes and, in a distributed database, over nodes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Self

BUCKETS = 256


@lru_cache(maxsize=8_192)
def bucket_of(did: str) -> int:
    """Return the DID's bucket, 0 to 255: the first byte of its SHA-256, which SQL can compute as well."""
    return sha256(did.encode()).digest()[0]


@dataclass(frozen=True, slots=True)
class Shard:
    """Range number `index` of `count` equal ranges of buckets (`INDEXER_SHARD=index/count`)."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count <= BUCKETS:
            raise ValueError(
                f"shard {self.index}/{self.count}: the index must be below the count, and the count at most {BUCKETS}"
            )

    @property
    def buckets(self) -> range:
        """The buckets of this shard."""
        return range(self.index * BUCKETS // self.count, (self.index + 1) * BUCKETS // self.count)

    def owns(self, did: str) -> bool:
        """Return True if the DID's bucket belongs to this shard."""
        return bucket_of(did) in self.buckets

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the shard written as `index/count`.

        Raises:
            ValueError: The text has another form, or there is no such shard.
        """
        index, _, count = text.partition("/")
        return cls(int(index), int(count))

    def subshard(self, index: int, count: int) -> "Shard":
        """Return range number `index` of `count` equal ranges of this shard's buckets."""
        return Shard(self.index * count + index, self.count * count)

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def resume_seq(cursors: Mapping[Shard, int], shard: Shard) -> int | None:
    """Return the sequence number from which `shard` continues: all its buckets have been processed up to there.

    The number of shards may change at any time: some buckets then receive messages again, which changes nothing.
    Buckets that were never processed do not count.

    Args:
        cursors: The stored cursor of every present and former shard.
        shard: The shard that starts.

    Returns:
        None if no bucket of the shard was ever processed.
    """
    reached = [[seq for other, seq in cursors.items() if bucket in other.buckets] for bucket in shard.buckets]
    return min((max(seqs) for seqs in reached if seqs), default=None)
