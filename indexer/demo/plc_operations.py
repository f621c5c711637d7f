"""Signed operations of did:plc, for the local network and for tests."""

from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from typing import Any

from indexer.atproto.crypto import PrivateKey
from indexer.atproto.did_document import PDS_TYPE
from indexer.demo import dag_cbor


def update(
    rotation_keys: Sequence[str], prev: str | None, *, handle: str, signing_key: str, pds: str
) -> dict[str, Any]:
    """Return an unsigned operation that sets a new state. Keys are did:keys, `pds` is a URL, `prev` a CID as text."""
    return {
        "type": "plc_operation",
        "rotationKeys": list(rotation_keys),
        "verificationMethods": {"atproto": signing_key},
        "alsoKnownAs": [f"at://{handle}"],
        "services": {"atproto_pds": {"type": PDS_TYPE, "endpoint": pds}},
        "prev": prev,
    }


def tombstone(prev: str) -> dict[str, Any]:
    """Return an unsigned operation that ends a DID. `prev` is a CID as text."""
    return {"type": "plc_tombstone", "prev": prev}


def sign(operation: Mapping[str, Any], key: PrivateKey) -> dict[str, Any]:
    """Return a signed operation."""
    sig = key.sign(dag_cbor.encode(operation))
    return {**operation, "sig": urlsafe_b64encode(sig).decode().rstrip("=")}
