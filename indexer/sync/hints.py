"""Decode the events of a Jetstream as hints, and plan their effects on the rows of repos.

Nothing in an event is proven, so no record is taken from it. It only says which repo may have changed, and where.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import orjson

from indexer.atproto.syntax import is_did, is_nsid, is_record_key, is_tid
from indexer.reasons import Desync
from indexer.sync.events import hosting_status, text_or_empty
from indexer.sync.plan import plan_identity, plan_listed
from indexer.sync.policy import PlanContext, is_future
from indexer.sync.repo import TOMBSTONED, Outcome, Repo, SyncStatus, Trigger, amend, hides, track_again, unparked
from indexer.sync.scope import Scope, Track

JETSTREAM = "jetstream"
"""The `relay` of the cursor. It is the same for all Jetstreams."""
MAX_MESSAGE_BYTES = 2 << 20
"""Maximum size of a message that is parsed, in bytes. Nested lists take 20 times as much memory."""
MAX_PATTERNS = 100
"""Maximum number of collections that a Jetstream accepts in a filter."""
_MAX_TIME = 2**63 - 1
_DID = re.compile(rb'"did"\s*:\s*"(did:[^"\\]{1,2048})"')
_DID_WITHIN = 4_096

HintKind = Literal["commit", "account", "identity"]


class Hint(NamedTuple):
    """An event of a Jetstream. `did` is a valid DID; each other field may be missing or false."""

    kind: HintKind
    did: str
    time: int = 0  # the cursor after it: microseconds since the Unix epoch by the clock of the Jetstream; 0: unknown
    rev: str = ""  # the rev of a commit; "" if it is not a TID
    collection: str = ""  # the collection of the changed record; "" if it is not an NSID
    path: str = ""  # the path of the changed record; "" if it is not one
    writes: bool = False  # a commit creates or updates the record
    active: bool = True  # the account is active, as in an #account message
    status: str | None = None  # why it is not active


class HintPlan(NamedTuple):
    """The effect of a hint."""

    repo: Repo  # the row afterwards; the same object if the row does not change
    outcome: Outcome = Outcome.IGNORED
    ask: bool = False  # ask the host of the account for its status and rev
    refresh_identity: bool = False  # look up the identity again


def decode_hint(message: bytes) -> Hint | None:
    """Return the hint in a message; None if it has none. Never raises.

    A message that cannot be parsed, for example because it is too large or too deeply nested, becomes a hint without a
    rev if it has a DID.
    """
    try:
        event = orjson.loads(message) if len(message) <= MAX_MESSAGE_BYTES else None
    except orjson.JSONDecodeError:
        event = None
    if event is None:
        found = _DID.search(message, 0, _DID_WITHIN)
        did = found[1].decode(errors="replace") if found else ""
        return Hint("commit", did) if is_did(did) else None
    if not isinstance(event, dict) or not isinstance(did := event.get("did"), str) or not is_did(did):
        return None
    time = event.get("time_us")
    hint = Hint("commit", did, time if type(time) is int and 0 < time <= _MAX_TIME else 0)
    match event.get("kind"):
        case "commit":
            return _with_commit(hint, _fields(event, "commit"))
        case "account":
            account = _fields(event, "account")
            active, status = account.get("active") is not False, hosting_status(account)
            return hint._replace(kind="account", active=active, status=status)
        case "identity":
            return hint._replace(kind="identity")
    return None


def _with_commit(hint: Hint, commit: Mapping[str, Any]) -> Hint:
    rev, collection, rkey = (text_or_empty(commit, name) for name in ("rev", "collection", "rkey"))
    collection = collection if is_nsid(collection) else ""
    return hint._replace(
        rev=rev if is_tid(rev) else "",
        collection=collection,
        path=f"{collection}/{rkey}" if collection and is_record_key(rkey) else "",
        writes=commit.get("operation") in ("create", "update"),
    )


def _fields(event: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = event.get(name)
    return value if isinstance(value, dict) else {}


def wanted_patterns(scope: Scope) -> tuple[str, ...]:
    """Return the collections of the wanted events: the chosen and the signal collections. None of them requests all."""
    patterns = tuple(dict.fromkeys([*scope.collections.patterns, *(scope.signals.patterns if scope.signals else ())]))
    return () if len(patterns) > MAX_PATTERNS or "*" in patterns else patterns


def plan_hint(repo: Repo, hint: Hint, context: PlanContext) -> HintPlan:
    """Return the effect of a hint on the row of its repo: `Repo(did)` if there is none.

    A newer rev makes the repo due. If the rev is missing or in the future, the host is asked instead.
    """
    if not (repo.known and repo.tracked):
        scope = context.policy.scope
        if not _may_add(hint, scope) or (repo.known and not repo.out_of_scope):
            return HintPlan(repo)
        after = track_again(repo, scope.version, from_stream=True) if repo.known else amend(repo)
        return HintPlan(after, Outcome.DESYNCHRONIZED)
    if hint.kind == "account":
        hidden = not hint.active and hides(hint.status)
        differs = hidden is repo.active or (hidden and hint.status != repo.hosting_status)
        return HintPlan(repo, Outcome.APPLIED if differs else Outcome.REPLAYED, ask=differs)
    if hint.kind == "identity":
        return HintPlan(plan_identity(repo, context).repo, Outcome.APPLIED, refresh_identity=True)
    return _plan_commit(repo, hint, context)


def _may_add(hint: Hint, scope: Scope) -> bool:
    """Return True if the scope allows the hint to add its unknown repo."""
    if hint.kind == "account" and not hint.active:
        return False
    if scope.signals is None:
        return scope.track is Track.ALL
    return hint.writes and scope.signals.matches(hint.collection)


def _plan_commit(repo: Repo, hint: Hint, context: PlanContext) -> HintPlan:
    if hint.collection and not context.policy.scope.collections.matches(hint.collection):
        return HintPlan(repo)
    if not repo.active:
        gone = repo.hosting_status == TOMBSTONED
        return HintPlan(repo, ask=not gone, refresh_identity=gone)
    if not hint.rev or is_future(hint.rev, context.now, context.policy.limits):
        return HintPlan(repo, Outcome.REJECTED, ask=True)
    if repo.head is not None and hint.rev <= repo.head.rev:
        return HintPlan(repo, Outcome.REPLAYED)
    after = plan_listed(repo, hint.rev, context.now, Trigger.HINTED, Desync.HINTED)
    if repo.sync_status is SyncStatus.DESYNCHRONIZED and after is repo:  # its resync fetches the present state
        noted = repo._replace(latest_unverified_rev=max(hint.rev, repo.latest_unverified_rev or ""))
        after = unparked(noted, context.now)
        if after is noted:
            after = repo if noted == repo else amend(noted)
    outcome = Outcome.DESYNCHRONIZED if repo.sync_status is SyncStatus.SYNCHRONIZED else Outcome.APPLIED
    return HintPlan(after, outcome)
