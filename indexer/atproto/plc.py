"""Operations of did:plc, and the rules by which they follow each other (docs/protocol.md#logs-of-plc-operations).

A did:plc is the hash of its first operation. Each later one names the CID of the one before, and is signed by a
rotation key of that one. A directory adds the time at which it accepted an operation, which nothing proves.
"""

import re
from base64 import b32encode, urlsafe_b64decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from hashlib import sha256
from typing import Any

from indexer.atproto import cbor
from indexer.atproto.cid import cid_of, cid_text
from indexer.atproto.crypto import PublicKey, parse_did_key
from indexer.atproto.did_document import PDS_TYPE, DidDocument, parse_did_document
from indexer.errors import PlcLogError, UpstreamError
from indexer.reasons import LogFlaw

MAX_OPERATIONS = 1_000
"""Operations of a log that are verified. A directory accepts at most 100 a week for a DID."""
MAX_OPERATION_BYTES = 100_000
"""Size of an operation in DAG-CBOR. Directories accept 4,000 to 7,500 bytes today, and accepted larger ones."""
MAX_ROTATION_KEYS = 10
"""Rotation keys of an operation. The specification allows five, and the directory has accepted ten."""
RECOVERY_WINDOW = timedelta(hours=72)
"""How long after an operation a rotation key of higher priority may replace it, and all later ones."""

_DID_HASH_BYTES = 15
# 64 bytes in base64url without padding. The last character has four bits that must be zero.
_is_signature = re.compile("[A-Za-z0-9_-]{85}[AQgw]").fullmatch


@dataclass(frozen=True, slots=True)
class Operation:
    """A signed operation with the right form. Its signature is not verified.

    Attributes:
        block: The operation with its signature, in DAG-CBOR.
        cid: The CID of the block, as text.
        signed: The bytes that are signed: the operation without its signature, in DAG-CBOR.
        prev: The CID of the operation before, as text; None for a first operation.
        state: The new state in the form of a `plc_operation`; None for a tombstone.
    """

    block: bytes
    cid: str
    signed: bytes
    sig: bytes
    prev: str | None
    state: Mapping[str, Any] | None

    @property
    def rotation_keys(self) -> Sequence[str]:
        """The keys that may sign the next operation, those with the highest priority first. A tombstone has none."""
        return () if self.state is None else self.state["rotationKeys"]


def parse_operation(raw: Any) -> Operation:
    """Return an operation from its JSON value. Unknown fields, which directories accepted once, are hashed like others.

    Raises:
        PlcLogError: MALFORMED, TOO_LARGE, or SIGNATURE_INVALID if the signature is not 64 bytes in base64url.
    """
    kind = raw.get("type") if isinstance(raw, dict) else None
    fields = _FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None or not all(name in raw and valid(raw[name]) for name, valid in fields.items()):
        raise PlcLogError(LogFlaw.MALFORMED, "a value that does not have the form of an operation")
    if not _is_signature(raw["sig"]):
        raise PlcLogError(LogFlaw.SIGNATURE_INVALID, f"not 64 bytes in base64url: {raw['sig']!r:.100}")
    try:
        block = cbor.encode(raw)
    except ValueError as error:  # a text has half of a surrogate pair, or a number is too large
        raise PlcLogError(LogFlaw.MALFORMED, str(error)) from None
    signed = cbor.encode({name: value for name, value in raw.items() if name != "sig"})
    sig = urlsafe_b64decode(raw["sig"] + "==")
    operation = Operation(block, cid_text(cid_of(block)), signed, sig, raw["prev"], _state(raw))
    if len(block) > MAX_OPERATION_BYTES or len(operation.rotation_keys) > MAX_ROTATION_KEYS:
        detail = f"{len(block):,} bytes and {len(operation.rotation_keys)} rotation keys in {operation.cid}"
        raise PlcLogError(LogFlaw.TOO_LARGE, detail)
    return operation


def did_of(genesis: bytes) -> str:
    """Return the DID that begins with an operation, from its DAG-CBOR with the signature."""
    return "did:plc:" + b32encode(sha256(genesis).digest()[:_DID_HASH_BYTES]).decode().lower()


def document_of(did: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the DID document of a state as JSON, with the parts that the protocol uses."""
    methods = [
        {
            "id": f"{did}#{name}",
            "type": "Multikey",
            "controller": did,
            "publicKeyMultibase": key.removeprefix("did:key:"),
        }
        for name, key in state["verificationMethods"].items()
    ]
    services = [
        {"id": f"#{name}", "type": service["type"], "serviceEndpoint": service["endpoint"]}
        for name, service in state["services"].items()
    ]
    return {"id": did, "alsoKnownAs": state["alsoKnownAs"], "verificationMethod": methods, "service": services}


@dataclass(frozen=True, slots=True)
class _Accepted:
    """An operation in force."""

    operation: Operation
    accepted_at: datetime


class PlcChain:
    """The operations of a DID that are in force, oldest first."""

    def __init__(self, did: str) -> None:
        self.did = did
        self._accepted: list[_Accepted] = []

    @property
    def head(self) -> Operation:
        """The last operation. There is one as soon as one was appended."""
        return self._accepted[-1].operation

    def append(self, operation: Operation, accepted_at: datetime) -> Sequence[Operation]:
        """Append an operation that the directory accepted at this time; return the operations that it nullifies.

        Raises:
            PlcLogError: The operation is not valid here. Nothing was changed.
        """
        if not self._accepted:
            return self._begin(operation, accepted_at)
        accepted = self._accepted
        position = next(
            (n for n in reversed(range(len(accepted))) if accepted[n].operation.cid == operation.prev), None
        )
        if position is None or accepted[position].operation.state is None:
            raise PlcLogError(LogFlaw.BROKEN_CHAIN, f"{operation.cid} follows {operation.prev!r:.100}")
        keys, nullified = _parse_keys(accepted[position].operation), accepted[position + 1 :]
        if nullified:
            age = accepted_at - nullified[0].accepted_at
            if accepted_at <= accepted[-1].accepted_at or age > RECOVERY_WINDOW:
                raise PlcLogError(LogFlaw.RECOVERY_LATE, f"{operation.cid} of {accepted_at.isoformat()}")
            replaced = nullified[0].operation
            keys = keys[: next(n for n, key in enumerate(keys) if key.verify(replaced.sig, replaced.signed))]
        _check_signature(operation, keys)
        accepted[position + 1 :] = [_Accepted(operation, accepted_at)]
        return [one.operation for one in nullified]

    def _begin(self, operation: Operation, accepted_at: datetime) -> Sequence[Operation]:
        if operation.prev is not None:
            raise PlcLogError(LogFlaw.BROKEN_CHAIN, f"the first operation follows {operation.prev!r:.100}")
        if did_of(operation.block) != self.did:
            raise PlcLogError(LogFlaw.OTHER_DID, f"{did_of(operation.block)} instead of {self.did}")
        _check_signature(operation, _parse_keys(operation))
        self._accepted.append(_Accepted(operation, accepted_at))
        return ()


def verify_log(did: str, log: Any, *, allow_http: bool) -> DidDocument | None:
    """Verify an audit log, the JSON value with all operations of a DID, and return the parts of its DID document.

    With `allow_http`, the URL of the PDS may begin with `http:`.

    Returns:
        None if the DID has a tombstone.

    Raises:
        PlcLogError: The log does not prove the state of this DID.
    """
    if not isinstance(log, list) or not log:
        raise PlcLogError(LogFlaw.MALFORMED, "not a list of operations")
    if len(log) > MAX_OPERATIONS:
        raise PlcLogError(LogFlaw.TOO_LARGE, f"{len(log):,} operations")
    chain, marked, nullified = PlcChain(did), set[str](), set[str]()
    for entry in log:
        operation, accepted_at, is_nullified = _parse_entry(did, entry)
        nullified |= {one.cid for one in chain.append(operation, accepted_at)}
        if is_nullified:
            marked.add(operation.cid)
    if marked != nullified:
        raise PlcLogError(LogFlaw.INCONSISTENT, f"{len(marked)} operations are marked, {len(nullified)} are nullified")
    state = chain.head.state
    return None if state is None else parse_did_document(document_of(did, state), did, allow_http=allow_http)


def _parse_entry(did: str, entry: Any) -> tuple[Operation, datetime, bool]:
    """Return the operation, the time of its acceptance, and True if it is marked as nullified.

    Raises:
        PlcLogError: MALFORMED, TOO_LARGE, OTHER_DID, SIGNATURE_INVALID or INCONSISTENT.
    """
    if not isinstance(entry, dict) or not isinstance(entry.get("nullified"), bool):
        raise PlcLogError(LogFlaw.MALFORMED, "a value that does not have the form of an entry of an audit log")
    if entry.get("did") != did:
        raise PlcLogError(LogFlaw.OTHER_DID, f"an entry that is not of {did}")
    operation = parse_operation(entry.get("operation"))
    if entry.get("cid") != operation.cid:
        raise PlcLogError(LogFlaw.INCONSISTENT, f"the entry of {operation.cid} has another CID")
    return operation, _parse_time(entry.get("createdAt")), entry["nullified"]


def _parse_time(text: Any) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        raise PlcLogError(LogFlaw.MALFORMED, "an entry without a time") from None
    if time.tzinfo is None:
        raise PlcLogError(LogFlaw.MALFORMED, f"a time without a time zone: {text}")
    return time


def _check_signature(operation: Operation, keys: Sequence[PublicKey]) -> None:
    """Raise `PlcLogError` with SIGNATURE_INVALID unless one of the keys verifies the signature.

    The last one is tried first, because it is usually the one of the host, which signs most operations.
    """
    if not any(key.verify(operation.sig, operation.signed) for key in reversed(keys)):
        raise PlcLogError(LogFlaw.SIGNATURE_INVALID, f"{operation.cid} is signed by none of {len(keys)} keys")


def _parse_keys(operation: Operation) -> Sequence[PublicKey]:
    """Return the rotation keys before the first one that cannot be parsed.

    Both reference implementations try the keys in order, and end with an error at that one.
    """
    keys = []
    for text in operation.rotation_keys:
        try:
            keys.append(_parse_key(text))
        except UpstreamError:
            break
    return keys


@lru_cache(maxsize=4_096)  # because the accounts of a host usually share their rotation keys
def _parse_key(text: str) -> PublicKey:
    return parse_did_key(text)


def _state(raw: dict[str, Any]) -> Mapping[str, Any] | None:
    """Return the state that an operation sets, as a `plc_operation` contains it; None for a tombstone."""
    if raw["type"] != "create":
        return raw if raw["type"] == "plc_operation" else None
    handle, service = raw["handle"], raw["service"]
    if not handle.startswith("at://"):
        handle = "at://" + handle.removeprefix("http://").removeprefix("https://")
    if not service.startswith(("http://", "https://")):
        service = "https://" + service
    return {
        "rotationKeys": [raw["recoveryKey"], raw["signingKey"]],
        "verificationMethods": {"atproto": raw["signingKey"]},
        "alsoKnownAs": [handle],
        "services": {"atproto_pds": {"type": PDS_TYPE, "endpoint": service}},
    }


def _is_none(value: Any) -> bool:
    return value is None


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_text_or_none(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_map_of_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


def _are_services(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(service, dict) and _is_text(service.get("type")) and _is_text(service.get("endpoint"))
        for service in value.values()
    )


_FIELDS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "plc_operation": {
        "type": _is_text,
        "prev": _is_text_or_none,
        "sig": _is_text,
        "rotationKeys": _are_texts,
        "verificationMethods": _is_map_of_texts,
        "alsoKnownAs": _are_texts,
        "services": _are_services,
    },
    "plc_tombstone": {"type": _is_text, "prev": _is_text, "sig": _is_text},
    "create": {
        "type": _is_text,
        "prev": _is_none,
        "sig": _is_text,
        **dict.fromkeys(("signingKey", "recoveryKey", "handle", "service"), _is_text),
    },
}
"""The fields of each type of operation, with a function that returns True for a valid value."""
