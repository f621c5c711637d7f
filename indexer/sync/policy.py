"""The inputs of planning besides the event and the repo: the operator's policy, the context, and the signing key."""

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from indexer.atproto.crypto import PublicKey
from indexer.atproto.limits import Limits
from indexer.atproto.syntax import MAX_CLOCK_ID, MAX_TID_MICROS, tid_of
from indexer.sync.events import CommitEvent
from indexer.sync.scope import Scope
from indexer.sync.stream import NO_STREAM, Origin
from indexer.sync.verify import VerifiedCommit, verify_commit

MAX_IDENTITY_AGE = 120.0
"""Seconds. The report of a PDS that an account is not active counts only if the identity that names this PDS was
fetched so recently."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings and the scope that planning depends on."""

    scope: Scope  # which repos are tracked and which collections are stored. It changes while the process runs
    limits: Limits
    store_values: bool = True
    lenient: bool = False  # apply an undecidable commit whose operations are consistent with the new tree
    deletion_grace: float = 604_800.0  # seconds between an account's deletion and the erasure of its records
    upstream_is_pds: bool = False  # the upstreams are PDSes. Otherwise they are relays


@dataclass(frozen=True, slots=True)
class PlanContext:
    """The inputs of planning that do not depend on the event and the repo, except for the origin of the event.

    `verify` returns what `verify_commit` returns, or raises what it raises.
    """

    policy: Policy
    now: float  # Unix seconds
    origin: Origin = NO_STREAM  # the stream of the event. Those of a batch may come from several
    refused: frozenset[str] = frozenset()  # unknown DIDs that add no repo: their registered domain added too many
    limited: frozenset[str] = (
        frozenset()
    )  # accounts of hosts that added too many: a first commit does not replace a fetch
    other_streams: bool = False  # another stream may bring the commits that are missing before one
    overdue: AbstractSet[str] = frozenset()  # accounts whose missing commits no stream has brought in time
    verify: Callable[[CommitEvent, PublicKey, Limits], VerifiedCommit] = verify_commit

    @property
    def is_beside_relays(self) -> bool:
        """True if the stream is that of a host that is subscribed beside the relays."""
        return self.origin.host is not None and not self.policy.upstream_is_pds


class KeyState(NamedTuple):
    """The signing key of a repo, as far as it is known."""

    key: PublicKey | None  # None if the identity has none or, with `available` false, if it could not be fetched
    available: bool = True  # False if no lookup succeeded
    final: bool = False  # True if no newer lookup is possible for this event
    stale: bool = False  # the identity has changed: a signature that this key does not verify proves nothing
    host: str | None = None  # the network location of the account's PDS
    doubtful: bool = False  # the directory denies the DID, perhaps wrongly: nothing can be checked until it is certain
    fetched_at: float = 0.0  # Unix seconds at which the identity was fetched

    def is_recent(self, now: float) -> bool:
        """Return True if the identity was fetched so recently that a report of the PDS in it counts."""
        return self.available and not self.stale and 0 <= now - self.fetched_at <= MAX_IDENTITY_AGE


KeyStateOf = Callable[[str], KeyState | None]
"""Returns what is known about the key of a DID; None if it has not been looked up."""

UNAVAILABLE = KeyState(None, available=False, final=True)


def is_future(rev: str, now: float, limits: Limits) -> bool:
    """Return True if `rev` is further ahead of `now` (Unix seconds) than clocks may drift.

    Accepting such a rev would make every later commit look like a replay.
    """
    return rev > _last_rev(now + limits.clock_drift_seconds)  # TIDs sort by their times


@lru_cache(maxsize=16)  # called for each commit, with the time of its batch
def _last_rev(seconds: float) -> str:
    """Return the last TID with a time of at most so many Unix seconds."""
    return tid_of(min(int(seconds * 1_000_000), MAX_TID_MICROS), MAX_CLOCK_ID)
