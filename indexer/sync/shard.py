"""Buckets, layouts and shards: how DIDs are divided among processes, and rows within a database."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from hashlib import sha256
from typing import Self, TypeVar

BUCKETS = 256

T = TypeVar("T")


@dataclass(frozen=True)
class Layout:
    """The order of the buckets in a database, and their division into parts: the rows of a part are stored together.

    A plain database has one part. Each shard of the daemon is a range of positions in the order, and so is each part.
    So a process uses few parts, and shares none of them if the number of processes divides that of the parts.
    """

    order: tuple[int, ...] = tuple(range(BUCKETS))  # of all buckets
    parts: int = 1
    commit_numbers: bool = True  # COMMIT assigns the numbers of the change log; otherwise a stage does so afterwards

    @cached_property
    def _positions(self) -> tuple[int, ...]:
        return tuple(self.order.index(bucket) for bucket in range(BUCKETS))

    def buckets(self, positions: range) -> tuple[int, ...]:
        """Return the buckets at these positions, in ascending order."""
        return tuple(sorted(self.order[positions.start : positions.stop]))

    def position(self, bucket: int) -> int:
        """Return the position of a bucket, 0 to 255."""
        return self._positions[bucket]

    def part_of(self, bucket: int) -> int:
        """Return the number of the part, from 0, that has the bucket."""
        return self._positions[bucket] * self.parts // BUCKETS

    def divide(self, items: Sequence[T], did: Callable[[T], str], min_mean: int) -> list[list[T]]:
        """Return the items of each part that has some; all together if the mean number per part is below `min_mean`."""
        if self.parts == 1 or len(items) < min_mean * self.parts:
            return [list(items)] if items else []
        parts: list[list[T]] = [[] for _ in range(self.parts)]
        for item in items:
            parts[self.part_of(bucket_of(did(item)))].append(item)
        return [part for part in parts if part]


PLAIN = Layout()


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
        layout: Says which buckets are at these positions. It belongs to the database, and stored rows do not name
            it: use `placed` before you ask for buckets.
    """

    index: int = 0
    count: int = 1
    layout: Layout = field(default=PLAIN, repr=False)

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
        return self.layout.buckets(self.positions)

    def owns(self, did: str) -> bool:
        """Return True if the DID's bucket belongs to this shard."""
        return self.layout.position(bucket_of(did)) in self.positions

    def overlaps(self, other: "Shard") -> bool:
        """Return True if the two shards have a position in common."""
        return self.positions.start < other.positions.stop and other.positions.start < self.positions.stop

    def placed(self, layout: Layout) -> "Shard":
        """Return the same range of positions on a database with this layout."""
        return replace(self, layout=layout)

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
        return Shard(self.index * count + index, self.count * count, self.layout)

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"
