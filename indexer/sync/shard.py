"""Buckets and shards: the distribution of DIDs over processes and, in a distributed database, over nodes."""

from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Self

BUCKETS = 256


@lru_cache(maxsize=8_192)
def bucket_of(did: str) -> int:
    """Return the DID's bucket, 0 to 255: the first byte of its SHA-256, which SQL can compute as well."""
    return sha256(did.encode()).digest()[0]


def bucket_of_target(target: str) -> int:
    """Return the bucket of the target of a link, in the same way. It is not cached: there are too many targets."""
    return sha256(target.encode()).digest()[0]


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
