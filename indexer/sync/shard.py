"""Buckets: how DIDs are spread over processes and, on a distributed database, over nodes."""

from dataclasses import dataclass
from hashlib import sha256

BUCKETS = 256


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

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"
