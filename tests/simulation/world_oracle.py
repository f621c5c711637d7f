"""The truth about a world, derived from its schedule alone.

This module shares no code with the product, with the servers of the world or with other tests.
"""

from base64 import b32encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256

import cbor2

from tests.simulation.fault_schedule import (
    ChangedScope,
    Commit,
    DamagedCommit,
    Episode,
    Fault,
    FaultyExport,
    Join,
    LostCommit,
    LostWindow,
    Migrate,
    RestartedSequence,
    RotateKey,
    Schedule,
    SetStatus,
    UnreachableDirectory,
    Value,
)

Records = Mapping[str, Value]
"""The values of records by path."""

BROKEN_CHAIN = frozenset({"chain-break", "drain-break"})
"""A commit is missing before one that arrives, also while the export is fetched."""
MISSED = BROKEN_CHAIN | {"behind", "reactivated", "sync-event"}
"""Nobody knows what is missing: a relay's list shows it, or the next message."""
GAPS: Mapping[type[Fault], frozenset[str]] = {
    LostWindow: frozenset({"cursor-outdated", "no-cursor"}),
    RestartedSequence: frozenset({"sequence-restarted", "cursor-unproven", "no-cursor"}),
}
"""The reasons of the gaps that faults open. The daemon has no cursor of a relay that it has not used before."""
_BASE32 = "234567abcdefghijklmnopqrstuvwxyz"


@dataclass
class TrueRepo:
    """The truth about one account.

    Attributes:
        status: The hosting status at the end; None: active.
        revs: The records after each commit, by rev, in order.
        reasons: Reasons for which the repo may be desynchronized at some time.
        certain: Reasons of which at least one must have been given.
    """

    status: str | None = None
    revs: dict[str, Records] = field(default_factory=dict)
    reasons: set[str] = field(default_factory=lambda: {"new"})
    certain: frozenset[str] = frozenset()

    @property
    def rev(self) -> str:
        """The latest rev."""
        return next(reversed(self.revs))

    @property
    def records(self) -> Records:
        """The records at the end."""
        return self.revs[self.rev]


@dataclass(frozen=True)
class Scope:
    """The selected collections: names, or patterns that end with `.*`."""

    collections: tuple[str, ...]

    def selects(self, path: str) -> bool:
        """Return True if the record at this path is selected."""
        collection = path.partition("/")[0]
        return any(
            collection.startswith(pattern[:-1]) if pattern.endswith("*") else collection == pattern
            for pattern in self.collections
        )


@dataclass(frozen=True)
class Truth:
    """The truth about a world.

    Attributes:
        repos: The accounts by DID.
        scopes: The scopes in their order.
        gaps: The reasons that gaps may have.
        undisturbed: Accounts whose exports nobody has a reason to fetch after the beginning.
    """

    repos: Mapping[str, TrueRepo]
    scopes: tuple[Scope, ...]
    gaps: frozenset[str]
    undisturbed: frozenset[str]

    def always_selects(self, path: str) -> bool:
        """Return True if the record at this path was selected all the time."""
        return all(scope.selects(path) for scope in self.scopes)

    def cids(self, records: Records, *, constant: bool = False) -> dict[str, str]:
        """Return the CIDs of selected records by path: at the end, or those that were selected all the time."""
        scopes = self.scopes if constant else self.scopes[-1:]
        return {path: cid_of(value) for path, value in records.items() if all(scope.selects(path) for scope in scopes)}


def truth_of(schedule: Schedule) -> Truth:
    """Return the truth about the world of a schedule."""
    repos = dict[str, TrueRepo]()
    for action in schedule.actions:
        match action:
            case Join():
                repos[action.did] = TrueRepo(revs={tid_of(action.time): {}})
            case Commit():
                repos[action.did].revs[tid_of(action.time)] = _records_after(repos[action.did].records, action)
            case RotateKey() | Migrate():
                repos[action.did].revs[tid_of(action.time)] = repos[action.did].records
            case SetStatus():
                repos[action.did].status = action.status
    for episode in schedule.episodes:
        _add_reasons(repos, episode)
    _add_key_changes(repos, schedule)
    undisturbed = frozenset(action.did for action in schedule.first if repos[action.did].reasons == {"new"})
    for repo in repos.values():
        if "identity" in repo.reasons:  # without a key, a break of the chain is not seen
            repo.certain = repo.certain and repo.certain | {"identity"}
        repo.reasons.add("lease-expired")  # a killed or slow worker has not finished
    changes = [fault.collections for fault in schedule.faults if isinstance(fault, ChangedScope)]
    scopes = tuple(Scope(collections) for collections in (schedule.collections, *changes))
    gaps = frozenset[str]().union(*(GAPS.get(type(fault), frozenset()) for fault in schedule.faults))
    return Truth(repos, scopes, gaps, undisturbed)


def _records_after(records: Records, commit: Commit) -> Records:
    after = dict(records)
    for write in commit.writes:
        assert (write.path in after) == (write.action != "create"), f"the schedule has an impossible {write}"
        if write.value is None:
            del after[write.path]
        else:
            after[write.path] = write.value
    return after


def _add_reasons(repos: Mapping[str, TrueRepo], episode: Episode) -> None:
    """Add the reasons that the faults of an episode may give, and those that they must give."""
    uncertain = any(isinstance(fault, LostWindow | RestartedSequence | ChangedScope) for fault in episode.faults)
    for fault in episode.faults:
        match fault:
            case LostCommit() | DamagedCommit() | FaultyExport():
                repo = repos[fault.did]
                if repo.reasons == {"new"} and not uncertain:
                    repo.certain = BROKEN_CHAIN
                repo.reasons |= BROKEN_CHAIN
            case UnreachableDirectory():
                joined = {action.did for action in episode.actions if isinstance(action, Join)}
                for did in joined | {fault.did}:
                    repos[did].reasons |= {"identity", *BROKEN_CHAIN}
            case LostWindow() | RestartedSequence():
                # Other relays may have lost messages, too: a later change-over opens another gap.
                for repo in repos.values():
                    repo.reasons |= MISSED
            case ChangedScope():
                for repo in repos.values():
                    repo.reasons |= {"scope-widened", *BROKEN_CHAIN}
    for action in episode.actions:
        if isinstance(action, SetStatus):
            repos[action.did].reasons |= {"reactivated", *BROKEN_CHAIN}


def _add_key_changes(repos: Mapping[str, TrueRepo], schedule: Schedule) -> None:
    """Add reasons for accounts whose key changes: messages with the former key may be read after the change."""
    for action in schedule.actions:
        if isinstance(action, RotateKey | Migrate):
            repo = repos[action.did]
            repo.reasons |= {"sync-event", *BROKEN_CHAIN}
            repo.certain = repo.certain and repo.certain | {"sync-event"}
    later = schedule.actions[len(schedule.first) :]
    announced = {action.did for action in later if isinstance(action, Join | RotateKey | Migrate | SetStatus)}
    if any(isinstance(fault, UnreachableDirectory) for fault in schedule.faults):
        for did in announced:  # the identity may be refreshed as late as in the outage
            repos[did].reasons |= {"identity", *BROKEN_CHAIN}


def tid_of(micros: int) -> str:
    """Return the TID of a time in microseconds since 1970, with the clock ID 0."""
    number = micros << 10
    return "".join(_BASE32[number >> shift & 31] for shift in range(60, -5, -5))


def cid_of(value: Value) -> str:
    """Return the CID of a record: version 1, DAG-CBOR, SHA-256, in base32."""
    # Without floats and links, canonical CBOR (RFC 7049: shorter keys first) is DAG-CBOR.
    digest = sha256(cbor2.dumps(dict(value), canonical=True)).digest()
    return "b" + b32encode(b"\x01\x71\x12\x20" + digest).decode().lower().rstrip("=")
