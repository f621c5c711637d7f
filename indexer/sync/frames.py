"""Frames of `subscribeRepos` to events: wire protocol v0, two DAG-CBOR objects a message (spec §1.2, §2.1)."""

from collections.abc import Callable
from typing import Any, Literal

from indexer.atproto.cbor import CborError, abridged, decode_pair, explain_frame
from indexer.atproto.cid import is_cid, is_link
from indexer.atproto.limits import Limits
from indexer.atproto.syntax import is_did, is_tid
from indexer.errors import UpstreamError
from indexer.reasons import Rejection
from indexer.sync.events import (
    AccountEvent,
    CommitEvent,
    Event,
    ForeignEvent,
    IdentityEvent,
    InfoEvent,
    MalformedEvent,
    RepoOp,
    StreamError,
    SyncEvent,
    UnknownEvent,
)

MAX_SEQ = 2**63 - 1
_PATH_CHARACTERS = 1_024
_NAMESPACE = "com.atproto.sync.subscribeRepos"


def decode_frame(frame: bytes, limits: Limits, owns: Callable[[str], bool] | None = None) -> Event:
    """One websocket message as an event; a `MalformedEvent` if it breaks a rule. Never raises.

    Of a DID that we don't own, a `ForeignEvent`, which takes half the time or less.
    """
    if len(frame) > limits.frame_bytes:
        return _malformed({}, {}, UpstreamError(Rejection.FRAME_TOO_LARGE, f"{len(frame)} bytes"))
    try:
        header, payload = _parts(frame)
    except UpstreamError as error:
        return _malformed({}, {}, error)
    if owns is not None and (foreign := _foreign(header, payload, owns)) is not None:
        return foreign
    try:
        return _decode_payload(header, payload, limits)
    except UpstreamError as error:
        return _malformed(header, payload, error)


def show_frame(frame: bytes) -> dict[str, Any]:
    """A message's header and payload for people, as JSON, see `abridged`. Raises `UpstreamError` if it hasn't both."""
    header, payload = _parts(frame)
    return {"header": abridged(header), "payload": abridged(payload)}


def _parts(frame: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        header, payload = decode_pair(frame)
    except CborError as error:
        raise UpstreamError(Rejection.FRAME_MALFORMED, f"{error}: {explain_frame(frame)}") from None
    if not isinstance(header, dict) or not isinstance(payload, dict):
        raise UpstreamError(Rejection.FRAME_MALFORMED, "header or payload is not a map")
    return header, payload


def _foreign(header: dict[str, Any], payload: dict[str, Any], owns: Callable[[str], bool]) -> ForeignEvent | None:
    kind, did, seq = header.get("t"), payload.get("repo", payload.get("did")), _seq_or_none(payload)
    if not (isinstance(kind, str) and isinstance(did, str)) or seq is None or len(did) > _DID_CHARACTERS or owns(did):
        return None
    known = _OF_ACCOUNTS.get(kind)
    return None if known is None else ForeignEvent(seq, known, did)


def _decode_payload(header: dict[str, Any], payload: dict[str, Any], limits: Limits) -> Event:
    match header.get("op"):
        case True | False:  # True == 1 in Python, and not in CBOR
            raise UpstreamError(Rejection.FRAME_MALFORMED, "op is not an integer")
        case 1:
            kind = header.get("t")
            if not isinstance(kind, str):
                raise UpstreamError(Rejection.FRAME_MALFORMED, "t is not a string")
            decode = _DECODERS.get(kind.removeprefix(_NAMESPACE))
            return decode(payload, limits) if decode else UnknownEvent(kind[:64], _seq_or_none(payload))
        case -1:
            return StreamError(_text(payload, "error"), _text_or(payload, "message", ""))
        case int():
            return UnknownEvent("op", _seq_or_none(payload))
        case _:
            raise UpstreamError(Rejection.FRAME_MALFORMED, "op is not an integer")


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
        did=_did(payload, "repo"),
        commit=_cid(payload, "commit"),
        rev=_tid(payload, "rev"),
        since=None if since is None else _tid(payload, "since"),
        prev_data=_cid_or_none(payload, "prevData"),
        ops=tuple([_op(op) for op in ops]),
        blocks=blocks,
        time=_text_or(payload, "time", ""),
    )


def _op(op: Any) -> RepoOp:
    if not isinstance(op, dict):
        raise UpstreamError(Rejection.FIELD_INVALID, "an op is not a map")
    path = _text(op, "path")
    if len(path) > _PATH_CHARACTERS:
        raise UpstreamError(Rejection.FIELD_INVALID, f"a path of {len(path)} characters")
    return RepoOp(_text(op, "action"), path, _link_or_none(op, "cid"), _link_or_none(op, "prev"))


def _sync(payload: dict[str, Any], limits: Limits) -> SyncEvent:
    return SyncEvent(
        seq=_seq(payload),
        did=_did(payload, "did"),
        rev=_tid(payload, "rev"),
        blocks=_bytes(payload, "blocks", limits.sync_blocks_bytes),
        time=_text_or(payload, "time", ""),
    )


def _identity(payload: dict[str, Any], _limits: Limits) -> IdentityEvent:
    return IdentityEvent(_seq(payload), _did(payload, "did"), _text_or(payload, "time", ""))


def _account(payload: dict[str, Any], _limits: Limits) -> AccountEvent:
    active = payload.get("active")
    if not isinstance(active, bool):
        raise UpstreamError(Rejection.FIELD_INVALID, "active is not a boolean")
    status = payload.get("status")
    if status is not None and not (isinstance(status, str) and len(status) <= _STATUS_CHARACTERS):
        raise UpstreamError(Rejection.FIELD_INVALID, "status is not a short string")
    return AccountEvent(_seq(payload), _did(payload, "did"), active, status, _text_or(payload, "time", ""))


def _info(payload: dict[str, Any], _limits: Limits) -> InfoEvent:
    return InfoEvent(_text(payload, "name"), _text_or(payload, "message", ""))


_STATUS_CHARACTERS = 128
_DID_CHARACTERS = 2_048
_OF_ACCOUNTS: dict[str, Literal["commit", "sync", "identity", "account"]] = {
    "#commit": "commit",
    "#sync": "sync",
    "#identity": "identity",
    "#account": "account",
}
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


def _did(payload: dict[str, Any], name: str) -> str:
    did = payload.get(name)
    if not isinstance(did, str) or not is_did(did):
        raise UpstreamError(Rejection.FIELD_INVALID, f"{name} is not a DID")
    return did


def _tid(payload: dict[str, Any], name: str) -> str:
    tid = payload.get(name)
    if not isinstance(tid, str) or not is_tid(tid):
        raise UpstreamError(Rejection.FIELD_INVALID, f"{name} is not a TID")
    return tid


def _cid(payload: dict[str, Any], name: str) -> bytes:
    cid = payload.get(name)
    if not isinstance(cid, bytes) or not is_cid(cid):
        raise UpstreamError(Rejection.FIELD_INVALID, f"{name} is not a CID link")
    return cid


def _cid_or_none(payload: dict[str, Any], name: str) -> bytes | None:
    return None if payload.get(name) is None else _cid(payload, name)


def _link_or_none(payload: dict[str, Any], name: str) -> bytes | None:
    """A record's CID may be of any version 1 kind: its bytes are kept as they came (spec §3.3)."""
    cid = payload.get(name)
    if cid is None:
        return None
    if not isinstance(cid, bytes) or not (is_cid(cid) or is_link(cid)):
        raise UpstreamError(Rejection.FIELD_INVALID, f"{name} is not a CID link")
    return cid


def _bytes(payload: dict[str, Any], name: str, most: int) -> bytes:
    data = payload.get(name)
    if not isinstance(data, bytes):
        raise UpstreamError(Rejection.FIELD_INVALID, f"{name} is not a byte string")
    if len(data) > most:
        raise UpstreamError(Rejection.BLOCKS_TOO_LARGE, f"{len(data)} bytes")
    return data


def _text(payload: dict[str, Any], name: str) -> str:
    text = payload.get(name)
    if not isinstance(text, str):
        raise UpstreamError(Rejection.FIELD_INVALID, f"{name} is not a string")
    return text


def _text_or(payload: dict[str, Any], name: str, default: str) -> str:
    text = payload.get(name)
    return text if isinstance(text, str) else default


def _malformed(header: dict[str, Any], payload: dict[str, Any], error: UpstreamError) -> MalformedEvent:
    """Keeps what can be read of a broken frame: enough to count it, find it again and pass its place."""
    kind = header.get("t")
    did = payload.get("repo", payload.get("did"))
    return MalformedEvent(
        reason=error.reason,
        detail=error.detail,
        type=kind[:64] if isinstance(kind, str) else "",
        seq=_seq_or_none(payload),
        did=did if isinstance(did, str) and is_did(did) else None,
    )
