"""Makes logs of did:plc operations, valid and invalid ones."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from datetime import UTC, datetime, timedelta
from typing import Any

from indexer.atproto.crypto import PrivateKey
from indexer.atproto.plc import did_of
from indexer.demo import dag_cbor
from indexer.demo.plc_operations import sign, tombstone, update
from tests.atproto.plc_oracle import Oracle, cid_of

KEYS = [PrivateKey("k256" if n % 2 else "p256", n.to_bytes(32)) for n in (1, 2, 3, 4)]
K256_ONE, P256_ONE = PrivateKey("k256", (1).to_bytes(32)), PrivateKey("p256", (1).to_bytes(32))
START = datetime(2025, 1, 1, tzinfo=UTC)


def did_keys(*keys: PrivateKey) -> list[str]:
    return [key.public.did_key() for key in keys]


def operation(*rotation_keys: PrivateKey, prev: str | None = None, **changes: Any) -> dict[str, Any]:
    """Return an unsigned operation with fields that may replace the usual ones."""
    keys = did_keys(*rotation_keys)
    signing_key = P256_ONE.public.did_key()
    return update(keys, prev, handle="alice.example", signing_key=signing_key, pds="https://pds.example") | changes


class Log:
    """An audit log that grows. Each operation follows the last one, an hour later, unless told otherwise.

    Attributes:
        did: The DID, which its first operation decides.
        entries: The JSON values.
    """

    def __init__(self, *rotation_keys: PrivateKey, signer: PrivateKey | None = None, **changes: Any) -> None:
        genesis = sign(operation(*rotation_keys, **changes), signer or rotation_keys[0])
        self.did = did_of(dag_cbor.encode(genesis))
        self.entries: list[dict[str, Any]] = []
        self.append(genesis, hours=0)

    def append(self, signed: Mapping[str, Any], hours: float = 1) -> str:
        """Append a signed operation, and mark what is nullified then; return its CID."""
        time = (datetime.fromisoformat(self.entries[-1]["createdAt"]) if self.entries else START) + timedelta(
            hours=hours
        )
        cid = cid_of(dict(signed))
        self.entries.append(
            {"did": self.did, "operation": signed, "cid": cid, "nullified": False, "createdAt": time.isoformat()}
        )
        return cid

    def update(
        self, signer: PrivateKey, *rotation_keys: PrivateKey, prev: str | None = None, hours: float = 1, **changes: Any
    ) -> str:
        """Append an update, with the same rotation keys if none are given; return its CID."""
        prev = prev or self.entries[-1]["cid"]
        if not rotation_keys:
            changes.setdefault("rotationKeys", deepcopy(self.entries[-1]["operation"].get("rotationKeys")))
        return self.append(sign(operation(*rotation_keys, prev=prev, **changes), signer), hours)

    def end(self, signer: PrivateKey, prev: str | None = None, hours: float = 1) -> str:
        """Append a tombstone; return its CID."""
        return self.append(sign(tombstone(prev or self.entries[-1]["cid"]), signer), hours)

    def marked(self) -> list[dict[str, Any]]:
        """Return the entries with the marks that the rules demand. Every operation must be valid."""
        return with_marks(self.entries)


def with_marks(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries, marked as the rules demand. Raises `InvalidOperationError` unless all are valid."""
    oracle = Oracle(entries[0]["did"])
    for entry in entries:
        oracle.accept(entry["operation"], datetime.fromisoformat(entry["createdAt"]))
    nullified = oracle.nullified()
    return [entry | {"nullified": entry["cid"] in nullified} for entry in entries]
