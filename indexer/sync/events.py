"""What a relay says, as frozen values: the messages of `com.atproto.sync.subscribeRepos`.

Fields carry the lexicon's names, in Python's case. CIDs are their 36 binary bytes. Syntax of DIDs, TIDs
and paths, and the size limits, have been checked by `frames.decode_frame`; nothing has been verified yet.
"""

from dataclasses import dataclass
from typing import Literal

from indexer.reasons import Rejection


@dataclass(frozen=True, slots=True)
class RepoOp:
    """One entry of `#commit.ops`: `cid` is None for a delete; `prev` None where the message has none."""

    action: str
    path: str
    cid: bytes | None
    prev: bytes | None


@dataclass(frozen=True, slots=True)
class CommitEvent:
    """`#commit`: `since` and `prev_data` are hints of the sender; `blocks` is a CAR slice."""

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


@dataclass(frozen=True, slots=True)
class SyncEvent:
    """`#sync`: the repo's present commit, alone in `blocks`."""

    seq: int
    did: str
    rev: str
    blocks: bytes
    time: str
    kind: Literal["sync"] = "sync"


@dataclass(frozen=True, slots=True)
class IdentityEvent:
    """`#identity`: a prod to look the identity up again. The handle in it is never trusted, so not kept."""

    seq: int
    did: str
    time: str
    kind: Literal["identity"] = "identity"


@dataclass(frozen=True, slots=True)
class AccountEvent:
    """`#account`: `active` decides, `status` explains; an open set, as sent."""

    seq: int
    did: str
    active: bool
    status: str | None
    time: str
    kind: Literal["account"] = "account"


@dataclass(frozen=True, slots=True)
class InfoEvent:
    """`#info`, without a sequence number: the stream goes on."""

    name: str
    message: str
    seq: None = None
    kind: Literal["info"] = "info"


@dataclass(frozen=True, slots=True)
class StreamError:
    """An error frame (`op: -1`): the sender closes the stream behind it."""

    error: str
    message: str
    seq: None = None
    kind: Literal["error"] = "error"


@dataclass(frozen=True, slots=True)
class UnknownEvent:
    """A message of a type or operation that this version of the protocol doesn't know: to be ignored."""

    type: str
    seq: int | None
    kind: Literal["unknown"] = "unknown"


@dataclass(frozen=True, slots=True)
class ForeignEvent:
    """A message of an account of another shard, looked at no further: whoever has the account judges it."""

    seq: int
    kind: Literal["commit", "sync", "identity", "account"]
    did: str


@dataclass(frozen=True, slots=True)
class MalformedEvent:
    """A frame that broke a rule before it could become an event, with what could be read of it."""

    reason: Rejection
    detail: str
    type: str
    seq: int | None
    did: str | None
    kind: Literal["malformed"] = "malformed"


RepoEvent = CommitEvent | SyncEvent | IdentityEvent | AccountEvent
Event = RepoEvent | InfoEvent | StreamError | UnknownEvent | MalformedEvent | ForeignEvent
