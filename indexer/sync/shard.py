"""Buckets: how DIDs are spread over processes and, on a distributed database, over nodes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Self

BUCKETS = 256


@lru_cache(maxsize=8_192)
def bucket_of(did: str) -> int:
    """The DID's bucket, 0 to 255: the first byte of its SHA-256, so that SQL can compute it as well."""
    return sha256(did.encode()).digest()[0]


@dataclass(frozen=True, slots=True)
class Shard:
    """Share `index` of `count` equal shares of the buckets (`INDEXER_SHARD=index/count`)."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count <= BUCKETS:
            raise ValueError(f"shard {self.index}/{self.count}: the share must be below the count, at most {BUCKETS}")

    @property
    def buckets(self) -> range:
        return range(self.index * BUCKETS // self.count, (self.index + 1) * BUCKETS // self.count)

    def owns(self, did: str) -> bool:
        return bucket_of(did) in self.buckets

    @classmethod
    def parse(cls, text: str) -> Self:
        """`index/count`; raises ValueError for anything else."""
        index, _, count = text.partition("/")
        return cls(int(index), int(count))

    def part(self, index: int, count: int) -> "Shard":
        """Share `index` of `count` shares of this one's buckets."""
        return Shard(self.index * count + index, self.count * count)

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def resume(cursors: Mapping[Shard, int], shard: Shard) -> int | None:
    """Up to where all buckets of `shard` have been worked off, given how far every shard has come that ever was.

    So the number of shards may change at any time: what some of the buckets have had already comes to them again, and
    changes nothing. Buckets that no shard ever had don't count; None if none had any.
    """
    reached = [[seq for other, seq in cursors.items() if bucket in other.buckets] for bucket in shard.buckets]
    return min((max(seqs) for seqs in reached if seqs), default=None)
