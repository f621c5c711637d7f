"""The truth about a world, derived from its schedule alone.

This module shares no code with the product, with the servers of the world or with other tests.
"""

from base64 import b32encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise

import cbor2

from tests.simulation.fault_schedule import (
    Action,
    BrokenHost,
    ChangedScope,
    Commit,
    DamagedCommit,
    Episode,
    Fault,
    FaultyExport,
    Forgery,
    HostProblem,
    Join,
    LostCommit,
    LostWindow,
    Migrate,
    RelayMode,
    RepeatedMessages,
    RestartedSequence,
    RotateKey,
    Schedule,
    SetStatus,
    StoppedRelay,
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
    # A connection may begin with a repeated message: a number below that of the cursor is one of another sequence.
    RepeatedMessages: frozenset({"sequence-restarted", "no-cursor"}),
    StoppedRelay: frozenset({"no-cursor"}),
}
"""The reasons of the gaps that faults may open. The daemon has no cursor of a relay that it has not used before."""
REFUSALS = {
    "takendown": "repo-takendown",
    "suspended": "repo-suspended",
    "deactivated": "repo-deactivated",
    "deleted": "repo-not-found",
}
"""The failures with which hosts refuse exports of inactive accounts, by hosting status."""
_BASE32 = "234567abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class FinalState:
    """The state in which a repo has to end.

    Attributes:
        status: The sync status; `desynchronized` also stands for `in-progress`.
        reason: The reason; None if the repo is synchronized.
        errors: Reasons for which the last fetch may have failed; None: no fetch failed since the state was reached.
        parked: True if nothing but a message may cause another fetch.
    """

    status: str
    reason: str | None
    errors: frozenset[str | None] = frozenset({None})
    parked: bool = False


SYNCHRONIZED = FinalState("synchronized", None)
UNFETCHABLE: Mapping[HostProblem, FinalState] = {
    "dead": FinalState("desynchronized", "chain-break", frozenset({"unreachable", "host-paused"})),
    "failing": FinalState("desynchronized", "chain-break", frozenset({"http-status", "host-paused"})),
    "hanging": FinalState("desynchronized", "chain-break", frozenset({"timeout", "host-paused"})),
    "slow": FinalState("desynchronized", "chain-break", frozenset({"timeout", "host-paused"})),
    "forging": FinalState("desynchronized", "chain-break", frozenset({"export-rejected"})),
    "cut exports": FinalState("desynchronized", "chain-break", frozenset({"export-incomplete"})),
    "denying": FinalState("desynchronized", "chain-break", frozenset({"repo-not-found"}), parked=True),
    "old exports": FinalState("desynchronized", "stale-export"),
}
"""The states of repos of which a commit is lost, by the problem of their host."""


@dataclass
class TrueRepo:
    """The truth about one account.

    Attributes:
        host: The number of its host at the end.
        status: The hosting status at the end; None: active.
        revs: The records after each commit, by rev, in order.
        final: The state at the end, if the account is active.
        stored: The rev that is stored at the end; None: the latest.
        reasons: Reasons for which the repo may be desynchronized at some time.
        waited_for: True if the repo was synchronized before the first episode.
        certain: Reasons of which at least one must have been given.
    """

    host: int = 0
    status: str | None = None
    revs: dict[str, Records] = field(default_factory=dict)
    final: FinalState = SYNCHRONIZED
    stored: str | None = None
    reasons: set[str] = field(default_factory=lambda: {"new"})
    waited_for: bool = False
    certain: frozenset[str] = frozenset()

    @property
    def refusal(self) -> str | None:
        """The failure that may park the inactive account if it was never fetched; None: its status is known.

        The message about its status may be lost, and no reconciliation asks for the status of such a repo.
        """
        if self.status is None or self.waited_for or "behind" not in self.reasons:
            return None
        return REFUSALS[self.status]

    @property
    def rev(self) -> str:
        """The latest rev."""
        return next(reversed(self.revs))

    @property
    def stored_rev(self) -> str | None:
        """The rev that is stored at the end; None if the account is deleted, as its records are erased."""
        return None if self.status == "deleted" else self.stored or self.rev

    @property
    def records(self) -> Records:
        """The records after the latest commit."""
        return self.revs[self.rev]

    @property
    def stored_records(self) -> Records:
        """The records that are stored at the end, without regard to the scope."""
        return self.revs[self.stored_rev] if self.stored_rev else {}


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
    _act(repos, schedule.before_ending.actions)
    _end(repos, schedule.ending)
    for action in schedule.first:
        repos[action.did].waited_for = True
    changes = [fault.collections for fault in schedule.faults if isinstance(fault, ChangedScope)]
    scopes = tuple(Scope(collections) for collections in (schedule.collections, *changes))
    _add_reasons(repos, schedule, scopes)
    undisturbed = frozenset(action.did for action in schedule.first if repos[action.did].reasons == {"new"})
    for repo in repos.values():
        if "identity" in repo.reasons:  # without a key, a break of the chain is not seen
            repo.certain = repo.certain and repo.certain | {"identity"}
        repo.reasons.add("lease-expired")  # a killed or slow worker has not finished
        if repo.status == "deleted":
            repo.reasons.add("erased")
    gaps = frozenset[str]().union(*(_gaps_of(fault, schedule.mode) for fault in schedule.faults))
    return Truth(repos, scopes, gaps, undisturbed)


def _gaps_of(fault: Fault, mode: RelayMode) -> frozenset[str]:
    """Return the reasons of the gaps that a fault opens. A daemon that follows all relays may lose one of them."""
    is_covered = isinstance(fault, StoppedRelay) and mode == "all"
    return frozenset() if is_covered else GAPS.get(type(fault), frozenset())


def _act(repos: dict[str, TrueRepo], actions: Iterable[Action]) -> None:
    for action in actions:
        match action:
            case Join():
                repos[action.did] = TrueRepo(action.host, revs={tid_of(action.time): {}})
            case Commit():
                repos[action.did].revs[tid_of(action.time)] = _records_after(repos[action.did].records, action)
            case RotateKey():
                repos[action.did].revs[tid_of(action.time)] = repos[action.did].records
            case Migrate():
                repos[action.did].revs[tid_of(action.time)] = repos[action.did].records
                repos[action.did].host = action.host
            case SetStatus():
                repos[action.did].status = action.status


def _end(repos: dict[str, TrueRepo], ending: Episode) -> None:
    """Let accounts act whose commits are lost, while their host serves no correct exports."""
    problems = {fault.host: fault.kind for fault in ending.faults if isinstance(fault, BrokenHost)}
    for did in [fault.did for fault in ending.faults if isinstance(fault, LostCommit)]:
        repo = repos[did]
        repo.stored, repo.final = repo.rev, UNFETCHABLE[problems[repo.host]]
    _act(repos, ending.actions)


def _records_after(records: Records, commit: Commit) -> Records:
    after = dict(records)
    for write in commit.writes:
        assert (write.path in after) == (write.action != "create"), f"the schedule has an impossible {write}"
        if write.value is None:
            del after[write.path]
        else:
            after[write.path] = write.value
    return after


def _add_reasons(repos: Mapping[str, TrueRepo], schedule: Schedule, scopes: Sequence[Scope]) -> None:
    """Add the reasons that the schedule may give, and those that it must give."""
    changes = iter(pairwise(scopes))
    gaps = False
    for episode in schedule.episodes:
        gaps = gaps or any(_gaps_of(fault, schedule.mode) for fault in episode.faults)
        if any(isinstance(fault, ChangedScope) for fault in episode.faults):
            _add_reasons_of_scope(repos, *next(changes))
        _add_reasons_of_faults(repos, episode)
        # Their messages are lost, or a gap of this or another relay is open, and its list is ahead of the stream.
        for did in {action.did for action in episode.actions + episode.after} if gaps else ():
            repo = repos[did]
            repo.reasons |= MISSED
            if schedule.mode == "all":  # a list may be read while a commit waits for one that another relay may bring
                repo.certain = repo.certain and repo.certain | {"behind"}
    _add_reasons_of_faults(repos, schedule.ending)
    for repo in repos.values():
        if repo.final.reason is not None:
            repo.reasons.add(repo.final.reason)
    _add_key_changes(repos, schedule)


def _add_reasons_of_scope(repos: Mapping[str, TrueRepo], before: Scope, after: Scope) -> None:
    """Add the reason of repos that may have records of collections that the change has added.

    Others are fetched for this reason only if they change while the lists of repos are compared.
    """
    listed = all("*" not in pattern for pattern in after.collections)
    for repo in repos.values():
        paths = {path for records in repo.revs.values() for path in records}
        if not listed or any(after.selects(path) and not before.selects(path) for path in paths):
            repo.reasons.add("scope-widened")
            # Messages of an earlier episode may be read after this one: then the fetch contains the lost commit.
            repo.certain = repo.certain and repo.certain | {"scope-widened"}


def _add_reasons_of_faults(repos: Mapping[str, TrueRepo], episode: Episode) -> None:
    uncertain = any(isinstance(fault, ChangedScope) or type(fault) in GAPS for fault in episode.faults)
    for fault in episode.faults:
        match fault:
            case LostCommit() | DamagedCommit() | FaultyExport():
                repo = repos[fault.did]
                # The first fetch of a repo that joined later may happen after a commit is lost, and so contain it.
                if repo.waited_for and repo.reasons == {"new"} and not uncertain:
                    repo.certain = BROKEN_CHAIN
                repo.reasons |= BROKEN_CHAIN
            case UnreachableDirectory():
                joined = {action.did for action in episode.actions if isinstance(action, Join)}
                for did in joined | {fault.did}:
                    repos[did].reasons |= {"identity", *BROKEN_CHAIN}
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
        # The identity may be refreshed as late as in the outage. A forged message may be read again then, from another
        # relay: it is checked with the key that the directory has at that time.
        forged = {fault.did for fault in schedule.faults if isinstance(fault, Forgery)}
        for did in announced | forged:
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
