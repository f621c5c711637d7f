"""Operations of did:plc, and the rules by which they follow each other (docs/protocol.md#logs-of-plc-operations).

A did:plc is the hash of its first operation. Each later one names the CID of the one before, and is signed by a
rotation key of that one. A directory adds the time at which it accepted an operation, which nothing proves.
"""

import re
from base64 import b32encode, urlsafe_b64decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from hashlib import sha256
from struct import Struct
from types import NoneType
from typing import Any, Self

from indexer.atproto import cbor
from indexer.atproto.cid import DAG_CBOR, cid_of, cid_text
from indexer.atproto.crypto import COMPRESSED_POINT_BYTES as _KEY_BYTES
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
    """A signed operation with the right form. Its signature is not verified."""

    block: bytes  # the operation with its signature, in DAG-CBOR
    cid: str  # the CID of the block, as text
    signed: bytes  # the bytes that are signed: the operation without its signature, in DAG-CBOR
    sig: bytes
    prev: str | None  # the CID of the operation before, as text; None for a first operation
    state: Mapping[str, Any] | None  # the new state in the form of a `plc_operation`; None for a tombstone

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
        signed = cbor.encode({name: value for name, value in raw.items() if name != "sig"})
    except (ValueError, RecursionError) as error:  # half of a surrogate pair, a large number, or too many levels
        raise PlcLogError(LogFlaw.MALFORMED, str(error)) from None
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
class _Link:
    """An operation in force."""

    cid: str
    digest: bytes
    accepted_at: int  # the time at which the directory accepted it, in microseconds since 1970
    signer: int  # index of the key that signed it, among those of the operation before; of the first one, among its own
    keys: tuple[PublicKey, ...] | None  # the keys that may sign the next operation; None for a tombstone


class PlcChain:
    """The operations of a DID that are in force, oldest first.

    Attributes:
        head: The operation that was appended last; None if there is none since `from_bytes`.
    """

    def __init__(self, did: str) -> None:
        self.did = did
        self.head: Operation | None = None
        self._links: list[_Link] = []

    def __contains__(self, cid: str) -> bool:
        return any(link.cid == cid for link in self._links)

    @property
    def accepted_at(self) -> datetime | None:
        """The time at which the directory accepted the last operation, in UTC; None if there is none."""
        return _EPOCH + self._links[-1].accepted_at * _MICROSECOND if self._links else None

    def append(self, operation: Operation, accepted_at: datetime) -> Sequence[str]:
        """Append an operation that the directory accepted at this time; return the CIDs that it nullifies.

        Raises:
            PlcLogError: The operation is not valid here. Nothing was changed.
        """
        links, time = self._links, (accepted_at - _EPOCH) // _MICROSECOND
        keys = None if operation.state is None else tuple(_parse_keys(operation))
        if links:
            place = next((n for n in reversed(range(len(links))) if links[n].cid == operation.prev), None)
            allowed = None if place is None else links[place].keys
        else:
            place, allowed = -1, keys if operation.prev is None else None
        if place is None or allowed is None:
            raise PlcLogError(LogFlaw.BROKEN_CHAIN, f"{operation.cid} follows {operation.prev!r:.100}")
        if len(links) >= MAX_OPERATIONS:
            raise PlcLogError(LogFlaw.TOO_LARGE, f"more than {MAX_OPERATIONS:,} operations")
        if not links and did_of(operation.block) != self.did:
            raise PlcLogError(LogFlaw.OTHER_DID, f"{did_of(operation.block)} instead of {self.did}")
        if nullified := links[place + 1 :]:
            if time <= links[-1].accepted_at or time - nullified[0].accepted_at > RECOVERY_WINDOW // _MICROSECOND:
                raise PlcLogError(LogFlaw.RECOVERY_LATE, f"{operation.cid} of {accepted_at.isoformat()}")
            allowed = allowed[: nullified[0].signer]
        signer, digest = _find_signer(operation, allowed), sha256(operation.block).digest()
        links[place + 1 :] = [_Link(operation.cid, digest, time, signer, keys)]
        self.head = operation
        return [link.cid for link in nullified]

    def to_bytes(self) -> bytes:
        """Return the part of a chain that verifies the next operations: about 150 bytes. There must be an operation.

        An operation can be replaced within 72 hours, and only after the last one was accepted. So the part begins with
        the operation before the first one that may still be replaced. For each one, it has the hash, the time, the
        signer, and the number of keys, followed by the keys unless they are those of the operation before.
        """
        links = self._links
        oldest = links[-1].accepted_at - RECOVERY_WINDOW // _MICROSECOND
        first = next((n for n in range(1, len(links)) if links[n].accepted_at > oldest), 1)
        packed, before = [], None
        for link in links[first - 1 :]:
            keys = link.keys or ()
            count = _TOMBSTONE if link.keys is None else _SAME_KEYS if keys == before else len(keys)
            packed.append(_LINK.pack(link.digest, link.accepted_at, link.signer, count))
            packed += map(_pack_key, keys if count != _SAME_KEYS else ())
            before = keys
        return b"".join(packed)

    @classmethod
    def from_bytes(cls, did: str, packed: bytes) -> Self:
        """Return a chain that accepts the same next operations as the one that `to_bytes` was called for."""
        chain, place, keys = cls(did), 0, tuple[PublicKey, ...]()
        while place < len(packed):
            digest, time, signer, count = _LINK.unpack_from(packed, place)
            place += _LINK.size
            if count < _SAME_KEYS:
                points, place = range(place, end := place + count * _KEY_BYTES, _KEY_BYTES), end
                keys = tuple(_unpack_key(packed[at : at + _KEY_BYTES]) for at in points)
            link = _Link(cid_text(DAG_CBOR + digest), digest, time, signer, None if count == _TOMBSTONE else keys)
            chain._links.append(link)
        return chain


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_LINK = Struct(">32sqBB")  # the hash of the CID, microseconds, the place of the signer, and the number of keys
_SAME_KEYS, _TOMBSTONE = 254, 255


def _pack_key(key: PublicKey) -> bytes:
    """Return the compressed point; for P-256, its first byte is 4 or 5 instead of 2 or 3."""
    point = key.compressed
    return point if key.curve == "k256" else bytes([point[0] + 2]) + point[1:]


@lru_cache(maxsize=4_096)  # because the accounts of a host usually share their rotation keys
def _unpack_key(packed: bytes) -> PublicKey:
    form = packed[0]
    return PublicKey("k256", packed) if form <= 3 else PublicKey("p256", bytes([form - 2]) + packed[1:])  # noqa: PLR2004


@dataclass(frozen=True, slots=True)
class LogEntry:
    """An entry of a directory's audit log or export. Only its form is verified."""

    did: str
    operation: Any  # the JSON value that should be an operation
    cid: Any
    accepted_at: datetime  # the time at which the directory accepted it, in UTC
    seq: int | None  # its number in the export; None if there is none
    nullified: Any  # the mark of an operation that was replaced; None if the entry has none

    def parse(self) -> Operation:
        """Return the operation.

        Raises:
            PlcLogError: As of `parse_operation`, or INCONSISTENT if the entry has another CID.
        """
        operation = parse_operation(self.operation)
        if self.cid != operation.cid:
            raise PlcLogError(LogFlaw.INCONSISTENT, f"the entry of {operation.cid} has another CID")
        return operation


def parse_entry(raw: Any) -> LogEntry | None:
    """Return an entry from its JSON value; None if its type is not that of an operation.

    Raises:
        PlcLogError: With MALFORMED, if it has no did:plc, no time, or a wrong number.
    """
    if isinstance(raw, dict) and raw.get("type", _SEQUENCED) != _SEQUENCED:
        return None
    did, seq = (raw.get("did"), raw.get("seq")) if isinstance(raw, dict) else (None, None)
    if not isinstance(did, str) or not _is_did(did) or not (seq is None or (type(seq) is int and 0 < seq < _MAX_SEQ)):
        raise PlcLogError(LogFlaw.MALFORMED, "not an entry of a log")
    time = _parse_time(raw.get("createdAt"))
    return LogEntry(did, raw.get("operation"), raw.get("cid"), time, seq, raw.get("nullified"))


_SEQUENCED = "sequenced_op"
_MAX_SEQ = 2**63
_is_did = re.compile("did:plc:[a-z2-7]{24}").fullmatch


def verify_log(did: str, log: Any, *, allow_http: bool) -> DidDocument | None:
    """Verify an audit log, the JSON value with all operations of a DID, and return the parts of its DID document.

    There is none if the DID has a tombstone. With `allow_http`, the URL of the PDS may begin with `http:`.

    Raises:
        PlcLogError: The log does not prove the state of this DID.
    """
    if not isinstance(log, list) or not log:
        raise PlcLogError(LogFlaw.MALFORMED, "not a list of operations")
    if len(log) > MAX_OPERATIONS:
        raise PlcLogError(LogFlaw.TOO_LARGE, f"{len(log):,} operations")
    chain, marked, nullified = PlcChain(did), set[str](), set[str]()
    for raw in log:
        entry = parse_entry(raw)
        if entry is None or not isinstance(entry.nullified, bool):
            raise PlcLogError(LogFlaw.MALFORMED, "a value that does not have the form of an entry of an audit log")
        if entry.did != did:
            raise PlcLogError(LogFlaw.OTHER_DID, f"an entry that is not of {did}")
        operation = entry.parse()
        nullified |= set(chain.append(operation, entry.accepted_at))
        if entry.nullified:
            marked.add(operation.cid)
    if marked != nullified:
        raise PlcLogError(LogFlaw.INCONSISTENT, f"{len(marked)} operations are marked, {len(nullified)} are nullified")
    state = operation.state
    return None if state is None else parse_did_document(document_of(did, state), did, allow_http=allow_http)


def _parse_time(text: Any) -> datetime:
    """Return a time in UTC."""
    try:
        time = datetime.fromisoformat(text)
        in_utc = time.astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        raise PlcLogError(LogFlaw.MALFORMED, "an entry without a time") from None
    if time.tzinfo is None:
        raise PlcLogError(LogFlaw.MALFORMED, f"a time without a time zone: {text}")
    return in_utc


def _find_signer(operation: Operation, keys: Sequence[PublicKey]) -> int:
    """Return the index of the key that verifies the signature, the first one if it is listed twice.

    The last key is tried first, because it is usually the one of the host, which signs most operations. Two different
    keys cannot verify one signature: the hash that is signed depends on the keys.

    Raises:
        PlcLogError: With SIGNATURE_INVALID, if no key verifies it.
    """
    for key in reversed(keys):
        if key.verify(operation.sig, operation.signed):
            return keys.index(key)
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


def _is(type_: Any) -> Callable[[Any], bool]:
    """Return a function that returns True for a value of this type, which may be a union."""
    return lambda value: isinstance(value, type_)


_is_text = _is(str)


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
        "prev": _is(str | None),
        "sig": _is_text,
        "rotationKeys": _are_texts,
        "verificationMethods": _is_map_of_texts,
        "alsoKnownAs": _are_texts,
        "services": _are_services,
    },
    "plc_tombstone": {"type": _is_text, "prev": _is_text, "sig": _is_text},
    "create": {
        "type": _is_text,
        "prev": _is(NoneType),
        "sig": _is_text,
        **dict.fromkeys(("signingKey", "recoveryKey", "handle", "service"), _is_text),
    },
}
"""The fields of each type of operation, with a function that returns True for a valid value."""
