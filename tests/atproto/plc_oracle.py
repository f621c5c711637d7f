"""The rules of did:plc in their most obvious form: all operations are kept, and what is in force is derived each time.

It shares no code with the indexer.
"""

import re
from base64 import b32encode, urlsafe_b64decode
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Any

import cbor2
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from multiformats import multibase, multicodec

Json = dict[str, Any]
CURVES: dict[str, ec.EllipticCurve] = {"secp256k1-pub": ec.SECP256K1(), "p256-pub": ec.SECP256R1()}
ORDERS = {
    "secp256k1-pub": 0xFFFFFFFF_FFFFFFFF_FFFFFFFF_FFFFFFFE_BAAEDCE6_AF48A03B_BFD25E8C_D0364141,
    "p256-pub": 0xFFFFFFFF_00000000_FFFFFFFF_FFFFFFFF_BCE6FAAD_A7179E84_F3B9CAC2_FC632551,
}
FIELDS = {
    "plc_operation": {"type", "prev", "sig", "rotationKeys", "verificationMethods", "alsoKnownAs", "services"},
    "plc_tombstone": {"type", "prev", "sig"},
    "create": {"type", "prev", "sig", "signingKey", "recoveryKey", "handle", "service"},
}


class InvalidOperationError(Exception):
    """The operation is not valid at its place."""


@dataclass(frozen=True)
class Accepted:
    """An operation that was valid when it came, and is in force unless another one took its place."""

    operation: Json
    time: datetime

    @property
    def cid(self) -> str:
        return cid_of(self.operation)


@dataclass
class Oracle:
    """All operations of a DID that were valid when they came, in the order in which they came."""

    did: str
    accepted: list[Accepted] = field(default_factory=list)

    def in_force(self) -> list[Accepted]:
        """Return the operations in force: from the first one on, each time the last one that names it."""
        chain = self.accepted[:1]
        while chain and (followers := [one for one in self.accepted if one.operation["prev"] == chain[-1].cid]):
            chain.append(followers[-1])
        return chain

    def nullified(self) -> set[str]:
        """Return the CIDs of all operations that are not in force."""
        return {one.cid for one in self.accepted} - {one.cid for one in self.in_force()}

    def accept(self, operation: Any, time: datetime) -> None:
        """Add an operation. Raises `InvalidOperationError` if it is not valid."""
        check_form(operation)
        chain = self.in_force()
        if not chain:
            digest = sha256(cbor2.dumps(operation, canonical=True)).digest()
            check(operation["prev"] is None)
            check(self.did == "did:plc:" + b32encode(digest).decode().lower()[:24])
            allowed = rotation_keys(operation)
        else:
            places = [place for place, one in enumerate(chain) if one.cid == operation["prev"]]
            check(len(places) == 1)
            parent, later = chain[places[0]], chain[places[0] + 1 :]
            check(parent.operation["type"] != "plc_tombstone")
            allowed = rotation_keys(parent.operation)
            if later:
                check(time > chain[-1].time)
                check(time - later[0].time <= timedelta(hours=72))
                allowed = allowed[: first_signer(later[0].operation, allowed)]
        first_signer(operation, allowed)
        self.accepted.append(Accepted(operation, time))


def cid_of(operation: Json) -> str:
    """Return the CID of a signed operation, as text."""
    digest = sha256(cbor2.dumps(operation, canonical=True)).digest()
    return "b" + b32encode(b"\x01\x71\x12\x20" + digest).decode().lower().rstrip("=")


def check(condition: bool) -> None:
    if not condition:
        raise InvalidOperationError


def check_form(operation: Any) -> None:
    check(isinstance(operation, dict))
    kind = operation.get("type")
    check(isinstance(kind, str) and kind in FIELDS and operation.keys() >= FIELDS[kind])
    texts = [operation[name] for name in FIELDS[kind] if name not in {"prev", "services"}]
    for name in ("rotationKeys", "alsoKnownAs"):
        if name in FIELDS[kind]:
            check(isinstance(operation[name], list))
            texts.remove(operation[name])
            texts += operation[name]
    if kind == "plc_operation":
        methods, services = operation["verificationMethods"], operation["services"]
        check(isinstance(methods, dict) and isinstance(services, dict))
        texts.remove(methods)
        texts += methods.values()
        for service in services.values():
            check(isinstance(service, dict) and service.keys() >= {"type", "endpoint"})
            texts += [service["type"], service["endpoint"]]
    check(all(isinstance(text, str) for text in texts))
    prev = operation["prev"]
    check(prev is None if kind == "create" else isinstance(prev, str) or (kind == "plc_operation" and prev is None))
    try:
        check(len(cbor2.dumps(operation, canonical=True)) <= 100_000)
    except UnicodeEncodeError:
        raise InvalidOperationError from None
    check(len(rotation_keys(operation)) <= 10)


def rotation_keys(operation: Json) -> Sequence[str]:
    """Return the keys that may sign the operation after this one; none after a tombstone."""
    if operation["type"] == "create":
        return [operation["recoveryKey"], operation["signingKey"]]
    keys: Sequence[str] = operation.get("rotationKeys", ())
    return keys


def first_signer(operation: Json, keys: Sequence[str]) -> int:
    """Return the index of the first key that verifies the signature. A bad key before it is an error."""
    unsigned = {name: value for name, value in operation.items() if name != "sig"}
    message = cbor2.dumps(unsigned, canonical=True)
    check(re.fullmatch("[A-Za-z0-9_-]{86}", operation["sig"]) is not None)
    sig = urlsafe_b64decode(operation["sig"] + "==")
    check(operation["sig"] == multibase.get("base64url").encode(sig)[1:])  # without bits behind the last byte
    for index, key in enumerate(keys):
        if _verifies(key, sig, message):
            return index
    raise InvalidOperationError


def _verifies(did_key: str, sig: bytes, message: bytes) -> bool:
    check(did_key.startswith("did:key:z") and len(did_key) < 200)
    try:
        codec, point = multicodec.unwrap(multibase.decode(did_key.removeprefix("did:key:")))
        check(len(point) == 33)
        key = ec.EllipticCurvePublicKey.from_encoded_point(CURVES[codec.name], point)
    except (ValueError, KeyError):
        raise InvalidOperationError from None
    r, s, order = int.from_bytes(sig[:32]), int.from_bytes(sig[32:]), ORDERS[codec.name]
    if not (0 < r < order and 0 < s <= order // 2):
        return False
    try:
        key.verify(encode_dss_signature(r, s), message, ec.ECDSA(SHA256()))
    except InvalidSignature:
        return False
    return True


def verified_state(did: str, log: Any) -> Json | None:
    """Return the last operation in force of an audit log; None if the log is not valid."""
    oracle, marked = Oracle(did), set()
    try:
        check(isinstance(log, list) and 0 < len(log) <= 1_000)
        for entry in log:
            check(isinstance(entry, dict) and entry.get("did") == did and isinstance(entry.get("nullified"), bool))
            oracle.accept(entry.get("operation"), time_of(entry.get("createdAt")))
            check(entry.get("cid") == oracle.accepted[-1].cid)
            if entry["nullified"]:
                marked.add(entry["cid"])
        check(marked == oracle.nullified())
    except InvalidOperationError:
        return None
    return oracle.in_force()[-1].operation


def time_of(text: Any) -> datetime:
    """Return the time. Raises `InvalidOperationError` if it has no time zone."""
    try:
        time = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        raise InvalidOperationError from None
    check(time.tzinfo is not None)
    return time
