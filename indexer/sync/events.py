"""The messages of `com.atproto.sync.subscribeRepos` as immutable values (docs/protocol.md#frames).

Fields have the names of the lexicon, in snake case. CIDs are their 36 binary bytes. `frames.decode_frame` has checked
the syntax of DIDs and TIDs, and the size limits. Signatures and operations are not verified yet.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from indexer.reasons import Rejection


class RepoOp(NamedTuple):
    """One entry of `#commit.ops`.

    Attributes:
        cid: The record's CID after the operation; None for a delete.
        prev: The record's CID before the operation; None if the message has none.
    """

    action: str
    path: str
    cid: bytes | None
    prev: bytes | None


class CommitEvent(NamedTuple):
    """A `#commit` message (docs/protocol.md#commits).

    Attributes:
        commit: The CID of the commit object.
        since: The rev before this commit, according to the sender; not signed; "" if it is not a TID.
        prev_data: The root of the tree before this commit, according to the sender; inversion verifies it.
        blocks: A CAR slice.
    """

    seq: int
    did: str
    commit: bytes
    rev: str
    since: str | None
    prev_data: bytes | None
    ops: tuple[RepoOp, ...]
    blocks: bytes
    time: str
    kind: Literal["commit"] = "commit"


class SyncEvent(NamedTuple):
    """A `#sync` message: `blocks` is a CAR slice with the latest commit object (docs/protocol.md#sync-events)."""

    seq: int
    did: str
    rev: str
    blocks: bytes
    time: str
    kind: Literal["sync"] = "sync"


class IdentityEvent(NamedTuple):
    """An `#identity` message: the identity may have changed (docs/protocol.md#identity).

    It has no field for the handle in the message, because that handle is not verified.
    """

    seq: int
    did: str
    time: str
    kind: Literal["identity"] = "identity"


class AccountEvent(NamedTuple):
    """An `#account` message (docs/protocol.md#accounts).

    Attributes:
        status: Explains `active`, as sent; any string is allowed.
    """

    seq: int
    did: str
    active: bool
    status: str | None
    time: str
    kind: Literal["account"] = "account"


@dataclass(frozen=True, slots=True)
class InfoEvent:
    """An `#info` message. It has no sequence number."""

    name: str
    message: str
    seq: None = None
    kind: Literal["info"] = "info"


@dataclass(frozen=True, slots=True)
class StreamError:
    """An error frame (`op: -1`), after which the sender closes the stream."""

    error: str
    message: str
    seq: None = None
    kind: Literal["error"] = "error"


@dataclass(frozen=True, slots=True)
class UnknownEvent:
    """A message of a type or operation that is not in this version of the protocol. It is ignored."""

    type: str
    seq: int | None
    did: None = None
    kind: Literal["unknown"] = "unknown"


class OtherShardEvent(NamedTuple):
    """A message about an account of another shard. Its other fields are not decoded or checked."""

    seq: int
    kind: Literal["commit", "sync", "identity", "account"]
    did: str
    time: str


@dataclass(frozen=True, slots=True)
class MalformedEvent:
    """A frame that cannot be decoded, with the fields that could be read."""

    reason: Rejection
    detail: str
    type: str
    seq: int | None
    did: str | None
    kind: Literal["malformed"] = "malformed"


RepoEvent = CommitEvent | SyncEvent | IdentityEvent | AccountEvent
Event = RepoEvent | InfoEvent | StreamError | UnknownEvent | MalformedEvent | OtherShardEvent
