"""Buckets, placements and shards: the distribution of DIDs over processes and, with Citus, over nodes."""

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from hashlib import sha256
from typing import Self

BUCKETS = 256
HASH_ORDER: tuple[int, ...] = (
    60, 146, 139, 8, 132, 138, 20, 230, 218, 82, 118, 248, 220, 205, 210, 63,
    1, 15, 25, 155, 145, 31, 255, 119, 137, 88, 148, 216, 79, 87, 201, 94,
    26, 33, 176, 231, 24, 35, 157, 245, 10, 115, 129, 223, 92, 151, 104, 105,
    198, 48, 183, 109, 234, 5, 163, 53, 208, 112, 211, 196, 50, 77, 200, 166,
    178, 244, 120, 247, 61, 93, 214, 14, 54, 212, 4, 130, 209, 141, 7, 182,
    215, 228, 250, 17, 51, 236, 172, 133, 162, 16, 187, 189, 111, 96, 143, 170,
    229, 217, 85, 98, 171, 164, 84, 36, 202, 191, 246, 89, 110, 226, 174, 19,
    106, 55, 64, 0, 37, 213, 147, 74, 40, 175, 123, 65, 127, 45, 103, 181,
    158, 101, 156, 117, 188, 121, 91, 3, 142, 161, 232, 113, 108, 57, 100, 52,
    160, 62, 99, 252, 165, 241, 136, 168, 102, 97, 46, 253, 140, 197, 180, 28,
    186, 243, 154, 86, 150, 221, 38, 122, 6, 239, 237, 254, 73, 192, 225, 144,
    66, 71, 70, 184, 21, 125, 34, 83, 194, 124, 153, 49, 39, 43, 56, 235,
    242, 167, 249, 126, 251, 13, 47, 159, 227, 32, 2, 27, 199, 95, 114, 134,
    58, 152, 149, 41, 42, 219, 224, 179, 185, 173, 131, 76, 30, 23, 9, 177,
    116, 80, 81, 207, 90, 135, 204, 59, 238, 72, 128, 190, 22, 233, 69, 203,
    29, 12, 193, 78, 195, 11, 68, 67, 206, 169, 44, 240, 107, 222, 75, 18,
)  # fmt: skip
"""The buckets in the order of their hashes in Citus, `worker_hash(bucket::smallint)`."""
_HASH_POSITIONS = tuple(HASH_ORDER.index(bucket) for bucket in range(BUCKETS))


class Placement(StrEnum):
    """The order in which shards divide the buckets: each shard is a range of positions in this order.

    On a plain database the position of a bucket is its number. On a database that is distributed with Citus, each
    shard of a table has a range of hashes. There the buckets are in the order of their hashes, so that a process uses
    few shards of the tables, and shares none of them if the number of processes divides that of the shards.
    """

    PLAIN = "plain"
    DISTRIBUTED = "distributed"

    def buckets(self, positions: range) -> tuple[int, ...]:
        """Return the buckets at these positions, in ascending order."""
        if self is Placement.PLAIN:
            return tuple(positions)
        return tuple(sorted(HASH_ORDER[positions.start : positions.stop]))

    def position(self, bucket: int) -> int:
        """Return the position of a bucket, 0 to 255."""
        return bucket if self is Placement.PLAIN else _HASH_POSITIONS[bucket]


@lru_cache(maxsize=8_192)
def bucket_of(did: str) -> int:
    """Return the DID's bucket, 0 to 255: the first byte of its SHA-256, which SQL can compute as well."""
    return sha256(did.encode()).digest()[0]


def bucket_of_target(target: str) -> int:
    """Return the bucket of the target of a link, in the same way. It is not cached: there are too many targets."""
    return sha256(target.encode()).digest()[0]


@dataclass(frozen=True, slots=True)
class Shard:
    """Range number `index` of `count` equal ranges of positions (`INDEXER_SHARD=index/count`).

    Attributes:
        placement: Says which buckets are at these positions. It belongs to the database, and stored rows do not name
            it: use `placed` before you ask for buckets.
    """

    index: int = 0
    count: int = 1
    placement: Placement = Placement.PLAIN

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count <= BUCKETS:
            raise ValueError(
                f"shard {self.index}/{self.count}: the index must be below the count, and the count at most {BUCKETS}"
            )

    @property
    def positions(self) -> range:
        """The positions of this shard."""
        return range(self.index * BUCKETS // self.count, (self.index + 1) * BUCKETS // self.count)

    @property
    def buckets(self) -> tuple[int, ...]:
        """The buckets of this shard, in ascending order."""
        return self.placement.buckets(self.positions)

    def owns(self, did: str) -> bool:
        """Return True if the DID's bucket belongs to this shard."""
        return self.placement.position(bucket_of(did)) in self.positions

    def overlaps(self, other: "Shard") -> bool:
        """Return True if the two shards have a position in common."""
        return self.positions.start < other.positions.stop and other.positions.start < self.positions.stop

    def placed(self, placement: Placement) -> "Shard":
        """Return the same range of positions on a database with this placement."""
        return replace(self, placement=placement)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the shard written as `index/count`.

        Raises:
            ValueError: The text has another form, or there is no such shard.
        """
        index, _, count = text.partition("/")
        return cls(int(index), int(count))

    def subshard(self, index: int, count: int) -> "Shard":
        """Return range number `index` of `count` equal ranges of this shard's positions."""
        return Shard(self.index * count + index, self.count * count, self.placement)

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"
