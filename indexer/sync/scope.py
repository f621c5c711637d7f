"""The scope: which repos are tracked, and which collections are stored. It is stored, and changes at run time.

A daemon reads it every second, and plans each batch with one value. docs/invariants.md says why no record is lost, and
none is left, while daemons still plan with the previous one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from indexer.atproto.syntax import CollectionFilter, is_nsid


class Track(StrEnum):
    """Which repos are tracked. A change untracks the repos that only the scope before wanted.

    `ALL`: every repo that the stream or the relay's repo list shows. `LISTED`: only repos that a command, an SQL
    function or a request added. `SIGNAL`: also repos with a record of a signal collection. Such a repo stays tracked
    when it deletes the record.
    """

    ALL = "all"
    LISTED = "listed"
    SIGNAL = "signal"


@dataclass(frozen=True, slots=True)
class Scope:
    """One version of the scope.

    Attributes:
        version: Incremented by each change.
        collections: The collections to store, without those that are redacted.
        removed: The paths of the records that are redacted or hidden, by DID. They are not stored.
        added_in: For each pattern of `collections` the version that added it.
        signal_collections: The collections that cause a repo to be tracked; None if none is named.
        chosen_in: The version of the last change of anything but `removed`.
        repos_narrowed_in: The version that last wanted fewer repos; 0: none. Repos that no later one wants are
            untracked.
    """

    version: int = 0
    track: Track = Track.ALL
    collections: CollectionFilter = field(default_factory=CollectionFilter)
    added_in: tuple[int, ...] = ()
    signal_collections: CollectionFilter | None = None
    repos_narrowed_in: int = 0
    chosen_in: int = 0
    removed: Mapping[str, frozenset[bytes]] = field(default_factory=dict, compare=False)

    def selects(self, did: str, path: bytes) -> bool:
        """Return True if a record with this path is stored."""
        collection = path.partition(b"/")[0].decode(errors="replace")
        return path not in self.removed.get(did, ()) and self.collections.matches(collection)

    @property
    def removes(self) -> bool:
        """True if records or collections are redacted or hidden."""
        return bool(self.removed or self.collections.excluded)

    @property
    def complete_from(self) -> int:
        """The lowest `Repo.scope_version` of a repo that cannot lack records."""
        return max(self.added_in, default=0)

    @property
    def signals(self) -> CollectionFilter | None:
        """The collections whose records cause a repo to be tracked; None if records do not matter."""
        return self.signal_collections if self.track is Track.SIGNAL else None

    def added_after(self, version: int) -> list[str]:
        """Return the patterns that a repo lacks whose records are complete for this version."""
        complete = set(self.added_until(version))
        return [pattern for pattern in self.collections.patterns if pattern not in complete]

    def added_until(self, version: int) -> list[str]:
        """Return the patterns that a repo has whose records are complete for this version."""
        added_in = self.added_in or (0,) * len(self.collections.patterns)  # () for a scope that is not stored
        return [pattern for pattern, added in zip(self.collections.patterns, added_in, strict=True) if added <= version]

    @property
    def unlisted_signals(self) -> list[str]:
        """The signal patterns that have no list and that are not stored: only the stream finds their repos."""
        return [
            signal
            for signal in (self.signals.patterns if self.signals else ())
            if not is_nsid(signal) and not any(covers(pattern, signal) for pattern in self.collections.patterns)
        ]

    def may_want_fewer_repos(self, before: "Scope") -> bool:
        """Return True if some repos that the scope before wanted may be out of this one."""
        if self.track is Track.ALL or before.track is Track.LISTED:
            return False
        if self.track is not before.track:
            return True
        return not all(
            any(covers(after, signal) for after in self.signal_patterns) for signal in before.signal_patterns
        )

    def same_choice(self, other: "Scope") -> bool:
        """Return True if the two choose the same repos and the same collections."""
        return (
            self.track is other.track
            and set(self.collections.patterns) == set(other.collections.patterns)
            and set(self.signal_patterns) == set(other.signal_patterns)
        )

    @property
    def signal_patterns(self) -> tuple[str, ...]:
        """The patterns of the signal collections."""
        return self.signal_collections.patterns if self.signal_collections else ()

    def __str__(self) -> str:
        signals = f", signal collections {self.signal_collections}" if self.signal_collections else ""
        redacted = f", redacted {','.join(sorted(self.collections.excluded))}" if self.collections.excluded else ""
        removed = sum(map(len, self.removed.values()))
        records = f", without {removed:,} redacted or hidden records" if removed else ""
        return f"repos {self.track}, collections {self.collections}{redacted}{signals}{records}"


def covers(outer: str, inner: str) -> bool:
    """Return True if the pattern `outer` matches all collections that the pattern `inner` matches."""
    return outer in {"*", inner} or (outer.endswith(".*") and inner.startswith(outer[:-1]))


def filter_of(patterns: Iterable[str]) -> CollectionFilter | None:
    """Return the filter with these patterns; None if there is none.

    Raises:
        ValueError: A pattern is invalid; the message names it.
    """
    given = tuple(patterns)
    return CollectionFilter(given) if given else None
