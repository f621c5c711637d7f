"""The messages of `com.atproto.sync.subscribeRepos` as immutable values, and how frames are decoded to them.

Each frame is two DAG-CBOR objects, a header and a payload. The rules are in docs/protocol.md#frames. Fields have the
names of the lexicon, in snake case. CIDs are binary. `decode_frame` checks the syntax of DIDs and TIDs, and the size
limits. Signatures and operations are not verified yet.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, NamedTuple, get_args

from indexer.atproto.cbor import CborError, abridged, count_items, decode_pair, encode
from indexer.atproto.cid import is_cid, is_link
from indexer.atproto.limits import Limits
from indexer.atproto.syntax import is_did, is_tid
from indexer.errors import UpstreamError
from indexer.reasons import Rejection


class RepoOp(NamedTuple):
    """One entry of `#commit.ops`. Its CIDs may be of any CIDv1 form, of 4 to 100 bytes; all others have 36 bytes."""

    action: str
    path: str
    cid: bytes | None  # the record's CID after the operation; None for a delete
    prev: bytes | None  # the record's CID before the operation; None if the message has none


class CommitEvent(NamedTuple):
    """A `#commit` message (docs/protocol.md#commits)."""

    seq: int
    did: str
    commit: bytes  # the CID of the commit object
    rev: str
    since: str | None  # the rev before this commit, according to the sender; not signed; "" if it is not a TID
    prev_data: bytes | None  # the root of the tree before this commit, according to the sender; inversion verifies it
    ops: tuple[RepoOp, ...]
    blocks: bytes  # a CAR slice
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
    """An `#account` message (docs/protocol.md#accounts)."""

    seq: int
    did: str
    active: bool
    status: str | None  # explains `active`, as sent; any string is allowed
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
    kind: "_RepoEventKind"
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


MAX_SEQ = 2**63 - 1
MAX_STATUS_CHARACTERS = 128
MAX_AHEAD = 300.0
"""Seconds that the time of an event may be ahead of the clock of this machine."""
_MAX_PATH_CHARACTERS = 1_024
_MAX_DID_CHARACTERS = 2_048
_MAX_TYPE_CHARACTERS = 64
_MAX_TIME_CHARACTERS = 64
_NAMESPACE = "com.atproto.sync.subscribeRepos"
_RepoEventKind = Literal["commit", "sync", "identity", "account"]
_REPO_EVENT_KINDS: dict[str, _RepoEventKind] = {f"#{kind}": kind for kind in get_args(_RepoEventKind)}


def decode_frame(frame: bytes, limits: Limits, owns: Callable[[str], bool] | None = None) -> Event:
    """Return the event of a frame; a `MalformedEvent` if the frame breaks a rule. Never raises.

    `owns` returns True for a DID of this shard; None means all DIDs. An event about another DID becomes an
    `OtherShardEvent`, which is at least twice as fast as decoding it completely.
    """
    if len(frame) > limits.frame_bytes:
        return _malformed({}, {}, UpstreamError(Rejection.FRAME_TOO_LARGE, f"{len(frame)} bytes"))
    # Decoding 5 MB of nested lists would take two seconds. An item has at least one byte.
    most = limits.frame_items
    if len(frame) > most and count_items(frame, most, most, objects=most + 1)[0] > most:
        return _malformed({}, {}, UpstreamError(Rejection.FRAME_TOO_LARGE, f"over {most} items"))
    try:
        header, payload = _split_frame(frame)
    except UpstreamError as error:
        return _malformed({}, {}, error)
    if owns is not None and (other := _other_shard_event(header, payload, owns)) is not None:
        return other
    try:
        return _decode_payload(header, payload, limits)
    except UpstreamError as error:
        return _malformed(header, payload, error)


def encode_commit(event: CommitEvent) -> bytes:
    """Return a frame that `decode_frame` decodes to this event. Its `blocks` must not have the bytes of a CID."""
    payload = event._asdict() | {"repo": event.did, "prevData": event.prev_data}
    payload["ops"] = [op._asdict() for op in event.ops]
    return encode({"op": 1, "t": "#commit"}) + encode(payload)


def frame_for_display(frame: bytes) -> dict[str, Any]:
    """Return a frame's header and payload for display, as JSON values with long strings shortened.

    Raises:
        UpstreamError: The frame is not a header and a payload.
    """
    header, payload = _split_frame(frame)
    return {"header": abridged(header), "payload": abridged(payload)}


def hosting_status(report: Mapping[str, Any]) -> str | None:
    """Return the `status` of an account in a message or an answer: a short text that Postgres can store.

    The set of values is open. A status that is not a text is not known: the account must not stay as it was because of
    it.
    """
    status = report.get("status")
    text = "" if status is None else status if isinstance(status, str) else f"invalid: {status!r:.100}"
    return text[:MAX_STATUS_CHARACTERS].replace("\0", "\ufffd") or None


def _split_frame(frame: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        header, payload = decode_pair(frame)
    except CborError as error:
        raise UpstreamError(Rejection.FRAME_MALFORMED, f"{error}: {len(frame)} bytes, {frame[:32].hex()}") from None
    if not isinstance(header, dict) or not isinstance(payload, dict):
        raise UpstreamError(Rejection.FRAME_MALFORMED, "header or payload is not a map")
    return header, payload


def _other_shard_event(
    header: dict[str, Any], payload: dict[str, Any], owns: Callable[[str], bool]
) -> OtherShardEvent | None:
    op, kind, seq = header.get("op"), _repo_event_kind(header), _seq_or_none(payload)
    if op != 1 or op is True or kind is None or seq is None:  # in Python, True == 1
        return None
    did = payload.get(_did_field(kind))
    if not isinstance(did, str) or len(did) > _MAX_DID_CHARACTERS or owns(did):
        return None
    return OtherShardEvent(seq, kind, did, _time(payload))


def _repo_event_kind(header: dict[str, Any]) -> _RepoEventKind | None:
    name = header.get("t")
    return _REPO_EVENT_KINDS.get(name.removeprefix(_NAMESPACE)) if isinstance(name, str) else None


def _did_field(kind: _RepoEventKind | None) -> str:
    return "repo" if kind == "commit" else "did"


def _decode_payload(header: dict[str, Any], payload: dict[str, Any], limits: Limits) -> Event:
    op, name = header.get("op"), header.get("t")
    if type(op) is not int:  # in Python, True == 1
        raise UpstreamError(Rejection.FRAME_MALFORMED, "op is not an integer")
    if op == -1:
        return StreamError(_text(payload, "error"), text_or_empty(payload, "message"))
    if op != 1:
        return UnknownEvent("op", _seq_or_none(payload))
    if not isinstance(name, str):
        raise UpstreamError(Rejection.FRAME_MALFORMED, "t is not a string")
    decode = _DECODERS.get(name.removeprefix(_NAMESPACE))
    return decode(payload, limits) if decode else UnknownEvent(name[:_MAX_TYPE_CHARACTERS], _seq_or_none(payload))


def _commit(payload: dict[str, Any], limits: Limits) -> CommitEvent:
    blocks = _bytes(payload, "blocks", limits.commit_blocks_bytes)
    ops = payload.get("ops")
    if not isinstance(ops, list):
        raise UpstreamError(Rejection.FIELD_INVALID, "ops is not a list")
    if len(ops) > limits.commit_ops:
        raise UpstreamError(Rejection.TOO_MANY_OPS, f"{len(ops)} ops")
    since = payload.get("since")
    return CommitEvent(
        seq=_seq(payload),
        did=_text(payload, "repo", is_did, "a DID"),
        commit=_cid(payload, "commit", is_cid),
        rev=_text(payload, "rev", is_tid, "a TID"),
        since=since if since is None or (isinstance(since, str) and is_tid(since)) else "",
        prev_data=None if payload.get("prevData") is None else _cid(payload, "prevData", is_cid),
        ops=tuple([_op(op) for op in ops]),
        blocks=blocks,
        time=_time(payload),
    )


def _op(op: Any) -> RepoOp:
    """Return an operation. The CID of a record may be any CID version 1 (docs/protocol.md#commits)."""
    if not isinstance(op, dict):
        raise UpstreamError(Rejection.FIELD_INVALID, "op is not a map")
    path, cid, prev = _text(op, "path"), op.get("cid"), op.get("prev")
    if len(path) > _MAX_PATH_CHARACTERS:
        raise UpstreamError(Rejection.FIELD_INVALID, f"path has {len(path)} characters")
    return RepoOp(
        _text(op, "action"),
        path,
        None if cid is None else _cid(op, "cid", is_link),
        None if prev is None else _cid(op, "prev", is_link),
    )


def _sync(payload: dict[str, Any], limits: Limits) -> SyncEvent:
    did, rev = _text(payload, "did", is_did, "a DID"), _text(payload, "rev", is_tid, "a TID")
    blocks = _bytes(payload, "blocks", limits.sync_blocks_bytes)
    return SyncEvent(_seq(payload), did, rev, blocks, _time(payload))


def _identity(payload: dict[str, Any], _limits: Limits) -> IdentityEvent:
    return IdentityEvent(_seq(payload), _text(payload, "did", is_did, "a DID"), _time(payload))


def _account(payload: dict[str, Any], _limits: Limits) -> AccountEvent:
    active, did = payload.get("active"), _text(payload, "did", is_did, "a DID")
    if not isinstance(active, bool):
        raise UpstreamError(Rejection.FIELD_INVALID, "active is not a boolean")
    return AccountEvent(_seq(payload), did, active, hosting_status(payload), _time(payload))


def _info(payload: dict[str, Any], _limits: Limits) -> InfoEvent:
    return InfoEvent(_text(payload, "name"), text_or_empty(payload, "message"))


_DECODERS: dict[str, Callable[[dict[str, Any], Limits], Event]] = {
    "#commit": _commit,
    "#sync": _sync,
    "#identity": _identity,
    "#account": _account,
    "#info": _info,
}


def _seq(payload: dict[str, Any]) -> int:
    seq = _seq_or_none(payload)
    if seq is None:
        raise UpstreamError(Rejection.FIELD_INVALID, "seq is not a positive integer")
    return seq


def _seq_or_none(payload: dict[str, Any]) -> int | None:
    seq = payload.get("seq")
    return seq if type(seq) is int and 0 < seq <= MAX_SEQ else None


def _cid(payload: dict[str, Any], name: str, is_valid: Callable[[bytes], bool]) -> bytes:
    cid = payload.get(name)
    if not isinstance(cid, bytes) or not is_valid(cid):
        raise UpstreamError(Rejection.FIELD_INVALID, f"{name} is not a CID link")
    return cid


def _bytes(payload: dict[str, Any], name: str, max_bytes: int) -> bytes:
    data = payload.get(name)
    if not isinstance(data, bytes):
        raise UpstreamError(Rejection.FIELD_INVALID, f"{name} is not a byte string")
    if len(data) > max_bytes:
        raise UpstreamError(Rejection.BLOCKS_TOO_LARGE, f"{len(data)} bytes")
    return data


def _text(
    payload: dict[str, Any], name: str, is_valid: Callable[[str], bool] | None = None, expected: str = "a string"
) -> str:
    text = payload.get(name)
    if not isinstance(text, str) or (is_valid and not is_valid(text)):
        raise UpstreamError(Rejection.FIELD_INVALID, f"{name} is not {expected}")
    return text


def text_or_empty(fields: Mapping[str, Any], name: str) -> str:
    """Return a field; "" if it is not a text."""
    text = fields.get(name)
    return text if isinstance(text, str) else ""


def _time(payload: dict[str, Any]) -> str:
    """Return the time, which identifies the message at a cursor and is stored with it; "" if it is too long."""
    time = text_or_empty(payload, "time")
    return time if len(time) <= _MAX_TIME_CHARACTERS else ""


def _malformed(header: dict[str, Any], payload: dict[str, Any], error: UpstreamError) -> MalformedEvent:
    """Return the event with the fields that can be read: its dead letter names them, and the cursor passes its seq."""
    name = header.get("t")
    did = payload.get(_did_field(_repo_event_kind(header)))
    return MalformedEvent(
        reason=error.reason,
        detail=error.detail,
        type=name[:_MAX_TYPE_CHARACTERS] if isinstance(name, str) else "",
        seq=_seq_or_none(payload),
        did=did if isinstance(did, str) and is_did(did) else None,
    )


def event_seconds(event_time: str | None) -> float | None:
    """Return the time as Unix seconds; None if it is not a datetime with a time zone."""
    try:
        moment = datetime.fromisoformat(event_time or "")
        return None if moment.tzinfo is None else moment.timestamp()
    except (ValueError, OverflowError):
        return None
